"""Mixture of experts: routers, shortcut-connected experts, and upcycling of dense models."""
