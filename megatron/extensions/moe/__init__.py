"""Mixture of experts: routers, and where the experts' output is added."""
