"""Tests of Triton kernels for the indexer loss. The kernels run in Triton's interpreter and are compared with plain
torch. The kernels are also compiled for GPUs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from inspect import unwrap
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.extensions.attention.sparse_attention.indexer_loss import Loss, divergence
from megatron.extensions.attention.sparse_attention.selected_attention import attend_to_selected
from megatron.extensions.attention.sparse_attention.selection import Index
from megatron.extensions.speed.fusions.kernel_choice import RunShapes, choose_kernels
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from tests.extensions.sparse_attention.test_selected_kernels import (
    RUNS,
    SCALE,
    Case,
    interpreted,
    operands,
    with_edit,
)
from tests.tiny import TINY
from tests.triton_cases import apart, compiled, stack_of, stack_tool

Drawn = tuple[Case, int, int]
"""Attention case with the numbers of heads and channels of the indexer."""

PLAIN: Drawn = Case(documents=True), 3, 20
MOST: tuple[Drawn, ...] = (
    PLAIN,
    (Case(2, 40, 5, 16, 16, 1, ((9, 9), (13, None)), True), 17, 16),
    (Case(3, 64, 4, 32, 32, 1, ((17, None),), dtype=torch.bfloat16), 4, 32),
)


def drawn(seed: int) -> Drawn:
    draw = random.Random(seed)
    s, count = draw.randint(18, 60), draw.randint(1, 17)
    sets = ((draw.randint(1, 9), s), (count, None)) if draw.random() < 0.3 else ((count, None),)
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    shape = draw.randint(1, 6), s, draw.randint(1, 18), 24, 16, draw.randint(1, 2)
    documents = len(sets) == 1 and draw.random() < 0.5
    return Case(*shape, sets, documents=documents, dtype=dtype), draw.randint(1, 20), draw.randint(1, 40)


def given(each: Drawn) -> tuple[Index, Loss]:
    """Return random operands for the function `divergence`. Some of the attention scores are equal."""
    case, heads, width = each
    q, sinks, seen, k, _ = operands(case)
    found = attend_to_selected(*(q.float(), sinks, seen, tuple(x.float() for x in k), SCALE, case.values, False))
    generator = torch.Generator().manual_seed(heads + width)
    sizes = (case.n, case.samples, heads, width), (case.s, case.samples, width), (case.n, case.samples, heads)
    index = Index(*(torch.randn(size, generator=generator).to(case.dtype) for size in sizes))
    queries, picked = seen[-1]
    beside = found.of_first if len(k) > 1 else None
    return index, Loss(q, k[-1], picked, queries, SCALE, Axis(), range(case.n), beside, found.lse)


def wide(index: Index, loss: Loss) -> tuple[Index, Loss]:
    return Index(*(x.float() for x in index)), loss._replace(q=loss.q.float(), k=loss.k.float())


def tensors_of(found: tuple[Tensor, Index]) -> tuple[Tensor, ...]:
    return found[0], *found[1]


def interpreted_divergence() -> Any:
    """Return the Triton kernels for Triton's interpreter on the CPU, with small blocks."""
    from megatron.extensions.attention.sparse_attention.kernels import attention, divergence, divergence_triton

    kernels: Any = divergence
    attention.adds_gradients = lambda device, keys, count: True
    divergence_triton.BLOCKS, divergence_triton.SCAN = divergence_triton.Blocks(16, 16, 32), 16
    kernels._gradients = getattr(kernels._gradients, "_init_fn", kernels._gradients)
    return kernels


def check(cases: Sequence[Drawn]) -> None:
    interpreted()
    kernels = interpreted_divergence()
    for each in cases:
        index, loss = given(each)
        expected = tensors_of(unwrap(divergence)(*wide(index, loss)))
        bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[each[0].dtype]
        for adds in (True, False):
            kernels.sums_later = lambda keys, count, heads, adds=adds: not adds
            found = tensors_of(kernels.by_kernels(index, loss))
            if not adds:
                assert all(map(torch.equal, found, tensors_of(kernels.by_kernels(index, loss)))), each
            for one, other in zip(found, expected, strict=True):
                assert one.shape == other.shape and not one.isnan().any(), each
                error = (one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-2)
                assert error < bound, (each, adds, error)


@pytest.mark.grid("seeds", [range(2)], [range(12)])
@apart(interpret=True)
def test_interpreted_kernels_match_plain_torch(seeds: Sequence[int]) -> None:
    """The divergence and all gradients agree with those of plain torch. The cases cover odd sizes, several sets of
    keys, packed documents, and both orders of summation."""
    check([*MOST, *map(drawn, seeds)])


MUTANTS = {
    "products below zero have gradients": ("products > 0.0, g * of_heads", "products > -1e9, g * of_heads"),
    "gradients without attention": ("tl.exp(logs) - p, 0.0", "tl.exp(logs), 0.0"),
    "weights of attention as they are": ("other=0.0) / of_all", "other=0.0)"),
    "the last queries of a part are left out": ("(row < stop) & (h < heads)", "(row + 1 < stop) & (h < heads)"),
}


@pytest.mark.grid("names", [["gradients without attention"]], [list(MUTANTS)])
@apart(interpret=True)
def test_edited_kernels_differ(names: Sequence[str]) -> None:
    for name in names:
        with with_edit("divergence", *MUTANTS[name]), pytest.raises(AssertionError):
            check([PLAIN])


@apart(interpret=True)
def test_interpreted_kernels_pass_the_startup_comparison() -> None:
    """The test runs the comparison with plain torch that a training run makes at startup, on operands with the shapes
    of the run's layers."""
    interpreted()
    kernels = interpreted_divergence()
    flags = f"{TINY} --num-layers 2 --seq-length 16 --vocab-size 12 --bf16 --multi-latent-attention {RUNS['dsa']}"
    shapes = RunShapes.of(resolve(parse_args(flags.split()), 1), torch.device("cpu"))
    kernel = replace(kernels.DIVERGENCE, suits=lambda index, loss: kernels.fits(index, loss))
    assert len(list(kernel.samples(shapes))) == 1
    said: list[str] = []
    choose_kernels(shapes, Axis(), None, said.append, {"divergence": kernel})
    assert not said, said
    kernels._results = lambda index: (torch.ones(()), Index(*map(torch.ones_like, index)))
    choose_kernels(shapes, Axis(), None, said.append, {"divergence": kernel})
    assert [line.split(" differs")[0] for line in said] == [" kernel divergence left out:"]


TYPES: dict[str, Any] = {
    **dict.fromkeys(("q", "k", "weights"), "*bf16"),
    **dict.fromkeys(("attended", "dense", "dk"), "*fp32"),
    **{"picked": "*i32", "sizes": ("i32",) * 4},
}


@pytest.mark.grid(("heads", "capabilities"), [([16], [90])], [([16, 64], [80, 90, 100])])
@apart(interpret=False)
def test_kernels_compile_to_tensor_core_instructions(heads: Sequence[int], capabilities: Sequence[int]) -> None:
    """The head width of the indexer is the same as in DeepSeek-V3.2. The compiled kernels must not spill registers."""
    from megatron.extensions.attention.sparse_attention.kernels import divergence_triton as triton

    for capability in capabilities:
        for count in heads:
            sizes = {"WIDTH": 128, "HELD": 128, "HEADS": count}
            for adds in (False, True)[: 1 if capability == 80 else 2]:
                of_row = TYPES | {"found": ("*fp32", "*bf16", "*bf16", None if adds else "*fp32")}
                of_row["dk"] = "*fp32" if adds else None
                constants = sizes | {"KEYS": triton.BLOCKS.listed, "SCAN": triton.SCAN}
                warps = triton.warps_of(count, adds)
                built = compiled(triton.divergence_of_row, of_row, constants, capability, num_warps=warps, num_stages=2)
                suits(built, capability, 6)
            constants = sizes | {"BLOCKS": (triton.BLOCKS.keys, triton.BLOCKS.columns // count)}
            built = compiled(triton.divergence_of_keys, TYPES, constants, capability, num_warps=8, num_stages=2)
            suits(built, capability, 4)


def suits(built: Any, capability: int, least: int) -> None:
    ptx = built.asm["ptx"]
    assert sum(map(ptx.count, ("wgmma.mma_async.sync", "mma.sync", "tcgen05.mma"))) >= least and "cp.async" in ptx
    assert built.metadata.shared <= 99 * 1024
    if stack_tool() is not None:
        assert stack_of(built) == 0, (built.name, capability)
