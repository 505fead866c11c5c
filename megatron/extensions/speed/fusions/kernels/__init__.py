"""Triton kernels. Each kernel has a twin, which is an equivalent function in plain torch. In Triton's interpreter, a
kernel and its twin give bit-equal results unless they compute sums in a different order. On a GPU, the last bits may
differ, because the GPU uses fused multiply-add and a different exponential function.

A Triton kernel is worthwhile only if torch.compile does not turn a region into one fast kernel (`compiled_regions.py`).
The code for a subject, such as norms, is in two modules. `norms.py` contains the twin, the operator `megatron::...`
with a fake implementation, and the function that callers use. The function that callers use runs the operator on GPUs
with Triton, and the twin on other devices. The modules `..._triton` contain the kernels. Only the modules `..._triton`
import Triton, and they are imported when an operator first runs. If an optional operand of a kernel is None, Triton
compiles a variant of the kernel without this operand. Kernels receive related operands as a tuple.
"""
