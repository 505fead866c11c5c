"""16-bit matrix products and attention computed in fp32, on CPUs without instructions for them.

There are no flags: a run on such a CPU uses this automatically, on all ranks, and reports it. Read `products`.
"""
