"""Variants of softmax attention, and context-parallel attention."""
