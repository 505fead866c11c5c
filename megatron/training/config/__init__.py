"""From a command line to a validated configuration. This module does not import torch."""
