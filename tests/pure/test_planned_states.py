"""Tests of planned optimizer states. The state of each element is on the rank that updates the element, and bytes are
counted per rank. The tests do not need torch."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from megatron.core.distributed.param_layout import plan_buffers
from megatron.core.optimizer.planned_states import (
    ELEMENTS,
    MATRICES,
    ChainPlan,
    State,
    elements,
    matrix_size,
    of_matrices,
    reduced,
)
from megatron.core.parallel_dims import ParallelDims
from megatron.core.param_meta import ParamMeta

METAS = [
    ParamMeta("embedding.weight", (8, 4), {"tp": 0}, role="embedding"),
    ParamMeta("a.linear_fc1.weight", (2, 12, 7), {"tp": 1}, role="hidden"),
    ParamMeta("a.linear_proj.weight", (6, 24), {"tp": 1}, role="hidden"),
    ParamMeta("a.norm.weight", (6,), role="norm"),
    ParamMeta("a.experts.weight", (4, 2, 4, 3), {"ep": 0, "expt_tp": 2}, role="hidden", expert=True, stacked=1),
]
LAYOUTS = [ParallelDims(), ParallelDims(dp=3), ParallelDims(tp=2, dp=2), ParallelDims(tp=4, dp=2, ep=2, expt_tp=2)]
LAYOUTS += [ParallelDims(tp=2, cp=2, dp=2, ep=4), ParallelDims(tp=2, pp=2, dp=3, tp_pp_dp=True)]


def states_of(meta: ParamMeta) -> list[State]:
    if not meta.matrix:
        return [elements("full", meta), reduced("one", meta, dtype="float64")]
    rows, columns = matrix_size(meta)
    factors = [of_matrices("left", meta, rows, rows), of_matrices("right", meta, columns, columns, dtype="bfloat16")]
    return [elements("full", meta, "bfloat16"), reduced("rows", meta, -1), *factors]


def plan_of(dims: ParallelDims, distributed: bool, bucket_size: int) -> ChainPlan:
    """Return the plan of the first pipeline stage."""
    coords = {axis: (0, dims.size(axis)) for axis in ("tp", "ep", "expt_tp")}
    shapes = [(meta, meta.box(coords)[1]) for meta in METAS]
    buffers = plan_buffers(shapes, dims.dp * dims.cp, dims.expt_dp, bucket_size)
    return ChainPlan(buffers, states_of, lambda meta: False, dims, dims.groups("dp", "cp", "tp")[0], distributed)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_each_element_has_one_owner(dims: ParallelDims, distributed: bool) -> None:
    for bucket_size in 40, 10_000:
        plan = plan_of(dims, distributed, bucket_size)
        assert {param.meta.name for param in plan.params} == {meta.name for meta in METAS}
        nbytes = [0] * len(plan.ranks)
        for param, place in product(plan.params, range(len(plan.ranks))):
            for state in param.states:
                width = {"bfloat16": 2, "float64": 8, None: 4}[state.dtype]
                nbytes[place] += width * sum(stop - start for start, stop in held(plan, param, state, place))
        assert nbytes == plan.bytes_by_place(4)
        for param in plan.params:
            for state in param.states:
                check_covered(plan, param, state, distributed)


def held(plan, param, state, place):
    """Return the ranges of the flattened state that are stored on a rank. The ranges depend on the kind of the
    state."""
    if state.kind == ELEMENTS:
        return [param.part_within(*plan.owned_range(param, place))]
    if state.kind == MATRICES:
        return [(start, stop) for _, start, stop in plan.owned(param, state, place)]
    return [plan.part(state, place)]


def check_covered(plan, param, state, distributed):
    if state.kind == ELEMENTS:
        local = param.range.stop - param.range.start
        ranks = {held(plan, param, state, place)[0] for place in range(len(plan.ranks))}
        covered = np.zeros(local, int)
        for start, stop in ranks:
            covered[start:stop] += 1
        assert (covered == 1).all() and (distributed or ranks == {(0, local)})
        return
    covered = np.zeros(state.numel, int)
    for place in range(len(plan.ranks)):
        for start, stop in held(plan, param, state, place):
            covered[start:stop] += 1
    assert (covered == 1).all(), "no element has two owners in a stage"


def test_states_have_the_planned_shapes() -> None:
    experts = METAS[-1]
    assert matrix_size(experts) == (8, 3)
    assert of_matrices("left", experts, 8, 8).shape == (4, 8, 8)
    assert reduced("rows", experts, -1).shape == (4, 2, 4, 1)
    assert reduced("columns", experts, 1, 2).shape == (4, 1, 1, 3)
    assert reduced("one", experts).shape == (1, 1, 1, 1)
