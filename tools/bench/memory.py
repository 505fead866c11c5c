"""Measure the memory of training on each rank, in gloo worlds of 1 to 8 processes, and compare it with the plan.

    python tools/bench/memory.py
    python tools/bench/memory.py --only "TP 2" "PP 2 zb-v" --json memory.json

Columns, in KiB:
  states   parameters, gradients and optimizer state, as allocated
  kept     saved activations: the maximum between two actions of the pipeline, without messages in flight
  = plan   whether states, whole units, saved activations and host memory equal the plan of the dry run to the byte
  peak     the maximum during the forward and backward passes; `planned` is the plan's estimate of it
  host     states and activations in host memory, and buffers for them
  update   the maximum that gradient reduction, clipping and the optimizer allocate
  layer    saved activations of one layer and micro-batch, in bytes per element of its input (units of sbh)

The plan takes the highest points of whole units, of reductions and of activations to be at the same time, and leaves
out the blocks that gloo receives of a bucket whose gradients are sharded, as large as the bucket: GPUs have none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.parallel_dims import ParallelDims
from megatron.core.pipeline_parallel.actions import COMPUTE, Action
from megatron.core.pipeline_parallel.stages import Stage
from megatron.extensions.planner.activations import ActivationPlan, activations_of_ranks
from megatron.extensions.planner.fake_stage import MicroBatch
from megatron.extensions.planner.live_memory import LiveMemory
from megatron.extensions.planner.memory import states_of_rank
from megatron.testing.local_world import run_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.forward_backward import count_tokens, loss_and_tokens
from megatron.training.initialize import local_runtime
from megatron.training.run import TrainingRun
from megatron.training.setup import build_run
from megatron.training.train_step import train_step
from tools.bench.side_by_side import bench_parser, machine, write_json

COMMON = (
    "--num-layers {layers} --hidden-size {hidden} --num-attention-heads 8 --seq-length {seq} --vocab-size {vocab} "
    "--micro-batch-size 1 --global-batch-size 8 --mock-data --train-iters 100 --eval-iters 0 --lr 1e-4 --num-workers 0 "
    "--bf16 --cpu"
)
LLAMA = (
    "--group-query-attention --num-query-groups 4 --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
EXPERTS = (
    "--disable-bias-linear --num-experts 8 --moe-router-load-balancing-type none --attention-dropout 0 "
    "--hidden-dropout 0 --ep 2 --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1 "
    "--moe-pad-expert-input-to-capacity"
)
"""With messages of a fixed size, as what travels would depend on the router."""

FULL, SELECTIVE = "--recompute-granularity full", "--recompute-granularity selective"
MODULES = f"{SELECTIVE} --recompute-modules"
ZERO = {
    stage: f"--data-parallel-sharding-strategy {strategy}"
    for stage, strategy in ((1, "optim"), (2, "optim_grads"), (3, "optim_grads_params"))
}
STATES = "--optimizer-cpu-offload"
SAVED = "--cpu-offloading --min-offloaded-tensor-size 1 --cpu-offloading-num-layers"
SCHEDULE = "--pp 2 --pipeline-schedule"
LAYOUTS: dict[str, tuple[int, str]] = {
    "1 process": (1, ""),
    "selective": (1, SELECTIVE),
    "layernorm": (1, f"{MODULES} layernorm"),
    "mlp_act": (1, f"{MODULES} mlp_act"),
    "mlp": (1, f"{MODULES} mlp"),
    "all modules": (1, f"{MODULES} core_attn layernorm mlp"),
    "full": (1, FULL),
    "TP 2": (2, "--tp 2"),
    "TP 2 SP": (2, "--tp 2 --sequence-parallel"),
    "TP 2 SP selective": (2, f"--tp 2 --sequence-parallel {SELECTIVE}"),
    "TP 4 SP": (4, "--tp 4 --sequence-parallel"),
    **{f"PP 2 {name}": (2, f"{SCHEDULE} {name}") for name in ("1f1b", "interleaved", "zb-h1", "zb-v")},
    "PP 4 1f1b": (4, "--pp 4"),
    "TP 2 SP PP 2": (4, "--tp 2 --sequence-parallel --pp 2"),
    "DP 2": (2, "--no-use-distributed-optimizer"),
    **{f"DP {ranks} ZeRO-{stage}": (ranks, flags) for stage, flags in ZERO.items() for ranks in (2, 4, 8)},
    "DP 2 offload 0.6": (2, f"{STATES} --optimizer-offload-fraction 0.6"),
    "DP 2 ZeRO-2 offload": (2, f"{STATES} {ZERO[2]}"),
    "DP 2 ZeRO-3 offload": (2, f"{STATES} {ZERO[3]}"),
    "activations offload": (1, f"{SAVED} 3"),
    "activations offload, all modules": (1, f"{SAVED} 3 {MODULES} core_attn layernorm mlp"),
    "activations offload, full": (1, f"{SAVED} 4 {FULL}"),
    **{
        f"activations offload PP 2 {name}": (2, f"{SAVED} 1 {SCHEDULE} {name}")
        for name in ("1f1b", "interleaved", "zb-h1")
    },
    "PP 2 DP 2 ZeRO-3": (4, f"--pp 2 {ZERO[3]}"),
    "CP 2": (2, "--cp 2"),
    "CP 2 all_gather": (2, "--cp 2 --cp-comm-type all_gather"),
    "CP 2 a2a": (2, "--cp 2 --cp-comm-type a2a"),
    "llama": (1, LLAMA),
    "llama fp8": (1, f"{LLAMA} --fp8-format hybrid --fp8-recipe tensorwise"),
    "llama fp8 row PP 2": (2, f"{LLAMA} --pp 2 --fp8-format hybrid --fp8-recipe rowwise"),
    "llama fp8 PP 2 zb-h1": (2, f"{LLAMA} {SCHEDULE} zb-h1 --fp8-format e4m3 --fp8-recipe delayed"),
    "llama full": (1, f"{LLAMA} {FULL}"),
    "llama TP 2 SP": (2, f"{LLAMA} --tp 2 --sequence-parallel"),
    "llama PP 2 zb-v": (2, f"{LLAMA} {SCHEDULE} zb-v"),
    "llama CP 2": (2, f"{LLAMA} --cp 2"),
    "llama activations offload CP 2 ZeRO-3": (2, f"{LLAMA} {SAVED} 3 --cp 2 {ZERO[3]}"),
    "llama activations offload fp8 PP 2": (2, f"{LLAMA} {SAVED} 1 --pp 2 --fp8-format hybrid --fp8-recipe delayed"),
    **{
        f"experts EP 2 PP 2 {schedule}{name}": (4, f"{EXPERTS} {SCHEDULE} {schedule} {flags}")
        for schedule in ("interleaved", "zb-h2")
        for name, flags in (("", ""), (" in turns", "--overlap-moe-expert-parallel-comm"))
    },
    **{
        f"experts EP 2 DP {ranks} ZeRO-{stage}": (ranks, f"{EXPERTS} {flags}")
        for ranks in (4, 8)
        for stage, flags in ZERO.items()
    },
}
"""Name -> world size, flags."""

SMALL = {"layers": 4, "hidden": 256, "seq": 256, "vocab": 8192}


@dataclass(frozen=True)
class Measured:
    """Of one rank, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    kept: int
    units: int
    """The most bytes of whole parameters and gradients of units that were there at the same time."""

    host: int
    """Host memory: of optimizer states, of what gradients and parameters pass through, and of saved activations."""

    peak: int
    update: int = 0


@dataclass(frozen=True)
class Row:
    layout: str
    rank: int
    measured: Measured
    planned: Measured
    """`peak` is the estimate; nothing is planned for `update`."""

    layer: int
    """Bytes of one layer and micro-batch in `planned.kept`."""

    @property
    def equal(self) -> bool:
        """Whether states and kept activations are the plan's to the byte."""
        names = ("parameters", "gradients", "optimizer", "kept", "units", "host")
        return all(getattr(self.measured, name) == getattr(self.planned, name) for name in names)


def config_of(flags: str, world_size: int, sizes: dict[str, int]) -> RunConfig:
    """Raises ValueError if the flags are not legal."""
    return resolve_legal(parse_args(f"{COMMON.format(**sizes)} {flags}".split()), world_size)


def measure(rank: int, world_size: int, config: RunConfig) -> Measured:
    """Of the second step of a run: the first one makes what stays."""
    with ExitStack() as resources:
        run = build_run(config, local_runtime(config, rank, world_size))
        resources.callback(run.data.close)
        train_step(run)
        parameters, gradients, optimizer, host = states_of(run)
        units = WholeUnits(run.ddp.units.buckets)
        kept, peak, update = activations_of(run, units)
        offload = next(iter(run.stages.values())).decoder.offload
        host += offload.pool.nbytes if offload is not None else 0
    return Measured(parameters, gradients, optimizer, kept, units.most, host, peak, update)


class WholeUnits:
    """Bytes of whole parameters and whole gradients of units: the most of each that there were."""

    def __init__(self, buckets: Sequence[Any]) -> None:
        self.buckets, self.parameters, self.gradients = buckets, 0, 0
        for bucket in buckets:
            bucket.start_gather = self._after(bucket.start_gather)  # type: ignore[method-assign]
            bucket.open_grads = self._after(bucket.open_grads)  # type: ignore[method-assign]

    @property
    def most(self) -> int:
        return self.parameters + self.gradients

    @property
    def memory(self) -> set[int]:
        """The storages that come and go."""
        tensors = (tensor for b in self.buckets for tensor in (b.params, b.grads))
        return {tensor.untyped_storage()._cdata for tensor in tensors}

    def _after(self, method: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            method()
            params = sum(b.params.untyped_storage().nbytes() for b in self.buckets if b.shards_params)
            self.parameters = max(self.parameters, params)
            self.gradients = max(self.gradients, sum(b.grads.untyped_storage().nbytes() for b in self.buckets))

        return call


def states_of(run: TrainingRun) -> tuple[int, int, int, int]:
    """Bytes of the tensors that hold parameters, gradients and the optimizer's state, on the device and on the host."""
    buffers = run.ddp.buffers
    return (
        sum(buffer.param_data.nbytes for buffer in buffers),
        sum(buffer.grad_data.nbytes for buffer in buffers),
        *run.optimizer.nbytes,
    )


def activations_of(run: TrainingRun, units: WholeUnits) -> tuple[int, int, int]:
    """(most kept between two actions, peak of forward and backward, peak of the update) of a step."""
    step, executor, kept = run.progress.next_step(run.batch_sizes), run.pipeline.executor, 0
    batches = run.data.read_batches(step)
    run.ddp.begin_step(len(batches))
    seed = run.forward_backward.loss_seed(run.optimizer.loss_scale)
    scaled, total_tokens = run.forward_backward.with_scale(step, batches, seed)
    with LiveMemory() as live:

        def after(action: Action) -> None:
            nonlocal kept
            if action.kind in COMPUTE:
                if run.runtime.launch.world_size > 1:
                    if units.buckets:
                        run.ddp.units.wait_grad_sync()
                    live.settle()
                results = {result.untyped_storage()._cdata for result in executor.results()}
                others = results | units.memory
                kept = max(kept, sum(size for key, size in live.sizes.items() if key not in others))

        executor.after = after
        losses = run.pipeline.train(scaled, seed)
        peak, before = live.peak, live.now
        live.restart_peak()
        finalize_model_grads(run.ddp, total_tokens, run.runtime.state, seed)
        sums = loss_and_tokens(losses, count_tokens(batches), run.runtime)
        run.optimizer.step(1e-4, 0.0, sums, run.guard.judge)
        return kept, peak, live.peak - before


def plan(config: RunConfig, world_size: int) -> list[Measured]:
    """The dry run's, by pipeline rank."""
    dims = ParallelDims.from_config(config.parallel, world_size)
    micro = config.training.num_microbatches
    assert micro is not None
    found = []
    for rank, held in enumerate(activations_of_ranks(MicroBatch.of(config), micro)):
        plan = states_of_rank(config.model, config.parallel, config.optimizer, config.ddp, dims, rank)
        states, units = plan.memory, plan.in_flight.parameters + plan.in_flight.gradients
        kept, peak = held.peak + held.weight_copies, held.total + plan.in_flight.total
        host = states.host + held.host
        found.append(Measured(states.parameters, states.gradients, states.optimizer, kept, units, host, peak))
    return found


def layer_bytes(config: RunConfig) -> int:
    """Saved activations of one layer and micro-batch, from the plan."""
    planned = ActivationPlan(MicroBatch.of(config))
    one, two = (planned.stage(Stage(range(n), first=False, last=False)).kept for n in (1, 2))
    return two - one


def rows_of(name: str, sizes: dict[str, int]) -> list[Row]:
    """One row for each rank of a layout."""
    world_size, flags = LAYOUTS[name]
    config = config_of(flags, world_size, sizes)
    planned, dims = plan(config, world_size), ParallelDims.from_config(config.parallel, world_size)
    ranks = run_world(world_size, measure, config)
    layer = layer_bytes(config)
    return [Row(name, rank, found, planned[dims.coords(rank)["pp"]], layer) for rank, found in enumerate(ranks)]


TITLES = ("states", "kept", "= plan", "peak", "planned", "ratio", "host", "update", "layer")
WIDTHS = (10, 10, 8, 10, 10, 7, 9, 9, 8)


def say(head: str, cells: Sequence[str]) -> None:
    """Prints a line of the table."""
    print(f"{head:<41}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)), flush=True)


def cells_of(row: Row, sizes: dict[str, int]) -> list[str]:
    found, plan = row.measured, row.planned
    states = found.parameters + found.gradients + found.optimizer
    known = "equal" if row.equal else "DIFFER"
    peaks = [kib(found.peak), kib(plan.peak), f"{found.peak / plan.peak:.2f}"]
    layer = f"{row.layer / (sizes['seq'] * sizes['hidden']):.2f}"
    return [kib(states), kib(found.kept), known, *peaks, kib(found.host), kib(found.update), layer]


def kib(size: int) -> str:
    return f"{size / 2**10:,.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="NAME")
    for name, value in SMALL.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args(argv)
    sizes = {name: getattr(args, name) for name in SMALL}
    facts = machine() | sizes
    shape = f"L {args.layers}, h {args.hidden}, a 8, s {args.seq}, V {args.vocab}"
    print(f"{shape}, micro-batches of 1, 8 samples a step, bf16, Adam; KiB of each rank")
    say("layout", TITLES)
    rows = []
    for name in args.only:
        for row in rows_of(name, sizes):
            say(f"{name:<38}{row.rank:>3}", cells_of(row, sizes))
            if not row.equal:
                print(f"    measured {row.measured}\n    planned  {row.planned}")
            rows.append(row)
    write_json(args.json, facts, rows)
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
