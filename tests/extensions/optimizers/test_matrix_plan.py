"""Tests of the matrix plan, which assigns each matrix to one owner rank. Every matrix element is sent once to the
owner. The owner sends the update of the element back once to every rank that holds the element."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from megatron.core.distributed.param_layout import plan_buffers
from megatron.core.optimizer.matrix_plan import MatrixPlan, balanced
from megatron.core.parallel_dims import ParallelDims
from megatron.core.param_meta import Fused, ParamMeta

ROLES = frozenset({"hidden", "router"})
METAS = [
    ParamMeta("embedding.weight", (8, 4), {"tp": 0}, role="embedding"),
    ParamMeta("a.linear_qkv.weight", (4, 5, 2, 6), {"tp": 0}, fused=Fused("qkv", 1, (3, 1, 1)), role="hidden"),
    ParamMeta("a.linear_proj.weight", (6, 24), {"tp": 1}, role="hidden"),
    ParamMeta("a.norm.weight", (6,), role="norm"),
    ParamMeta("a.linear_fc1.weight", (2, 12, 7), {"tp": 1}, fused=Fused("gate_up", 0, (1, 1)), role="hidden"),
    ParamMeta("a.router.weight", (4, 6), role="router"),
    ParamMeta("a.experts.weight", (4, 2, 4, 3), {"ep": 0, "expt_tp": 2}, role="hidden", expert=True, stacked=1),
]
LAYOUTS = [ParallelDims(), ParallelDims(dp=3), ParallelDims(tp=2, dp=2), ParallelDims(tp=4, dp=2, ep=2, expt_tp=2)]
LAYOUTS += [ParallelDims(tp=2, cp=2, dp=2, ep=4), ParallelDims(tp=2, pp=2, dp=3, tp_pp_dp=True)]


def plans(dims: ParallelDims, distributed: bool, **more) -> MatrixPlan:
    """Return the plan of the first pipeline stage. The gate and up projections in the experts' `linear_maps` are not
    marked as fused, so they count as one matrix."""
    coords = {axis: (0, dims.size(axis)) for axis in ("tp", "ep", "expt_tp")}
    shapes = [(meta, meta.box(coords)[1]) for meta in METAS]
    buffers = plan_buffers(shapes, dims.dp * dims.cp, dims.expt_dp, 100, whole_roles=ROLES)
    return MatrixPlan(buffers, dims, dims.groups("dp", "cp", "tp")[0], distributed, **more)


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_each_element_is_sent_once(dims, distributed, blockwise):
    plan = plans(dims, distributed, blockwise=blockwise)
    assert plan.matrices and {matrix.meta.name for matrix in plan.matrices} == {
        meta.name for meta in METAS if meta.matrix and meta.role != "embedding"
    }
    arrived = [np.zeros(matrix.shape, int) for matrix in plan.matrices]
    held = [np.zeros(matrix.shape, int) for matrix in plan.matrices]
    for place in range(len(plan.ranks)):
        taken: set[tuple[int, int]] = set()
        for number, parts in plan.parts(place).items():
            for part in parts:
                held[number][part.place] += 1
                arrived[number][part.place] += plan.sends(place, number)
                inside = np.arange(part.start, part.stop).reshape(part.held)[part.within]
                assert inside.shape == part.shape == held[number][part.place].shape
                elements = {(part.shard, int(element)) for element in inside.ravel()}
                assert not taken & elements, "an element of a shard belongs to two parts"
                taken |= elements
        owned = plan.owned(place)
        assert plan.parts(place, owned) == {n: parts for n, parts in plan.parts(place).items() if n in owned}
    for matrix, once, copies in zip(plan.matrices, arrived, held, strict=True):
        assert (once == 1).all(), matrix
        data = 1 if distributed else dims.expt_dp if matrix.meta.expert else dims.dp * dims.cp
        assert (copies == data * dims.size(*matrix.meta.replica_axes)).all(), matrix


def test_matrices_are_the_linear_maps():
    plan = plans(ParallelDims(), True)
    sizes = {}
    for matrix in plan.matrices:
        sizes.setdefault(matrix.meta.name, []).append(matrix.size)
    assert sizes == {
        "a.linear_qkv.weight": [(24, 6), (8, 6), (8, 6)],
        "a.linear_proj.weight": [(6, 24)],
        "a.linear_fc1.weight": [(12, 7)] * 2,
        "a.router.weight": [(4, 6)],
        "a.experts.weight": [(8, 3)] * 4,
    }
    together = plans(ParallelDims(), True, splits=lambda name: False)
    assert {m.size for m in together.matrices if m.meta.fused} == {(40, 6), (24, 7)}
    blocks = plans(ParallelDims(tp=2, ep=1, expt_tp=2), True, blockwise=True)
    assert [m.size for m in blocks.matrices if "proj" in m.meta.name] == [(6, 12)] * 2
    assert [m.size for m in blocks.matrices if "qkv" in m.meta.name] == [(12, 6), (12, 6), *[(4, 6)] * 4]


def test_rounds_bound_the_gathered_bytes():
    plan = plans(ParallelDims(dp=2), True, round_size=100)
    assert len(plan.rounds) > 2
    assert sorted(n for numbers in plan.rounds for n in numbers) == list(range(len(plan.matrices)))
    for numbers, place in product(plan.rounds, range(2)):
        own = [plan.matrices[n] for n in numbers if plan.owners[n] == place]
        assert len(own) <= 1 or sum(m.size[0] * m.size[1] for m in own) <= 100
    assert len(plans(ParallelDims(dp=2), True).rounds) == 1


def test_work_is_balanced():
    assert balanced([], 3) == []
    assert balanced([5, 5, 5], 3) == [0, 1, 2]
    costs = [7, 1, 1, 1, 4, 3, 3, 2, 9, 5]
    sums = [0] * 4
    for cost, owner in zip(costs, balanced(costs, 4), strict=True):
        sums[owner] += cost
    assert max(sums) <= 4 / 3 * -(-sum(costs) // 4)
