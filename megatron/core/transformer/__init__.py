"""Transformer layers with tensor- and sequence-parallel linear layers."""
