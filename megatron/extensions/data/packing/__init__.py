"""Packing: whole documents in samples, as many as fit (--sequence-packing best-fit).

Read `bins` for the algorithm, on lengths alone, then `order` for the order of samples that the seed and the lengths
determine, and `packed_dataset` for the samples.
"""
