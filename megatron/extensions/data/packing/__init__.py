"""Packing: samples that consist of as many whole documents as fit (--sequence-packing best-fit), and equal work for
replicas.

Read `bins` for the algorithm, which depends on lengths alone, then `order` for the order of samples that the seed and
the lengths determine, and `packed_dataset` for the samples. `dealing` gives the replicas of a step samples with equal
work (--balance-packed-samples).
"""
