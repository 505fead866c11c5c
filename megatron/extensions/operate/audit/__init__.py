"""Audits of a live run: every K-th step is computed twice, by independent means. The two results are compared tensor by
tensor, which identifies a rank that computes or transmits wrong values.

Flags: --audit-interval, --audit-by.

Read `verdict` first: it decides which rank the differences point to. `sketch` summarizes a tensor in a few numbers,
which show whether two tensors are equal and how far apart they are. `tape` records the sketches of a pass: module
outputs, messages and gradients, in order of computation. `peer` contains the callbacks.
"""
