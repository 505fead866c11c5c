"""Audit of a live run: every K-th step is computed a second time by other means, and the two are compared tensor by
tensor, so that a rank that computes or transmits wrong values is found and named.

Flags: --audit-interval, --audit-by.

Read `verdict` first: it decides which rank the differences point to. `sketch` computes a few numbers for a tensor that
tell whether two tensors are equal, or how far apart they are. `tape` records the sketches of a pass: module outputs,
messages and gradients, in the order in which a rank computes them. `peer` has the callbacks.
"""
