"""Triton kernels, each with a torch twin that gives the same bits in Triton's interpreter, except for the order of
sums. A GPU uses fused multiply-add and its own exponential function, so its last bits may differ.

A kernel is worthwhile if torch.compile does not make one good kernel of a region (`compiled_regions.py`). For a subject
S, `S.py` holds the twin, the operator `megatron::...` with a fake implementation, and the function that callers use: it
runs the operator on GPUs with Triton, and the twin elsewhere. The modules `..._triton` contain the kernels. Only they
import Triton, and they are imported when an operator first runs. An optional operand of a kernel is None if it is
absent, for which Triton compiles a variant; operands that belong together form a tuple.
"""
