"""Mixture of experts: router, dispatcher, experts, and the layer that they make up."""
