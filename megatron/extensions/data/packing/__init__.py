"""Sequence packing: samples of whole documents (--sequence-packing best-fit), and balanced work between replicas.

Read `bins` first: it contains the packing algorithm, which depends only on document lengths. Then read `order` for the
order of samples, which depends on the seed and the document lengths, and `packed_dataset` for the samples. `dealing`
assigns samples to the replicas of a step such that all replicas have about the same work (--balance-packed-samples).
"""
