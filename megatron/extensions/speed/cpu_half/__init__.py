"""16-bit matrix products and attention computed in fp32, on CPUs without instructions for them.

This extension has no flags. A run on such CPUs uses the extension automatically on all ranks, and prints a notice. Read
`products`.
"""
