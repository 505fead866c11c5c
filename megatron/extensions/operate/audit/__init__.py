"""Audits of a live run: every K-th step is computed a second time by independent means. An audit compares the tensors
of both computations one by one, and thereby identifies a rank that computes or sends wrong values.

Flags: --audit-interval, --audit-by.

Read `verdict` first: it determines which rank caused a difference. `sketch` summarizes a tensor in a few numbers.
Comparing two sketches shows whether the tensors are equal, and otherwise yields an estimate of their distance. `tape`
records the sketches of module outputs, messages and gradients in a pass, in order of computation. `peer` and
`background` contain the callbacks for the methods that --audit-by selects.
"""
