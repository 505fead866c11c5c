"""Matrix products and attention of 16-bit dtypes in fp32, on CPUs without instructions for them.

It has no flags: a run on such a CPU takes it by itself, on all ranks, and says so. Read `products`.
"""
