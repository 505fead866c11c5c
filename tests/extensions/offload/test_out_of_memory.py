"""If a device runs out of memory, the error message suggests offloading."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron.extensions.plan.planner import out_of_memory
from megatron.extensions.plan.planner.fake_stage import PlannerCache
from megatron.extensions.plan.planner.out_of_memory import flags_of, planned_memory, with_change
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from tests.extensions.planner.test_out_of_memory import MODEL, measured_once, planned, report  # noqa: F401 (a fixture)


def test_activation_offloading_is_suggested_before_recomputation() -> None:
    smallest = "--num-layers 4 --min-offloaded-tensor-size 1"
    offload = {"cpu_offloading": True, "cpu_offloading_num_layers": 3}
    found = list(out_of_memory.changes(resolve(parse_args(f"{MODEL} {smallest}".split()), 2)))
    assert found.index(offload) < found.index(out_of_memory.FULL)
    assert planned(smallest, offload) < planned(smallest)
    assert flags_of(offload) == "--cpu-offloading --cpu-offloading-num-layers 3"
    assert "\nactivations on host" in report(f"{smallest} {flags_of(offload)}")


@pytest.mark.parametrize("free", [2**30, 100_000])
def test_states_in_host_memory_are_suggested_if_there_is_room(free: int) -> None:
    flags = "--data-parallel-sharding-strategy optim_grads_params --micro-batch-size 1 "
    flags += "--recompute-granularity selective --use-precision-aware-optimizer "
    flags += "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    change = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    config = resolve(parse_args(f"{MODEL} {flags}".split()), 2)
    changed = with_change(config, change, 2)
    assert changed is not None
    with mock.patch.object(out_of_memory, "host_memory_of_a_rank", return_value=free):
        found = report(flags, mock.Mock(total_memory=planned(flags, change) + 1))
    host, before = (planned_memory(each, 2, 0, PlannerCache()).plan.memory.host for each in (changed, config))
    assert host > 100_000 and before == 0
    fits = "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 (plan: "
    assert (fits in found) == (free > host)
    assert (f"and {out_of_memory.byte_text(host)} of host memory)" in found) == (free > host)
