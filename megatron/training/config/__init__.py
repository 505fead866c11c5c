"""Parsing and validation of configurations. This module does not import torch."""
