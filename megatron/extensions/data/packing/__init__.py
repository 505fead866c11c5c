"""Sequence packing: samples of whole documents (--sequence-packing best-fit), and balanced work between replicas.

Read `bins` for the algorithm, which depends only on document lengths, then `order` for the order of samples, which the
seed and the lengths determine, and `packed_dataset` for the samples. `dealing` assigns samples of equal work to the
replicas of a step (--balance-packed-samples).
"""
