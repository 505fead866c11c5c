"""Mixture of experts: routers, and the place where the experts' output is added."""
