"""Packing: whole documents in samples, as many as fit (--sequence-packing best-fit), and equal work of replicas.

Read `bins` for the algorithm, on lengths alone, then `order` for the order of samples that the seed and the lengths
determine, and `packed_dataset` for the samples. `dealing` gives the replicas of a step samples of equal work
(--balance-packed-samples).
"""
