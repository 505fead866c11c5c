"""Functions for testing Triton kernels without a GPU. Kernels are interpreted on CPU tensors, or compiled for GPUs that
are not present."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.apart import python_apart


def apart(interpret: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in a separate process. Triton decides only once per process whether to interpret kernels, and it keeps
    the conversions of the first GPU for which it compiles. The test's parameters must be values that can be recreated
    from their repr."""

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def started(**parameters: Any) -> None:
            pytest.importorskip("triton")
            call = f"from {test.__module__} import {test.__name__}; {test.__name__}.__wrapped__(**{parameters})"
            if interpret:
                call = f"from tests import triton_cases; triton_cases.end_loops_at_loaded_numbers(); {call}"
            python_apart("-c", call, TRITON_INTERPRET=str(int(interpret)), code=0)

        return started

    return decorated


def end_loops_at_loaded_numbers() -> None:
    """Make the interpreter accept an array of one element as a loop bound, as a GPU does. Since numpy 2.5, Python does
    not accept an array of one element as an integer."""
    from triton.runtime import interpreter

    theirs = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        theirs(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def round_to_fp8_as_torch() -> None:
    """Make Triton's interpreter round fp32 numbers to fp8 and bf16 in the same way as torch. The interpreter's own
    rounding to fp8 loses the carry out of the mantissa, and its conversion to bf16 truncates."""
    from triton import language as tl
    from triton.runtime import interpreter

    formats = {
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
        tl.float8e5: (torch.float8_e5m2, torch.uint8),
        tl.bfloat16: (torch.bfloat16, torch.uint16),
    }
    theirs = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in formats:
            return theirs(data, source, target, rounding)
        exact = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        dtype, bits = formats[target]
        return exact.to(dtype).view(bits).numpy()

    interpreter._convert_float = convert


def multiply_bf16() -> None:
    """Make Triton's interpreter multiply bf16 matrices correctly. By default, the interpreter treats the bits of bf16
    numbers as integers."""
    from triton import language as tl
    from triton.runtime import interpreter

    theirs = interpreter.InterpreterBuilder.create_dot

    def in_fp32(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        values = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(values, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return theirs(self, in_fp32(a), in_fp32(b), *more)

    interpreter.InterpreterBuilder.create_dot = create_dot


def compiled(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], capability: int, **options: int
) -> Any:
    """Compile a kernel for a GPU. Pointers and integer arguments are assumed to be multiples of 16, as in large layers.
    The type of an operand may be a tuple of types. If `types` contains None or a number instead of a type, the operand
    is a compile-time constant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constexprs, aligned = dict[tuple[int, ...], Any](), dict[tuple[int, ...], Any]()

    def type_of(path: tuple[int, ...], given: Any) -> Any:
        if isinstance(given, tuple):
            parts = [type_of((*path, place), part) for place, part in enumerate(given)]
            return given._make(parts) if hasattr(given, "_make") else tuple(parts)
        if not isinstance(given, str):
            constexprs[path] = given
            return "constexpr"
        aligned[path] = [["tt.divisibility", 16]]
        return given

    signature = {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            constexprs[place,] = constants[name]
        signature[name] = "constexpr" if name in constants else type_of((place,), types[name])
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def run_on_cpu(*operators: Any) -> None:
    """Let GPU operators run on CPU tensors in Triton's interpreter."""
    for operator in operators:
        operator.register_kernel("cpu", operator._init_fn)


def stack_tool() -> str | None:
    """Return the path of cuobjdump in Triton's package, or None if it is missing. cuobjdump reports the resources that
    a compiled kernel uses."""
    try:
        import triton

        return str(triton.knobs.nvidia.cuobjdump.path)
    except (ImportError, RuntimeError):
        return None


def stack_of(built: Any) -> int:
    """Return the stack bytes per thread of a compiled kernel. If a kernel has no arrays, its stack contains only
    spilled registers."""
    tool = stack_tool()
    assert tool is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"\bSTACK:(\d+)", report)
    return int(stack)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bits. NaNs with different bits count as equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    both_nan = a.float().isnan() & b.float().isnan()
    return bool(((a.view(bits) == b.view(bits)) | both_nan).all())
