"""cuBLASLt GEMMs with an addend (beta = 1), called through ctypes. torch does not expose beta for fp8 operands, and
first copies a 16-bit addend into the output.

The constants and signatures come from cublasLt.h, and are the same in CUDA 12 and CUDA 13. The module checks the status
of every cuBLASLt call. If cuBLASLt does not support an operation, the call raises RuntimeError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

R_32F = 0
COMPUTE_32F = 68
OP_T = 1
ADDS_BIAS = 4
TYPES = {
    torch.float32: R_32F,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
TRANS_A = 3
EPILOGUE = 7
BIAS_POINTER = 8
A_SCALE_POINTER = 17
B_SCALE_POINTER = 18
FAST_ACCUM = 25
BIAS_TYPE = 26
"""Identifiers of the attributes of a cuBLASLt matrix product descriptor. The attribute for the transposition of B is
not needed, because B is not transposed by default."""

MAX_WORKSPACE, MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
"""Identifiers of the preference attributes for the maximum workspace in bytes, and for the minimum alignments of A, B,
C and D."""

WORKSPACE = 32 * 2**20
ALIGNMENT = 16


class _Algorithm(ctypes.Structure):
    """Structure `cublasLtMatmulHeuristicResult_t`, which begins with the algorithm."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass
class _Product:
    """cuBLASLt matrix product that is prepared for one shape."""

    description: ctypes.c_void_p
    a: ctypes.c_void_p
    b: ctypes.c_void_p
    out: ctypes.c_void_p
    algorithm: _Algorithm


@cache
def _library() -> ctypes.CDLL:
    """Return the cuBLASLt library that torch has loaded."""
    version = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{version}")
    except OSError as error:
        raise RuntimeError(f"cuBLASLt cannot be loaded: {error}") from error


Value = (
    ctypes.c_int
    | ctypes.c_int32
    | ctypes.c_int8
    | ctypes.c_uint32
    | ctypes.c_uint64
    | ctypes.c_size_t
    | ctypes.c_void_p
)
"""Types of the values that cuBLASLt attributes accept."""


def _call(name: str, *args: object) -> None:
    status = getattr(_library(), name)(*args)
    if status != 0:
        raise RuntimeError(f"{name} returned status {status}")


@cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _set(function: str, target: ctypes.c_void_p, attribute: int, value: Value) -> None:
    _call(function, target, ctypes.c_int(attribute), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


def _layout(kind: int, rows: int, columns: int) -> ctypes.c_void_p:
    """Create the layout of a contiguous column-major matrix."""
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), ctypes.c_int(kind), *sizes)
    return layout


class Kind(NamedTuple):
    """Properties of a matrix product except its sizes: dtypes, bias, and precision of partial sums."""

    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    """Dtype of the output and the addend."""

    bias: bool = False
    fast: bool = False
    """True if partial sums of fp8 products may be kept with fewer bits than fp32."""

    @property
    def scaled(self) -> bool:
        """True if the operands have scales."""
        return self.a.itemsize == 1


def _description(kind: Kind) -> ctypes.c_void_p:
    """Return a cuBLASLt descriptor of the product D = C + Aᵀ B, summed in fp32."""
    description = ctypes.c_void_p()
    _call("cublasLtMatmulDescCreate", ctypes.byref(description), ctypes.c_int(COMPUTE_32F), ctypes.c_int(R_32F))
    _set_of_product(description, TRANS_A, ctypes.c_int32(OP_T))
    if kind.scaled:
        _set_of_product(description, FAST_ACCUM, ctypes.c_int8(kind.fast))
    if kind.bias:
        _set_of_product(description, EPILOGUE, ctypes.c_int32(ADDS_BIAS))
        _set_of_product(description, BIAS_TYPE, ctypes.c_int32(TYPES[kind.out]))
    return description


def _set_of_product(description: ctypes.c_void_p, attribute: int, value: Value) -> None:
    _set("cublasLtMatmulDescSetAttribute", description, attribute, value)


def _set_pointers(description: ctypes.c_void_p, pointers: Mapping[int, int]) -> None:
    for attribute, address in pointers.items():
        _set_of_product(description, attribute, ctypes.c_void_p(address))


@cache
def _prepared(device: int, o: int, i: int, n: int, kind: Kind) -> _Product:
    """Select the algorithm for a product. cuBLAS treats the row-major `out` [o, i] as a column-major matrix [i, o]. The
    operand A of cuBLAS is therefore `b`, and the operand B is `a`."""
    description = _description(kind)
    pointers = (*((A_SCALE_POINTER, B_SCALE_POINTER) if kind.scaled else ()), *((BIAS_POINTER,) if kind.bias else ()))
    # placeholders: every call replaces these pointers
    _set_pointers(description, dict.fromkeys(pointers, ALIGNMENT))
    a = _layout(TYPES[kind.b], n, i)
    b = _layout(TYPES[kind.a], n, o)
    out = _layout(TYPES[kind.out], i, o)
    preference = ctypes.c_void_p()
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    set_preference = "cublasLtMatmulPreferenceSetAttribute"
    _set(set_preference, preference, MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE))
    for attribute in MIN_ALIGNMENTS:
        _set(set_preference, preference, attribute, ctypes.c_uint32(ALIGNMENT))
    algorithm, found = _Algorithm(), ctypes.c_int()
    operands = description, a, b, out, out, preference
    _call(
        "cublasLtMatmulAlgoGetHeuristic",
        _handle(device),
        *operands,
        ctypes.c_int(1),
        ctypes.byref(algorithm),
        ctypes.byref(found),
    )
    _call("cublasLtMatmulPreferenceDestroy", preference)
    if found.value == 0 or algorithm.state != 0:
        raise RuntimeError(
            f"cuBLASLt does not support a product [{o}, {n}] x [{n}, {i}] of {kind.a} that adds to {kind.out}"
        )
    return _Product(description, a, b, out, algorithm)


def add_product_cublaslt_(out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, overwrite: bool) -> None:
    """Compute out += a bᵀ, as described for `gemm_choice.KERNELS`. Scales apply to whole matrices. Partial sums are
    computed with full fp32 precision."""
    _multiply(out, out, a, b, Kind(a.dtype, b.dtype, out.dtype), (a_scale, b_scale), None, 0.0 if overwrite else 1.0)


def residual_product(
    a: Tensor, b: Tensor, addend: Tensor, bias: Tensor | None, scales: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Compute addend + a bᵀ + bias in one kernel. Scales apply to whole matrices."""
    out, kind = torch.empty_like(addend), Kind(a.dtype, b.dtype, addend.dtype, bias is not None, a.itemsize == 1)
    _multiply(out, addend, a, b, kind, scales, bias, 1.0)
    return out


def _multiply(
    out: Tensor,
    addend: Tensor,
    a: Tensor,
    b: Tensor,
    kind: Kind,
    scales: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    beta: float,
) -> None:
    """Compute out [o, i] = a bᵀ + beta * addend + bias for a [o, n] and b [i, n]. All tensors must be contiguous."""
    (o, i) = out.shape
    n = a.shape[1]
    device = out.device.index
    operands = [out, addend, a, b, *(() if bias is None else (bias,))]
    if any(x.data_ptr() % ALIGNMENT or not x.is_contiguous() for x in operands):
        raise RuntimeError("operands must be contiguous and aligned to 16 bytes")
    if (scales is not None) != kind.scaled or any(scale.ndim for scale in scales or ()):
        raise RuntimeError("each fp8 operand must have one scale, and operands of other dtypes must have none")
    product = _prepared(device, o, i, n, kind)
    pointers = {} if scales is None else {A_SCALE_POINTER: scales[1].data_ptr(), B_SCALE_POINTER: scales[0].data_ptr()}
    _set_pointers(product.description, pointers | ({} if bias is None else {BIAS_POINTER: bias.data_ptr()}))
    workspace = torch.empty(product.algorithm.workspace, dtype=torch.uint8, device=out.device)
    _call(
        "cublasLtMatmul",
        _handle(device),
        product.description,
        ctypes.byref(ctypes.c_float(1.0)),
        ctypes.c_void_p(b.data_ptr()),
        product.a,
        ctypes.c_void_p(a.data_ptr()),
        product.b,
        ctypes.byref(ctypes.c_float(beta)),
        ctypes.c_void_p(addend.data_ptr()),
        product.out,
        ctypes.c_void_p(out.data_ptr()),
        product.out,
        ctypes.byref(product.algorithm),
        ctypes.c_void_p(workspace.data_ptr()),
        ctypes.c_size_t(workspace.numel()),
        ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream),
    )
