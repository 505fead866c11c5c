"""Tests of ZeRO-2 and ZeRO-3. The tests check how long parameters are unsharded, how many bytes are sent, and which
unit is prefetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.distributed.param_and_grad_buffer import SmallGrads
from megatron.core.distributed.param_layout import unit_of
from megatron.core.distributed.unit_sharding import Order, UnitBucket
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.testing.local_run import local_run
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from megatron.training.run import TrainingRun
from megatron.training.train_step import train_step
from tests.dist.test_collective_counts import recorded
from tests.harness import run_world
from tests.tiny import TINY

MODEL = f"{TINY} --num-layers 4 --hidden-size 32 --seq-length 16 --vocab-size 60 --micro-batch-size 1 --fp32 "
MODEL += "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope"
MICROBATCHES = 3


def config(flags: str, world_size: int) -> Any:
    return resolve_legal(parse_args(f"{MODEL} {flags}".split()), world_size)


def sharding(strategy: str) -> str:
    return f"--data-parallel-sharding-strategy {strategy}"


def units(run: TrainingRun) -> dict[str, list[UnitBucket]]:
    """Return the buckets of each sharding unit, keyed by unit name."""
    found: dict[str, list[UnitBucket]] = {}
    for bucket in run.ddp.units.buckets:
        found.setdefault(unit_of(bucket.layout.params[0].meta.name), []).append(bucket)
    return found


CALLS: dict[str, tuple[str, Callable[[UnitBucket], bool]]] = {
    "start_gather": ("gather", lambda bucket: not bucket.whole_params),
    "open_grads": ("add", lambda bucket: not bucket.whole_grads),
    "start_grad_sync": ("reduce", lambda bucket: bucket.whole_grads),
    "finish_grad_sync": ("reduced", lambda bucket: bucket._reduced is not None),
}
"""Dictionary that maps the name of each bucket method that `Watch` records to an event name and a predicate. A call is
recorded only if the predicate returns True, that is, if the call has an effect."""


class Watch:
    """Recorder of the events of sharding units, in order. "gather" and "reduce" are recorded when a collective starts,
    "reduced" is recorded when the wait for a reduction ends, and "add" is recorded when a backward pass computes the
    first gradient of a unit. The recorder also determines the largest number of units that are unsharded at the same
    time."""

    def __init__(self, run: TrainingRun) -> None:
        self.params, self.grads, self.run, self.events = 0, 0, run, list[tuple[str, str]]()
        for name, buckets in units(run).items():
            for bucket, (method, (event, happens)) in product(buckets, CALLS.items()):
                setattr(bucket, method, self.watched(getattr(bucket, method), (event, name), bucket, happens))

    def watched(
        self, method: Any, event: tuple[str, str], bucket: UnitBucket, happens: Callable[[UnitBucket], bool]
    ) -> Any:
        def call() -> None:
            self.events.extend([event] if happens(bucket) else [])
            method()
            buckets = self.run.ddp.units.buckets
            self.params = max(self.params, sum(bucket.whole_params for bucket in buckets))
            self.grads = max(self.grads, sum(bucket.whole_grads for bucket in buckets))

        return call


def steps(rank: int, world_size: int, flags: str) -> dict[str, Any]:
    """Run two steps. Return the collectives of the second step, the largest number of units that were unsharded at
    once, and the memory in use after the step."""
    with local_run(config(flags, world_size), rank, world_size) as run:
        train_step(run)
        watch = Watch(run)
        with recorded() as calls:
            train_step(run)
        buckets = run.ddp.units.buckets
        whole = [t for b in buckets for t in ((b.params, b.grads) if b.shards_params else (b.grads,))]
        return {
            "calls": Counter(calls),
            "whole": (watch.params, watch.grads),
            "held": sum(tensor.untyped_storage().nbytes() for tensor in whole),
            "psi": sum(bucket.params.nbytes for bucket in buckets),
            "sizes": {name: sum(b.params.nbytes for b in found) for name, found in units(run).items()},
            "units": list(units(run)),
        }


def bytes_of(found: dict[str, Any], kind: str) -> int:
    """Return the total number of bytes of the collectives of one kind whose operands are unit buckets."""
    sizes = set(found["sizes"].values())
    return sum(nbytes * count for (name, nbytes), count in found["calls"].items() if name == kind and nbytes in sizes)


def test_gradients_are_reduced_with_each_micro_batch_and_parameters_gathered_once_a_step() -> None:
    flags = f"--global-batch-size {2 * MICROBATCHES} {sharding('optim_grads')}"
    for found in run_world(2, steps, flags):
        # on CPU, a reduce-scatter is implemented as all-to-all
        assert bytes_of(found, "all_to_all") == MICROBATCHES * found["psi"]
        assert bytes_of(found, "all_gather") == found["psi"]
        assert found["whole"][1] == 2, "the gradients of one unit are summed while those of another are reduced"
        assert found["held"] == 0


def test_parameters_are_sent_at_most_three_times_a_micro_batch() -> None:
    """The backward pass gathers all units again, with two exceptions: the output layer stays gathered after the forward
    pass, and the backward pass of the embedding reads no parameters. The ranks therefore send 3 Psi minus the size of
    these two units (arXiv 1910.02054, section 7.2.2)."""
    flags = f"--global-batch-size {2 * MICROBATCHES} {sharding('optim_grads_params')}"
    for found in run_world(2, steps, flags):
        layers = [f"decoder.layers.{number}" for number in (3, 2, 1, 0)]
        assert found["units"] == ["output_layer", *layers, "embedding.word_embeddings"]
        ends = found["sizes"]["output_layer"] + found["sizes"]["embedding.word_embeddings"]
        assert bytes_of(found, "all_gather") == MICROBATCHES * (2 * found["psi"] - ends)
        assert bytes_of(found, "all_to_all") == MICROBATCHES * found["psi"]
        assert found["whole"] == (2, 2), "the current unit and the next unit"
        assert found["held"] == 0


def events(rank: int, world_size: int, flags: str) -> list[tuple[str, str]]:
    """Return the events that `Watch` records in the third step. The result also contains the events ("begin", unit) and
    ("end", unit) for each pass of a unit's module."""
    with local_run(config(flags, world_size), rank, world_size) as run:
        found = Watch(run).events
        for unit in run.ddp.units.units:
            name = unit_of(unit.buckets[0].layout.params[0].meta.name)
            hooks = {
                "begin": (unit.module.register_forward_pre_hook, unit.module.register_full_backward_pre_hook),
                "end": (unit.module.register_forward_hook, unit.module.register_full_backward_hook),
            }
            for event, kinds in hooks.items():
                # the inputs of the embedding are token ids, which have no gradient
                for register in kinds if "embedding" not in name else kinds[:1]:
                    # "begin" is recorded before the unit's own hooks launch collectives.
                    first = {"prepend": True} if event == "begin" else {}
                    register(lambda *_, event=event, name=name: found.append((event, name)), **first)
        for _ in range(2):
            train_step(run)
        found.clear()
        train_step(run)
    return found


def test_collectives_are_launched_while_another_unit_computes() -> None:
    """The test checks the order of events, not their times. In both forward and backward passes, each gather except the
    first of a step starts while the preceding unit computes. Each reduction except the last is in flight while the next
    unit computes."""
    flags = f"--global-batch-size {2 * MICROBATCHES} {sharding('optim_grads_params')}"
    first, second = run_world(2, events, flags)
    assert first == second, "all ranks launch collectives in the same order"
    passes = [event for event in first if event[0] in ("begin", "end")]
    gathers = [place for place, (event, _) in enumerate(first) if event == "gather"]
    assert len(gathers) == MICROBATCHES * (2 * 6 - 2) and len(passes) == 2 * MICROBATCHES * (2 * 6 - 1)
    for place in gathers[1:]:
        before = [event for event in first[:place] if event[0] in ("begin", "end")]
        after = [unit for event, unit in first[place:] if event == "begin"]
        kind, computing = before[-1]
        assert kind == "begin" and computing != first[place][1], (
            f"no computation overlaps with {first[place]} at {place}"
        )
        assert first[place][1] in after[:2], "the gathered unit is not the next one"
    reductions = [place for place, (event, _) in enumerate(first) if event == "reduce"]
    assert len(reductions) == 6 * MICROBATCHES
    for place in reductions:
        until = first.index(("reduced", first[place][1]), place)
        begun = [unit for event, unit in first[place:until] if event in ("begin", "add")]
        assert begun or place == reductions[-1], f"the wait for {first[place]} precedes the computation of another unit"


def test_recomputed_layers_are_gathered_once_in_the_backward_pass() -> None:
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = f"--global-batch-size 2 {sharding('optim_grads_params')} {recompute}"
    (found, _) = run_world(2, steps, flags)
    ends = found["sizes"]["output_layer"] + found["sizes"]["embedding.word_embeddings"]
    assert bytes_of(found, "all_gather") == 2 * found["psi"] - ends


@pytest.mark.grid("schedule", ["zb-v"], ["1f1b", "zb-h1", "zb-v"])
def test_pipelines_have_few_unsharded_units(schedule: str) -> None:
    flags = f"--global-batch-size 8 --pp 2 --pipeline-schedule {schedule} {sharding('optim_grads_params')}"
    for found in run_world(4, steps, flags):
        assert found["whole"][0] <= 3 and found["held"] == 0


def test_the_order_of_units_is_learned_and_dropped_when_it_changes() -> None:
    order, (a, b, c) = Order(), "abc"
    order.begin(2)
    for unit in (a, b, c):
        order.ask(unit)  # type: ignore[arg-type]
        assert order.following(3) == []
    order.end()
    order.begin(2)
    order.ask(a)  # type: ignore[arg-type]
    assert order.following(3) == [b, c]
    order.ask(c)  # type: ignore[arg-type]
    assert order.following(3) == []
    order.begin(1)
    assert order.following(3) == []


def test_a_model_to_be_sharded_is_built_without_memory() -> None:
    live_memory = pytest.importorskip("megatron.extensions.plan.planner.live_memory")
    model = config("--global-batch-size 1", 1).model
    with live_memory.LiveMemory() as live:
        built = GPTModel(model, ModelParallelConfig(fp32=True), weights=WeightSetup(lazy=True))
    whole = sum(parameter.nbytes for parameter in built.parameters())
    assert live.now < whole / 100
    assert live.peak - live.now <= max(parameter.nbytes for parameter in built.parameters())


def test_small_gradients_of_units_are_added_before_their_memory_is_freed() -> None:
    held, param = SmallGrads(), torch.zeros(2)
    held.enabled = True
    assert held.takes(param, param)
    param.before_main_grad = lambda: None  # type: ignore[attr-defined]
    assert not held.takes(param, param)


def test_a_run_that_shards_nothing_has_no_distributed_optimizer() -> None:
    assert not config(f"--global-batch-size 2 {sharding('no_shard')}", 2).optimizer.use_distributed_optimizer
