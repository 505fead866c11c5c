"""Tests of rank order and group membership. No process group is created."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.parallel_dims import ParallelDims

SIZES = st.sampled_from([1, 2, 3, 4])


def test_groups_of_two_by_two_by_two_match_megatron() -> None:
    dims = ParallelDims(tp=2, pp=2, dp=2, expt_tp=2)
    assert dims.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert dims.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert dims.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert dims.groups("pp", "tp") == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_tp_pp_dp_mapping_swaps_pipeline_and_data() -> None:
    dims = ParallelDims(tp=2, pp=2, dp=2, expt_tp=2, tp_pp_dp=True)
    assert dims.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert dims.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert dims.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_expert_groups_cover_the_same_ranks() -> None:
    dims = ParallelDims(tp=2, pp=2, cp=1, dp=4, ep=4, expt_tp=1)
    assert dims.expt_dp == 2
    assert dims.groups("ep")[0] == (0, 1, 2, 3)
    assert dims.groups("expt_dp")[0] == (0, 4)
    assert dims.groups("pp") == [(rank, rank + 8) for rank in range(8)]


@given(tp=SIZES, pp=SIZES, cp=SIZES, dp=SIZES, swapped=st.booleans())
def test_groups_partition_the_world_and_coordinates_invert(tp: int, pp: int, cp: int, dp: int, swapped: bool) -> None:
    dims = ParallelDims(tp=tp, pp=pp, cp=cp, dp=dp, expt_tp=tp, tp_pp_dp=swapped)
    for axes in [("tp",), ("pp",), ("cp",), ("dp",), ("dp", "cp"), ("pp", "tp"), ("expt_dp",), ("expt_tp",)]:
        groups = dims.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(dims.world_size))
        assert {len(group) for group in groups} == {dims.size(*axes)}
        for group in groups:
            # The ranks of a group differ only in their coordinates along the axes of the group.
            others = [axis for axis in dims.order_of(axes) if axis not in axes]
            assert len({tuple(dims.coords(rank)[axis] for axis in others) for rank in group}) == 1
    for rank in range(dims.world_size):
        coords = dims.coords(rank)
        assert dims.rank(**{axis: coords[axis] for axis in dims.dense_order}) == rank
        assert dims.rank(**{axis: coords[axis] for axis in dims.expert_order}) == rank


def test_nested_context_ranks_are_neighbours_and_rings_between_them() -> None:
    config = ModelParallelConfig(
        tensor_model_parallel_size=2,
        context_parallel_size=6,
        cp_comm_type="a2a+p2p",
        hierarchical_context_parallel_sizes=(2, 3),
    )
    dims = ParallelDims.from_config(config, 12)
    assert (dims.cp_inner, config.ranks_by_heads, config.ranks_by_queries) == (2, 2, 3)
    inner, outer = dims.instance_groups("cp", parts=3), dims.copy_groups("cp", parts=3)
    assert inner == [(0, 2), (4, 6), (8, 10), (1, 3), (5, 7), (9, 11)]
    assert outer == [(0, 4, 8), (2, 6, 10), (1, 5, 9), (3, 7, 11)]
    assert ParallelDims.from_config(ModelParallelConfig(context_parallel_size=6), 6).cp_inner is None


def test_a_mismatched_world_size_is_refused_with_the_nearest() -> None:
    config = ModelParallelConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"world size 12 .*= 8; nearest: 16"):
        ParallelDims.from_config(config, 12)
