"""Tests of --offload-weights, which keeps weights in host memory. Results are bit-identical, checkpoints are equal, and
only a few units (such as layers) are on the device at a time."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from megatron.core.optimizer.owned_tensors import other_weights
from megatron.extensions.memory.offload import placement
from megatron.extensions.memory.offload.streamed_units import StreamedBucket, StreamedUnits
from megatron.testing.local_run import local_run
from megatron.testing.reshard import Checkpoints
from megatron.testing.snapshot import train_in_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.run import TrainingRun
from megatron.training.train_step import train_step
from tests.dist.test_unit_sharding import Watch
from tests.extensions import installed
from tests.extensions.offload.late_copies import late_copies
from tests.harness import run_world
from tests.tiny import TINY

MODEL = f"{TINY} --hidden-size 64 --vocab-size 64 --position-embedding-type rope --disable-bias-linear "
MODEL += "--lr-decay-style constant --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --clip-grad 0.5 "
STREAM = "--optimizer-cpu-offload --offload-weights "
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params "
UNTIED = "--untie-embeddings-and-output-weights "
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "HOST_CHUNK", 2**15)
        yield


def parse(flags: str) -> RunConfig:
    return parse_args(shlex.split(MODEL + flags))


RUNS = {
    "fp32": (1, f"--fp32 {RECOMPUTE}"),
    "bf16": (1, f"--bf16 {UNTIED} --loss-chunk-tokens 3 --global-batch-size 2"),
    "sums in bf16": (1, "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16"),
    "experts": (1, "--fp32 --num-experts 64 --moe-ffn-hidden-size 64 --num-layers 1 --global-batch-size 2"),
    "ZeRO-3": (2, f"--bf16 --ep 2 --num-experts 4 {ZERO3}"),
    "split backward": (2, f"--fp32 {UNTIED} --pp 2 --pipeline-schedule zb-h1"),
}


@pytest.mark.parametrize("name", RUNS)
def test_streamed_weights_train_to_the_same_bits(name: str) -> None:
    """The test compares loss, gradients, gradient norm, weights, main parameters and moments of two steps with and
    without streamed weights. The compared values are equal even if copies complete as late as possible and freed memory
    loses its values."""
    ranks, flags = RUNS[name]
    plain = train_in_world(ranks, shlex.split(MODEL + flags))
    with late_copies():
        streamed = train_in_world(ranks, shlex.split(f"{MODEL} {flags} {STREAM}"))
    assert plain.tensors.keys() == streamed.tensors.keys() and not streamed.replica_errors
    different = [key for key in plain.tensors if not torch.equal(plain.tensors[key], streamed.tensors[key])]
    # The terms of the gradient norm are added in float64 and in a different order.
    norms = [key for key in different if key.endswith("grad_norm")]
    assert different == norms
    assert all(torch.allclose(plain.tensors[key], streamed.tensors[key], rtol=1e-12, atol=0) for key in norms)


def streamed_buckets(run: TrainingRun) -> list[StreamedBucket]:
    assert isinstance(run.ddp.units, StreamedUnits)
    return list(run.ddp.units.buckets)


def _passes(rank: int, world_size: int, flags: str) -> list[tuple[str, str]]:
    with local_run(resolve_legal(parse(flags), world_size), rank, world_size) as run:
        for _ in range(2):
            train_step(run)
        watch, buckets = Watch(run), streamed_buckets(run)
        train_step(run)
        assert watch.params == 2, "the current unit and the next unit"
        assert watch.grads == 3, "the current unit, the previous unit and the next unit"
        for bucket in buckets:
            assert not bucket.whole_params and not bucket.whole_grads
            assert bucket.params.untyped_storage().nbytes() == bucket.grads.untyped_storage().nbytes() == 0
            memory = bucket.params, bucket.grads, bucket.param_shard, bucket.grad_shard
            assert len({tensor.untyped_storage()._cdata for tensor in memory}) == 4
        return watch.events


def test_few_units_are_on_the_device_and_the_next_one_is_copied_ahead() -> None:
    (events,) = run_world(1, _passes, f"--fp32 --num-layers 4 {UNTIED} --global-batch-size 2 {STREAM}")
    adds = [name for event, name in events if event == "add"]
    layers = [f"decoder.layers.{number}" for number in (3, 2, 1, 0)]
    assert adds == 2 * ["output_layer", *layers, "embedding.word_embeddings"]
    second = len(events) - events[::-1].index(("add", "output_layer")) - 1
    for name in layers:  # the accumulated gradient of a unit is fetched during the preceding unit's backward pass
        fetched = events.index(("add", name), second)
        assert ("reduce", name) not in events[second:fetched]
        before = (["output_layer", *layers])[layers.index(name)]
        assert ("reduce", before) in events[fetched:], f"{name} arrives after {before} has left"


def test_checkpoints_load_with_and_without_offloading(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for name, flags in (("plain", "--fp32"), ("streamed", f"--fp32 {STREAM}")):
        checkpoints.visit(name, 1, parse(flags), train=True)
    for ranks, flags, sources in ((1, "", ["streamed"]), (2, f"{ZERO3} {STREAM}", ["plain", "streamed"])):
        found = checkpoints.visit("loaded", ranks, parse(f"--fp32 {flags}"), sources)
        assert found == {source: [] for source in sources}


def _evaluated(rank: int, world_size: int, flags: str) -> list[torch.Tensor]:
    """Train one step, evaluate the weights and their averages, and compute the gradients of another step. Return the
    evaluation losses and the gradients."""
    with local_run(resolve_legal(parse(flags), world_size), rank, world_size) as run:
        train_step(run)
        batches = run.data.read_batches(run.progress.next_step(run.batch_sizes))
        averages = [piece for callback in run.callbacks for piece in callback.states]
        with run.pipeline.evaluation_mode(), torch.no_grad():
            found = run.pipeline.evaluate(batches)
            with other_weights(run.optimizer, averages):
                found += run.pipeline.evaluate(batches)
        train_step(run)
        norms = [param for param in run.ddp.params if not param.meta.matrix]  # type: ignore[attr-defined]
        return [*found, *(param.main_grad for param in norms)]  # type: ignore[attr-defined]


def test_an_evaluation_reads_the_updated_weights() -> None:
    states = f"--fp32 --optimizer-cpu-offload {'--ema-decay 0.5' if installed('averaged_weights') else ''} "
    with late_copies():
        plain, streamed = (run_world(1, _evaluated, flags)[0] for flags in (states, f"{states} --offload-weights"))
    assert len(plain) > 6 and all(torch.equal(*pair) for pair in zip(plain, streamed, strict=True))
