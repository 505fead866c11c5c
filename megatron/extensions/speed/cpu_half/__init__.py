"""Compute 16-bit matrix products and attention in fp32 on CPUs that lack 16-bit matrix instructions.

This extension has no flags. If any rank has a CPU without these instructions, all ranks use the extension
automatically, and the run prints a notice. Read `products.py`.
"""
