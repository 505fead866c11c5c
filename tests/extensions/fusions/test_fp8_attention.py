"""Tests of attention with an fp8 forward pass. The tests cover the error of the results, the interpreted Triton kernel,
the compiled Triton kernel, calls of FlashAttention-3, the choice of a kernel, and planned memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.attention.core_attention import FusedAttention
from megatron.core.parallel_state import Axis
from megatron.extensions.plan.planner.device_file import DeviceError, read_device
from megatron.extensions.plan.planner.time.step_time import predict_step
from megatron.extensions.speed.fusions.attention import backends, fp8_attention
from megatron.extensions.speed.fusions.attention import choice as sdpa
from megatron.extensions.speed.fusions.attention.backends import MODULE
from megatron.extensions.speed.fusions.attention.choice import AttentionShape, attention_run, choose_kernel
from megatron.extensions.speed.fusions.attention.fp8_attention import (
    KERNEL_ERROR,
    CastHeads,
    Flash3Kernels,
    Fp8Attention,
    Fp8Backend,
    TritonKernels,
    Twin,
    cast_heads,
    error_beside_twin,
    restored_heads,
)
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from tests.extensions.fusions.test_attention_backends import dense_backward, function_of
from tests.triton_cases import apart, compiled, round_to_fp8_as_torch, stack_of, stack_tool

CPU = torch.device("cpu")


def heads_of(n: int, b: int, heads: int, groups: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n + heads)
    q, k, v = (torch.randn(n, b, count, d).bfloat16() for count in (heads, groups, groups))
    return q, k, v


def with_gradients(attention: torch.nn.Module, qkv: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    own = [x.detach().clone().requires_grad_() for x in qkv]
    out = attention(*own)
    return [out.detach().double(), *(x.double() for x in torch.autograd.grad(out, own, grad.to(out.dtype)))]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


def test_errors_match_the_docstring() -> None:
    """Errors are measured against fp64 attention of the original operands and of the rounded operands. The error
    against the rounded operands comes only from rounding the attention weights."""
    qkv = heads_of(384, 2, 4, 2, 64)
    scale, grad = 64**-0.5, torch.randn(384, 2, 4, 64, dtype=torch.bfloat16)
    found = with_gradients(Fp8Attention("", Twin(scale), False), qkv, grad)
    of_all = errors(found, with_gradients(FusedAttention(scale), tuple(x.double() for x in qkv), grad))
    assert all(0.03 < error < 0.06 for error in of_all), of_all
    rounded = tuple(x.double() for x in restored_heads(cast_heads(*qkv), torch.float32))
    of_weights = errors(found, with_gradients(FusedAttention(scale), rounded, grad))
    assert of_weights[0] < 0.02 and max(of_weights[1:]) < 0.01, of_weights


def test_each_sample_and_group_is_cast_separately() -> None:
    """The fp8 casts do not depend on the layout or on other samples. The dequantized values are exactly representable
    in bf16."""
    qkv = heads_of(32, 3, 4, 2, 16)
    qkv[0][:, 1] *= 1000
    whole = Twin(0.25).forward(cast := cast_heads(*qkv), torch.float32)
    parts = cast_heads(*(x[:, 1:2, -x.shape[2] // 2 :] for x in qkv))
    out, lse = Twin(0.25).forward(parts, torch.float32)
    assert torch.equal(out, whole[0][:, 1:2, 2:]) and torch.equal(lse, whole[1][1:2, 2:])
    for narrow, wide in zip(restored_heads(cast, torch.bfloat16), restored_heads(cast, torch.float64), strict=True):
        assert torch.equal(narrow.double(), wide)
    assert {x.dtype for x in cast[:3]} == {torch.float8_e4m3fn}
    qkv[1][5, 0, 0, 3] = torch.inf
    out, _ = Twin(0.25).forward(cast_heads(*qkv), torch.float32)
    assert out[:, 0, :2].isnan().all() and out[:, 1:].isfinite().all() and out[:, 0, 2:].isfinite().all()


def test_casts_are_saved_and_not_operands() -> None:
    qkv = [x.requires_grad_() for x in heads_of(32, 1, 4, 2, 16)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        Fp8Attention("", Twin(0.25), False)(*qkv)
    sizes = sorted((str(x.dtype), x.nbytes) for x in saved)
    of_casts = [("torch.float8_e4m3fn", x.numel()) for x in qkv]
    assert sizes == sorted([*of_casts, ("torch.float32", 24), ("torch.float32", 512), ("torch.bfloat16", 4096)])


def check_kernel(device: str = "cpu") -> None:
    """Compare the kernel's outputs and log-sum-exps with the plain-torch definition of the kernel. The cases include
    full and partial blocks of keys, and different head widths and numbers of query groups."""
    from megatron.extensions.speed.fusions.attention import fp8_attention_triton as kernels

    for n, b, heads, groups, d in ((160, 2, 4, 2, 16), (128, 1, 2, 2, 64), (300, 1, 1, 1, 128)):
        cast = CastHeads(*(x.to(device) for x in cast_heads(*heads_of(n, b, heads, groups, d))))
        out, lse = kernels.fp8_attention_forward(*cast, d**-0.5, torch.float32)
        expected, expected_lse = Twin(d**-0.5).forward(cast, torch.float32)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
        # Within one block of keys, the kernel and the definition round the attention weights relative to the same
        # maximum.
        error = ((out - expected).norm() / expected.norm()).item()
        assert error < (1e-3 if n <= 128 else KERNEL_ERROR / 2), (n, error)


@apart(interpret=True)
def test_the_interpreted_kernel_matches_the_definition() -> None:
    round_to_fp8_as_torch()
    check_kernel()


@apart(interpret=False)
def test_the_kernel_compiles_without_spills() -> None:
    """The kernel compiles for Ada, Hopper and Blackwell, whose tensor cores support fp8, and prefetches the next
    blocks."""
    from megatron.extensions.speed.fusions.attention import fp8_attention_triton as kernels
    from megatron.extensions.speed.fusions.attention.row_blocks_triton import Rows

    rows = Rows("*fp8e4nv", "i32", "i32", "i32")  # type: ignore[arg-type]  # their types
    types: dict[str, Any] = {"out": "*bf16", "lse": "*fp32", "q": rows, "k": rows, "v": "*fp8e4nv", "scales": "*fp32"}
    types |= {**dict.fromkeys(("n", "samples", "groups", "ratio"), "i32"), "scale": "fp32"}
    products = {89: "f32.e4m3.e4m3.f32", 90: "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3", 100: "f8f6f4"}
    for width, capability in ((128, 89), (128, 90), (64, 90), (128, 100)):
        block_m, block_n, warps, stages = kernels.BLOCKS[width]
        constants = {**dict.fromkeys(("D", "DV", "BLOCK_D", "BLOCK_DV"), width), "BLOCK_M": block_m, "BLOCK_N": block_n}
        how = {"num_warps": warps, "num_stages": stages}
        built = compiled(kernels.fp8_attention_kernel, types, constants, capability, **how)
        assert built.metadata.shared <= (99 if capability == 89 else 227) * 1024
        assert products[capability] in built.asm["ptx"]
        assert stack_tool() is None or stack_of(built) == 0, (width, capability)


SCALES = "q_descale", "k_descale", "v_descale"


def package(takes_scales: bool = True) -> ModuleType:
    """Return a replacement for FlashAttention-3 that computes attention of the dequantized operands."""

    def forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, **given: Any) -> tuple[Tensor, ...]:
        assert given["causal"] and v.stride(1) == 1 and all(x.dtype == torch.float8_e4m3fn for x in (q, k, v))
        rows = (x.transpose(0, 1).contiguous() for x in (q, k))
        cast = CastHeads(*rows, v.permute(0, 2, 3, 1), torch.stack([given[name] for name in SCALES]))
        out, lse = Twin(softmax_scale).forward(cast, torch.bfloat16)
        return out.transpose(0, 1), lse, torch.empty(0)

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, **given: Any) -> None:
        assert given["is_causal"] and q.dtype == torch.bfloat16
        by_rows = (x.transpose(0, 1) for x in (dout, out, q, k, v))
        grad, out, *qkv = by_rows
        found = Twin(softmax_scale).backward(grad, (out, softmax_lse), (qkv[0], qkv[1], qkv[2]))
        for into, value in zip((dq, dk, dv), found, strict=True):
            into.copy_(value.transpose(0, 1))

    module, windows = ModuleType(MODULE), ("window_size_left", "window_size_right")
    names = ("q", "k", "v", "softmax_scale", "causal", *windows, *(SCALES if takes_scales else ()))
    module._flash_attn_forward = function_of(forward, names)  # type: ignore[attr-defined]
    names = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "softmax_scale", "deterministic")
    module._flash_attn_backward = function_of(backward, (*names, "is_causal", *windows))  # type: ignore[attr-defined]
    return module


def test_flash3_receives_casts_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = heads_of(24, 2, 4, 2, 16)
    monkeypatch.setitem(sys.modules, MODULE, package())
    assert error_beside_twin(Flash3Kernels(0.25), qkv, 0.25) == 0
    monkeypatch.setitem(sys.modules, MODULE, package(takes_scales=False))
    with pytest.raises(ImportError, match="has a version that does not support fp8 scales"):
        error_beside_twin(Flash3Kernels(0.25), qkv, 0.25)


def test_cudnn_computes_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, scales: Tensor, scale: float, dtype: torch.dtype) -> Any:
        return Twin(scale).forward(CastHeads(q, k, v, scales), dtype)

    monkeypatch.setattr(fp8_attention, "_forward", forward)
    monkeypatch.setattr(backends, "cudnn_attention_backward", dense_backward)
    qkv = heads_of(24, 2, 4, 2, 16)
    assert error_beside_twin(TritonKernels(0.25), tuple(x.double() for x in qkv), 0.25) < 1e-6  # type: ignore[arg-type]


SHAPE = AttentionShape(16, 2, 4, 2, 8, 8, torch.bfloat16)


def timed(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
    """Replace the kernel timer, so that each kernel seems to take the time in `seconds`. Timing a kernel that has no
    entry in `seconds` raises an error."""

    def lazily(shape: AttentionShape, device: torch.device, name: str) -> Callable[[], object]:
        return lambda: seconds[name]

    monkeypatch.setattr(sdpa, "_lazily", lazily)
    monkeypatch.setattr(sdpa, "device_clock", lambda run: run())
    monkeypatch.setattr(sdpa, "use", lambda winner: None)


def test_a_kernel_in_16_bits_is_chosen_if_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, {"fp8_flash3": 2.0, "fp8_triton": 4.0, "cudnn": 3.0, "flash": 5.0})
    assert choose_kernel(SHAPE, CPU, Axis(), "fp8").winner == "fp8_flash3"
    timed(monkeypatch, {"fp8_triton": 4.0, "cudnn": 3.0})
    assert choose_kernel(SHAPE, CPU, Axis(), "fp8").winner == "cudnn"
    assert choose_kernel(SHAPE, CPU, Axis(), "fp8_triton").winner == "fp8_triton"


def test_a_run_without_an_fp8_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, {"cudnn": 3.0})
    for asked in ("fp8", "fp8_flash3"):
        with pytest.raises(
            ValueError, match=rf"--attention-backend {asked}: on at least one rank, no fp8 kernel runs \("
        ):
            choose_kernel(SHAPE, CPU, Axis(), asked)


def test_a_kernel_with_wrong_results_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(attention_run(SHAPE, CPU, "fp8")()) == 3  # type: ignore[arg-type]

    class Wrong(Twin):
        def forward(self, cast: CastHeads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            out, lse = super().forward(cast, dtype)
            return 1.1 * out, lse

    wrong = Fp8Attention("", Wrong(0.25), compiled=False)
    monkeypatch.setattr(Fp8Backend, "causal", lambda self: wrong)
    with pytest.raises(RuntimeError, match=r"differs by .*, more than 6.0e-02"):
        attention_run(SHAPE, CPU, "fp8")


LAYERS = (
    "--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --kv-channels 128 --seq-length 8192 --vocab-size 1024 "
    "--lr 1 --mock-data --train-iters 1 --micro-batch-size 1 --global-batch-size 1 --bf16 --attention-dropout 0 "
    "--fp8-format hybrid --attention-backend "
)


def test_a_plan_has_the_rates_of_its_kernels() -> None:
    def seconds(backend: str, device: str = "h200") -> float:
        config = resolve_legal(parse_args(f"{LAYERS}{backend}".split()), 1)
        return predict_step(config, 1, read_device(device)).parts["attention"]

    of_cudnn, of_triton, of_flash3, of_either = map(seconds, ("cudnn", "fp8_triton", "fp8_flash3", "fp8"))
    assert of_flash3 < 0.85 * of_cudnn and 0.95 * of_cudnn < of_triton < 1.05 * of_cudnn and of_either == of_flash3
    with pytest.raises(DeviceError, match="no speed of fp8 attention; known are"):
        seconds("fp8", "l40s")
