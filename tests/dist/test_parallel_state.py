"""Tests of process groups. The tests check which ranks are members of each group, and whether all ranks take part in
the creation of each group."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import parallel_state as ps
from megatron.core.parallel_dims import ParallelDims
from tests.harness import run_world

READERS = {"tp": "tensor_model", "pp": "pipeline_model", "dp": "data", "cp": "context", "ep": "expert_model"}


def _sums_along_axes(rank: int, world_size: int) -> dict[str, float]:
    state = ps.initialize_model_parallel(2, 2)
    assert (state.tp.rank, state.pp.rank, state.dp.size) == (rank % 2, rank // 4, 2)
    for name, prefix in READERS.items():
        axis = state.axis(name)
        found = [getattr(ps, f"get_{prefix}_parallel_{what}")() for what in ("rank", "world_size", "group")]
        assert found == [axis.rank, axis.size, axis.group], name
    sums = {}
    for name in ("tp", "dp", "pp", "dp_cp", "mp", "embd"):
        value = torch.tensor([2.0**rank])
        dist.all_reduce(value, group=state.axis(name).group)
        assert value.item() == sum(2.0**r for r in state.axis(name).ranks)
        sums[name] = value.item()
    return sums


def test_groups_carry_collectives() -> None:
    results = run_world(8, _sums_along_axes)
    assert results[0] == {"tp": 3.0, "dp": 5.0, "pp": 17.0, "dp_cp": 5.0, "mp": 51.0, "embd": 17.0}


SIZES = st.sampled_from([1, 2, 3])


@given(tp=SIZES, pp=st.integers(1, 4), cp=SIZES, dp=SIZES, expert=st.booleans(), swapped=st.booleans())
@settings(max_examples=25, deadline=None)
def test_all_ranks_create_their_groups_together(
    tp: int, pp: int, cp: int, dp: int, expert: bool, swapped: bool
) -> None:
    """NCCL creates each group by splitting the world, and every rank must take part in the split. Under every layout,
    the groups that all ranks create in their n-th call must therefore contain each rank exactly once."""
    dims = ParallelDims(tp, pp, cp, dp, ep=dp * cp if expert else 1, expt_tp=tp, tp_pp_dp=swapped)
    made: list[list[tuple[int, ...]]] = []
    for rank in range(dims.world_size):
        calls: list[tuple[int, ...]] = []
        with mock.patch.object(dist, "new_group", lambda ranks, calls=calls, **kwargs: calls.append(tuple(ranks))):
            state = ps.build_parallel_state(dims, rank, backend="nccl")
        assert all(rank in ranks for ranks in calls)
        assert len(state.lanes) == (len(ps.LANES) if pp > 1 else 1 if "pp" in state.axes else 0)
        made.append(calls)
    assert len({len(calls) for calls in made}) == 1
    for groups in zip(*made, strict=True):
        assert sorted(rank for group in set(groups) for rank in group) == list(range(dims.world_size))


def test_sizes_that_do_not_divide_the_world_are_refused() -> None:
    def refused(rank: int, world_size: int) -> str:
        with pytest.raises(ValueError, match="world size 2 must be a multiple") as error:
            ps.initialize_model_parallel(4)
        return str(error.value)

    assert len(set(run_world(2, refused))) == 1


def initialize_repeatedly(rank: int, world_size: int) -> int:
    return sum(ps.initialize_model_parallel(1, world_size).pp.size for _ in range(4))


def test_groups_can_be_created_again() -> None:
    """A process that loads a second model creates its process groups again. Ranks that hold neither the first nor the
    last pipeline stage belong to fewer groups."""
    assert run_world(3, initialize_repeatedly) == [12, 12, 12]
