"""Triton kernels, each with a twin in plain torch. In Triton's interpreter, a kernel and its twin give the same bits,
except where sums have another order. On a GPU, the last bits may differ, because the GPU uses fused multiply-add and
its own exponential function.

A kernel is worthwhile if torch.compile does not turn a region into one good kernel (`compiled_regions.py`). For a
subject S, `S.py` contains the twin, the operator `megatron::...` with a fake implementation, and the function that
callers use, which runs the operator on GPUs with Triton, and the twin elsewhere. The modules `..._triton` contain the
kernels. Only these modules import Triton, and they are imported when an operator first runs. An absent optional operand
of a kernel is None, and Triton compiles a variant for this case. Operands that belong together form a tuple.
"""
