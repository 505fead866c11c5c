"""Sequence packing: samples of whole documents (--sequence-packing best-fit), and balanced work between replicas.

Read `bins` first: it contains the packing algorithm, which depends only on document lengths. Then read `order` for the
order of samples, which depends on the seed and the document lengths, and `packed_dataset` for the samples. `dealing`
assigns samples of equal work to the replicas of a step (--balance-packed-samples).
"""
