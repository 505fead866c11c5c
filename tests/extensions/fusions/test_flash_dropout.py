"""Tests of attention with dropout in a single kernel. A band combines several attention tiles, and must cover the same
pairs of queries and keys as these tiles. Triton kernels in Triton's interpreter are compared with plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.attention.context_parallel import Ring, local_attention
from megatron.core.attention.context_parallel import _merge_ as merge_
from megatron.core.attention.tile_kernels import (
    Causal,
    Dropout,
    Kernel,
    Rows,
    TorchKernel,
    hidden_pairs,
    key_rows,
    query_rows,
)
from megatron.core.attention.tiles import Documents, Tile, causal_tiles, rank_spans
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dropout import attention_dropout
from megatron.core.parallel_state import Axis
from megatron.core.pipeline_parallel.layout import Stage
from megatron.extensions.speed.fusions.attention import flash_dropout
from megatron.extensions.speed.fusions.attention.flash_dropout import FlashDropoutKernel, band_of
from tests.pure.test_model_math import shape
from tests.triton_cases import apart, compiled

SCALE = 0.3
PACKED = ((0, 1, 9, 20), (0, 17))


def seen_by(tiles: Sequence[Tile], samples: int, n: int, m: int) -> np.ndarray[Any, Any]:
    """Return a mask [samples, n, m] that is True where a query attends to a key."""
    seen = np.zeros((samples, n, m), bool)
    for tile in tiles:
        hidden = hidden_pairs(tile, torch.device("cpu"))
        rows, keys = (slice(part.start, part.stop) for part in (tile.queries, tile.keys))
        part = seen[slice(None) if tile.sample is None else tile.sample, rows, keys]
        part |= True if hidden is None else ~hidden.numpy()
    return seen


@pytest.mark.parametrize("documents", [None, PACKED, ((0, 5), (0, 5))], ids=["one", "packed", "alike"])
@pytest.mark.parametrize("window", [None, 1, 7, 40])
def test_bands_cover_the_pairs_of_their_tiles(documents: Documents | None, window: int | None) -> None:
    """A band contains exactly the pairs of queries and keys that its tiles contain. The tests cover a single rank and
    every ring step."""
    length = 24
    ranks = [(size, *pair) for size in (1, 3) for pair in product(range(size), repeat=2)]
    for queries, keys in ((rank_spans(length, a, size), rank_spans(length, b, size)) for size, a, b in ranks):
        tiles = causal_tiles(queries, keys, documents, window)
        if not tiles:
            continue
        band = band_of(tiles)
        places = [np.array([i for span in spans for i in span]) for spans in (queries, keys)]
        seen = seen_by(tiles, len(band.of_queries[0]), len(places[0]), len(places[1]))
        i, j = np.arange(len(band.queries))[:, None], np.arange(len(band.keys))
        by_query = (j >= band.of_queries[0][..., None]) & (j < band.of_queries[1][..., None])
        by_key = (i >= band.of_keys[0][:, None]) & (i < band.of_keys[1][:, None])
        inside = seen[:, band.queries.start : band.queries.stop, band.keys.start : band.keys.stop]
        assert (by_query == inside).all() and (by_key == inside).all() and inside.sum() == seen.sum()
        assert band.diagonal == (queries == keys)
        in_use = inside.any((0, 2)), inside.any((0, 1))
        for found, whole, rows, used in zip(
            (band.query_places, band.key_places), places, (band.queries, band.keys), in_use, strict=True
        ):
            assert (found == whole[rows.start : rows.stop])[used].all()


def operands(n: int, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and the output gradient for two samples. If all widths are equal, q, k and v are views of one
    projection."""
    generator = torch.Generator().manual_seed(n)
    per = heads[0] // heads[1]
    whole = torch.randn(n, 2, heads[1], (per + 1) * widths[0] + widths[1], generator=generator).to(dtype)
    q, k, v = whole.split((per * widths[0], widths[0], widths[1]), dim=3)
    grad = torch.randn(n, 2, heads[0], widths[1], generator=generator).to(dtype)
    return [x.detach().requires_grad_() for x in (q.unflatten(3, (per, -1)).flatten(2, 3), k, v)] + [grad]


class Case(NamedTuple):
    """Inputs and settings of one attention computation. If `ranks` is larger than 1, the result is computed step by
    step, as on one rank of a ring."""

    length: int = 40
    heads: int = 2
    groups: int = 1
    widths: tuple[int, int] = (16, 16)
    documents: Documents | None = None
    window: int | None = None
    ranks: int = 1
    gathered: bool = False
    """True if keys are gathered from all ranks before attention."""
    sinks: bool = False
    dtype: torch.dtype = torch.float32


FEW = [Case(30, widths=(24, 16), documents=PACKED, window=11, ranks=3), Case(17, sinks=True, dtype=torch.float16)]

MANY = [
    Case(),
    Case(37, groups=2, window=9, sinks=True),
    Case(heads=4, groups=2, widths=(16, 32), documents=PACKED),
    Case(48, documents=PACKED, ranks=3, gathered=True),
    Case(48, documents=((0, 30), (0, 30)), ranks=2),
    Case(50, heads=6, groups=2, window=1, sinks=True),
    Case(96, heads=2, widths=(64, 40), ranks=4, dtype=torch.float16),
]


def run(kernel: Kernel, case: Case) -> list[Tensor]:
    """Return a list of the output and all gradients."""
    q, k, v, grad = operands(case.length, (case.heads, case.groups), case.widths, case.dtype)
    sinks = torch.linspace(-1, 1, case.heads, requires_grad=True) if case.sinks else None
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
    causal = Causal(kernel, case.documents, case.window)
    spans = [rank_spans(case.length, rank, case.ranks) for rank in range(case.ranks)]
    rows = [[place for span in own for place in span] for own in spans]
    if case.ranks == 1 or case.gathered:
        queries = spans[-1] if case.gathered else None
        out = local_attention(q[rows[-1]], k, v, causal, queries, sinks)
        return [out, *torch.autograd.grad(out, leaves, grad[rows[-1]])]
    # Use the second to last rank of the ring. The queries of this rank attend to all or half of the keys of every other
    # rank.
    rank = max(0, case.ranks - 2)
    sources = [(rank - step) % case.ranks for step in range(case.ranks)]
    tiles = {source: Ring(Axis(), spans[rank], (spans[source],), causal).tiles(0) for source in sources}
    q, k, v = (x.detach() for x in (q, k, v))
    mine, wide = q[rows[rank]], torch.promote_types(case.dtype, torch.float32)
    out, lse = torch.empty(*mine.shape[:3], case.widths[1], dtype=wide), torch.empty(mine.shape[:3], dtype=wide)
    for source in sources:
        for tile, (part, sums) in kernel.forward(mine, k[rows[source]], v[rows[source]], tiles[source]):
            merge_(query_rows(out, tile), query_rows(lse, tile), part, sums, tile.diagonal)
    merged = Rows(grad[rows[rank]], out.to(q.dtype), lse)
    grads = [torch.zeros(x.shape, dtype=wide) for x in (mine, k, v)]
    for source in sources:
        of_keys = [torch.zeros(x[rows[source]].shape, dtype=wide) for x in (k, v)]
        for tile, parts in kernel.backward(merged, mine, k[rows[source]], v[rows[source]], tiles[source]):
            query_rows(grads[0], tile).add_(parts[0])
            for whole, part in zip(of_keys, parts[1:], strict=True):
                key_rows(whole, tile).add_(part)
        grads[1][rows[source]], grads[2][rows[source]] = of_keys
    return [out, *grads]


def interpreted() -> None:
    """Replace the operators' kernels with interpreted kernels that use small blocks."""
    from megatron.extensions.speed.fusions.attention import flash_dropout_triton as kernels

    for name in ("_forward", "_backward"):
        setattr(flash_dropout, name, getattr(flash_dropout, name)._init_fn)
    kernels.check = lambda q, v: None
    for table in (kernels.FORWARD, kernels.OF_QUERIES, kernels.OF_KEYS):
        table[64] = 16, 16, 4, 1


def compare(cases: Sequence[Case]) -> None:
    for case in cases:
        masks = Dropout(0.3, 2**62 + 12345, 5, torch.tensor([3, 2**40 + 1]))
        found, expected = run(FlashDropoutKernel(SCALE, masks), case), run(TorchKernel(SCALE, masks), case)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            error = (one.double() - other.double()).norm() / other.double().norm()
            assert error < (3e-6 if case.dtype == torch.float32 else 3e-3), (case, error)


@pytest.mark.grid("cases", ["few"], ["few", "many"])
@apart(interpret=True)
def test_interpreted_kernels_match_their_twin(cases: str) -> None:
    """Each case compares outputs, all gradients and dropout masks. The cases cover odd lengths, grouped queries,
    different head widths, sliding windows, packed documents, attention sinks and ring attention."""
    interpreted()
    compare(FEW if cases == "few" else MANY)
    compare_masks()


def compare_masks() -> None:
    """Check which attention weights are dropped. All scores are equal and each value identifies its key, so the outputs
    show which weights are zero."""
    n, samples, heads = 16, 2, 2
    q, k = torch.zeros(n, samples, heads, 16), torch.zeros(n, samples, heads, 16)
    masks = Dropout(0.4, 2**62 + 999, 7, torch.tensor([2**33, 5]))
    for first in range(0, n, 16):
        v = torch.zeros(n, samples, heads, 16)
        v[first : first + 16] = torch.eye(16)[:, None, None]
        out = local_attention(q, k, v, Causal(FlashDropoutKernel(SCALE, masks)))
        kept = attention_dropout(torch.ones(samples, heads, n, n), 0.4, masks.key, masks.sample_index, 7)
        seen = torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None]
        expected = (kept * seen)[..., first : first + 16].permute(2, 0, 1, 3)
        assert torch.equal(out == 0, expected == 0)
        torch.testing.assert_close(out, expected)


MODEL = TransformerConfig(**shape(1, 64, 4, 256, 64, 256), attention_dropout=0.1)


PLANNED = [
    ({}, 256 * 256 / 2),
    ({"window_size": 16}, 16 * (256 - 16) + 16 * 17 / 2),
    ({"attention_dropout": 0.0}, 256 * 256 / 2),
]


@pytest.mark.parametrize(("more", "pairs"), PLANNED, ids=["dropout", "window", "none"])
def test_a_gpu_plan_has_one_launch_per_pass(more: dict[str, Any], pairs: float) -> None:
    fakes = pytest.importorskip("megatron.extensions.plan.planner.fake_stage")
    events = pytest.importorskip("megatron.extensions.plan.planner.time.events")
    model = replace(MODEL, **more)
    with fakes.fake_stages(fakes.MicroBatch(model, ModelParallelConfig(bf16=True), 2)) as stages:
        passes = stages.record(fakes.Part((fakes.Unit((0,)),)))
    found = [[each for each in way if isinstance(each, events.Attention)] for way in (passes.forward, passes.backward)]
    assert [len(launches) for launches in found] == [1, 1]
    drops, all_pairs, width = model.attention_dropout > 0, 2 * 4 * pairs, 16
    for (event,), products, passes in zip(found, (2, 7 if drops else 5), (1, 2), strict=True):
        assert event.flops == pytest.approx(2 * all_pairs * width * products, rel=0.01)
        assert event.hashes == pytest.approx(all_pairs * passes if drops else 0, rel=0.01)
        assert event.backend == ("triton" if drops else "auto")


def test_gpu_plans_have_no_score_tiles() -> None:
    activations = pytest.importorskip("megatron.extensions.plan.planner.activations")
    tile = 4 * 256 * 256 * 4
    for parallel, device, fused in (
        (ModelParallelConfig(bf16=True), "cuda", True),
        (ModelParallelConfig(bf16=True, attention_backend="unfused"), "cuda", False),
        (ModelParallelConfig(bf16=True), "cpu", False),
    ):
        plan = activations.ActivationPlan(activations.MicroBatch(MODEL, parallel, 1, device))
        memory = plan.stage(Stage((0,), first=False, last=False))
        assert (memory.backward - memory.kept < tile) == fused


TYPES: dict[str, Any] = {
    **dict.fromkeys(("out", "dq", "dk", "dv"), "*bf16"),
    **{"lse": "*fp32", "column_bits": "*i32", "prepared": ("*fp32", "*fp32", "*i32"), "limit": "i32"},
    **{"mask": ("*i64", "*i32", "*i32"), "key": "i64", "head_offset": "i32"},
    **{"sizes": ("i32",) * 5, "factors": ("fp32",) * 3},
}


@pytest.mark.grid(
    ("kernels", "widths", "capabilities"),
    [(["attention_forward"], [64], [90])],
    [(["attention_forward", "attention_dq", "attention_dkdv"], [64, 128, 256], [80, 90])],
)
@apart(interpret=False)
def test_kernels_compile_to_tensor_core_instructions(
    kernels: Sequence[str], widths: Sequence[int], capabilities: Sequence[int]
) -> None:
    """The test also checks that the compiled kernels fit into shared memory."""
    from megatron.extensions.speed.fusions.attention import flash_dropout_triton as triton

    found = {
        "attention_forward": (triton.attention_forward, triton.FORWARD, 2),
        "attention_dq": (triton.attention_dq, triton.OF_QUERIES, 3),
        "attention_dkdv": (triton.attention_dkdv, triton.OF_KEYS, 4),
    }
    rows: Any = triton.Rows("*bf16", "i32", "i32", "i32")  # type: ignore[arg-type]
    bounds: Any = triton.Bounds("*i32", "i32", "i32")  # type: ignore[arg-type]
    types = TYPES | dict.fromkeys(("q", "k", "v", "grad"), rows) | {"bounds": bounds}
    for name, width, capability in product(kernels, widths, capabilities):
        kernel, table, products = found[name]
        block_n, block_m, warps, stages = table[width]
        constants = {"WIDTHS": (width,) * 4, "BLOCKS": (block_n, block_m)}
        built = compiled(kernel, types, constants, capability, num_warps=warps, num_stages=stages)
        ptx = built.asm["ptx"]
        # The code contains each GEMM twice, once with a mask and once without.
        assert ptx.count("wgmma.mma_async.sync") + ptx.count("mma.sync") >= 2 * products, (name, width, capability)
        assert "cp.async" in ptx or stages == 1, (name, width, capability)
        assert built.metadata.shared <= {80: 163, 90: 227}[capability] * 1024
