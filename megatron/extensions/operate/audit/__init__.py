"""Audits of a live run, in which every K-th step is computed twice by independent means. The two results are compared
tensor by tensor. This comparison identifies a rank that computes or sends wrong values.

Flags: --audit-interval, --audit-by.

Read `verdict` first, which determines the rank that caused the differences. `sketch` summarizes a tensor in a few
numbers. The numbers of two tensors show whether the tensors are equal, and suffice to estimate their distance. `tape`
records the sketches of module outputs, messages and gradients in a pass, in order of computation. `peer` contains the
callbacks.
"""
