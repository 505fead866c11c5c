"""Compute 16-bit matrix products and attention in fp32 on CPUs that lack 16-bit matrix instructions.

This extension has no flags. A run on such CPUs uses the extension automatically on all ranks, and prints a notice. Read
`products`.
"""
