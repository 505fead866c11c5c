"""cuBLASLt's fp8 GEMM with an output that is added to (beta = 1), called through ctypes: torch passes no beta on.

Constants and signatures are those of cublasLt.h, which are the same in CUDA 12 and 13. Every call's status is checked,
and what cuBLASLt does not support raises RuntimeError.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

R_32F, COMPUTE_32F, OP_T = 0, 68, 1
R_8F = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
TRANS_A, A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUM = 3, 17, 18, 25
"""Attributes of a product. Operand B is not transposed by default."""

MAX_WORKSPACE, MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
"""Attributes of a preference: bytes, and alignments of A, B, C and D."""

WORKSPACE = 32 * 2**20
ALIGNMENT = 16


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t, which begins with the algorithm."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass
class _Product:
    """A prepared product of one shape."""

    description: ctypes.c_void_p
    a: ctypes.c_void_p
    b: ctypes.c_void_p
    out: ctypes.c_void_p
    algorithm: _Algorithm


@cache
def _library() -> ctypes.CDLL:
    """The library that torch has loaded."""
    version = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{version}")
    except OSError as error:
        raise RuntimeError(f"cuBLASLt cannot be loaded: {error}") from error


def _call(name: str, *args: Any) -> None:
    status = getattr(_library(), name)(*args)
    if status != 0:
        raise RuntimeError(f"{name} returned status {status}")


@cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _set(function: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _call(function, target, ctypes.c_int(attribute), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


def _layout(kind: int, rows: int, columns: int) -> ctypes.c_void_p:
    """A column-major matrix without gaps."""
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), ctypes.c_int(kind), *sizes)
    return layout


def _description() -> ctypes.c_void_p:
    """out += Aᵀ B, summed in fp32 to all bits."""
    description = ctypes.c_void_p()
    _call("cublasLtMatmulDescCreate", ctypes.byref(description), ctypes.c_int(COMPUTE_32F), ctypes.c_int(R_32F))
    _set("cublasLtMatmulDescSetAttribute", description, TRANS_A, ctypes.c_int32(OP_T))
    _set("cublasLtMatmulDescSetAttribute", description, FAST_ACCUM, ctypes.c_int8(0))
    return description


def _set_scales(description: ctypes.c_void_p, a_scale: int, b_scale: int) -> None:
    for attribute, address in ((A_SCALE_POINTER, a_scale), (B_SCALE_POINTER, b_scale)):
        _set("cublasLtMatmulDescSetAttribute", description, attribute, ctypes.c_void_p(address))


@cache
def _prepared(device: int, o: int, i: int, n: int, a_type: int, b_type: int) -> _Product:
    """Our row-major out [o, i] is cuBLAS' column-major [i, o]: its A is our b, whose rows are its columns, and its B is
    our a."""
    description = _description()
    _set_scales(description, ALIGNMENT, ALIGNMENT)  # that there are some; a call sets its own
    a, b, out = _layout(b_type, n, i), _layout(a_type, n, o), _layout(R_32F, i, o)
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
        raise RuntimeError(f"cuBLASLt has no fp8 product [{o}, {n}] x [{n}, {i}] that adds to fp32")
    return _Product(description, a, b, out, algorithm)


def add_product_(out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, overwrite: bool = False) -> None:
    """See `fp8_weight_grad`. Scales are of whole matrices."""
    (o, i), n, device = out.shape, a.shape[1], out.device.index
    if a_scale.ndim or b_scale.ndim or any(x.data_ptr() % ALIGNMENT for x in (out, a, b)):
        raise RuntimeError("this product takes one scale for each operand, and operands aligned to 16 bytes")
    product = _prepared(device, o, i, n, R_8F[a.dtype], R_8F[b.dtype])
    _set_scales(product.description, b_scale.data_ptr(), a_scale.data_ptr())
    workspace = torch.empty(product.algorithm.workspace, dtype=torch.uint8, device=out.device)
    one, beta = ctypes.c_float(1.0), ctypes.c_float(0.0 if overwrite else 1.0)
    _call(
        "cublasLtMatmul",
        _handle(device),
        product.description,
        ctypes.byref(one),
        ctypes.c_void_p(b.data_ptr()),
        product.a,
        ctypes.c_void_p(a.data_ptr()),
        product.b,
        ctypes.byref(beta),
        ctypes.c_void_p(out.data_ptr()),
        product.out,
        ctypes.c_void_p(out.data_ptr()),
        product.out,
        ctypes.byref(product.algorithm),
        ctypes.c_void_p(workspace.data_ptr()),
        ctypes.c_size_t(workspace.numel()),
        ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream),
    )
