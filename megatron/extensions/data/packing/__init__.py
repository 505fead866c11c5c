"""Sequence packing, which makes samples from whole documents (--sequence-packing best-fit), and balancing of attention
work between replicas.

Read `bins` first: it contains the packing algorithm, which depends only on document lengths. Then read `order`, which
computes the documents of each sample from the seed and the document lengths, and `packed_dataset`, which reads the
samples. `dealing` assigns samples to the replicas of a step such that all replicas have about the same work
(--balance-packed-samples).
"""
