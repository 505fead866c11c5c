"""Measure the memory of training on each rank, in gloo worlds of 1 to 4 processes, and compare it with the plan.

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
  formula  saved activations of all layers in flight, relative to the published formula

The formula is that of arXiv 2205.05198, table 2 and section 4.2.3: 16-bit activations with dropout, an MLP of width 4h
with GeLU, and attention that saves its scores. It covers neither context parallelism nor recomputed modules other than
core_attn. Differences from it:
  none       The formula saves attention scores, their softmax and a dropout mask: 5as/h. This code recomputes them from
             q, k, v and one fp32 number per head and query: 4a/h, and nothing of size s x s.
  selective  Only those fp32 numbers are left for core_attn to drop; the formula drops all of 5as/h.
  full       The input of the layer alone, as in the formula. With SP a rank has its shard; the formula counts all.
  all        Both norms also save mean and 1/deviation of each token: 8 bytes a token on CPU.

The plan takes the highest points of whole units, of reductions and of activations to be at the same time, and leaves
out the blocks that gloo receives of a bucket whose gradients are sharded, as large as the bucket: GPUs have none.

The loss is measured by itself: its memory beside the 16-bit logits, relative to logits in fp32 (s b V 4 bytes).
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

import torch

from megatron.core.config.model import TransformerConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import ParallelState, initialize_model_parallel
from megatron.core.pipeline_parallel.actions import COMPUTE, Action
from megatron.core.pipeline_parallel.stages import Stage, pipeline_layout, pipeline_stages
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.extensions.planner.activations import ActivationPlan, RankActivations, activations_of_ranks
from megatron.extensions.planner.dry_run.description import micro_batch_of
from megatron.extensions.planner.live_memory import LiveMemory
from megatron.extensions.planner.memory import states_of_rank
from megatron.testing.local_world import run_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve, validate
from megatron.training.forward_backward import count_tokens, loss_and_tokens
from megatron.training.initialize import local_runtime
from megatron.training.run import TrainingRun
from megatron.training.setup import build_run
from megatron.training.train_step import train_step
from tools.bench.side_by_side import bench_parser, machine, say_machine, write_json

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

SELECTIVE = "--recompute-granularity selective"
OFFLOAD = "--optimizer-cpu-offload"
ACTIVATIONS = "--cpu-offloading --cpu-offloading-num-layers {} --min-offloaded-tensor-size 1"
LAYOUTS: dict[str, tuple[int, str]] = {
    "1 process": (1, ""),
    "selective": (1, SELECTIVE),
    "layernorm": (1, f"{SELECTIVE} --recompute-modules layernorm"),
    "mlp_act": (1, f"{SELECTIVE} --recompute-modules mlp_act"),
    "mlp": (1, f"{SELECTIVE} --recompute-modules mlp"),
    "all modules": (1, f"{SELECTIVE} --recompute-modules core_attn layernorm mlp"),
    "full": (1, "--recompute-granularity full"),
    "TP 2": (2, "--tp 2"),
    "TP 2 SP": (2, "--tp 2 --sequence-parallel"),
    "TP 2 SP selective": (2, f"--tp 2 --sequence-parallel {SELECTIVE}"),
    "TP 4 SP": (4, "--tp 4 --sequence-parallel"),
    "PP 2 1f1b": (2, "--pp 2"),
    "PP 2 interleaved": (2, "--pp 2 --pipeline-schedule interleaved"),
    "PP 2 zb-h1": (2, "--pp 2 --pipeline-schedule zb-h1"),
    "PP 2 zb-v": (2, "--pp 2 --pipeline-schedule zb-v"),
    "PP 4 1f1b": (4, "--pp 4"),
    "TP 2 SP PP 2": (4, "--tp 2 --sequence-parallel --pp 2"),
    "DP 2": (2, "--no-use-distributed-optimizer"),
    "DP 2 ZeRO-1": (2, ""),
    "DP 4 ZeRO-1": (4, ""),
    **{
        f"DP {ranks} ZeRO-{stage}": (ranks, f"--data-parallel-sharding-strategy {strategy}")
        for stage, strategy in ((2, "optim_grads"), (3, "optim_grads_params"))
        for ranks in (2, 4, 8)
    },
    "DP 2 offload 0.6": (2, f"{OFFLOAD} --optimizer-offload-fraction 0.6"),
    "DP 2 ZeRO-2 offload": (2, f"{OFFLOAD} --data-parallel-sharding-strategy optim_grads"),
    "DP 2 ZeRO-3 offload": (2, f"{OFFLOAD} --data-parallel-sharding-strategy optim_grads_params"),
    "activations offload": (1, ACTIVATIONS.format(3)),
    "activations offload, all modules": (
        1,
        f"{ACTIVATIONS.format(3)} {SELECTIVE} --recompute-modules core_attn layernorm mlp",
    ),
    "activations offload, full": (1, f"{ACTIVATIONS.format(4)} --recompute-granularity full"),
    "activations offload PP 2 1f1b": (2, f"{ACTIVATIONS.format(1)} --pp 2"),
    "activations offload PP 2 interleaved": (2, f"{ACTIVATIONS.format(1)} --pp 2 --pipeline-schedule interleaved"),
    "activations offload PP 2 zb-h1": (2, f"{ACTIVATIONS.format(1)} --pp 2 --pipeline-schedule zb-h1"),
    "PP 2 DP 2 ZeRO-3": (4, "--pp 2 --data-parallel-sharding-strategy optim_grads_params"),
    "CP 2": (2, "--cp 2"),
    "CP 2 all_gather": (2, "--cp 2 --cp-comm-type all_gather"),
    "CP 2 a2a": (2, "--cp 2 --cp-comm-type a2a"),
    "llama": (1, LLAMA),
    "llama fp8": (1, f"{LLAMA} --fp8-format hybrid --fp8-recipe tensorwise"),
    "llama fp8 row PP 2": (2, f"{LLAMA} --pp 2 --fp8-format hybrid --fp8-recipe rowwise"),
    "llama fp8 PP 2 zb-h1": (2, f"{LLAMA} --pp 2 --pipeline-schedule zb-h1 --fp8-format e4m3 --fp8-recipe delayed"),
    "llama full": (1, f"{LLAMA} --recompute-granularity full"),
    "llama TP 2 SP": (2, f"{LLAMA} --tp 2 --sequence-parallel"),
    "llama PP 2 zb-v": (2, f"{LLAMA} --pp 2 --pipeline-schedule zb-v"),
    "llama CP 2": (2, f"{LLAMA} --cp 2"),
    "llama activations offload CP 2 ZeRO-3": (
        2,
        f"{LLAMA} {ACTIVATIONS.format(3)} --cp 2 --data-parallel-sharding-strategy optim_grads_params",
    ),
    "llama activations offload fp8 PP 2": (
        2,
        f"{LLAMA} {ACTIVATIONS.format(1)} --pp 2 --fp8-format hybrid --fp8-recipe delayed",
    ),
}
LAYOUTS |= {
    f"experts EP 2 PP 2 {schedule}{name}": (4, f"{EXPERTS} --pp 2 --pipeline-schedule {schedule} {flags}")
    for schedule in ("interleaved", "zb-h2")
    for name, flags in (("", ""), (" in turns", "--overlap-moe-expert-parallel-comm"))
}
LAYOUTS |= {
    f"experts EP 2 DP {ranks} ZeRO-{stage}": (ranks, f"{EXPERTS} --data-parallel-sharding-strategy {strategy}")
    for ranks in (4, 8)
    for stage, strategy in ((1, "optim"), (2, "optim_grads"), (3, "optim_grads_params"))
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
    peak: int
    update: int
    units: int = 0
    """The most bytes of whole parameters and gradients of units that were there at the same time."""

    host: int = 0
    """Host memory: of optimizer states, of what gradients and parameters pass through, and of saved activations."""


@dataclass(frozen=True)
class Row:
    layout: str
    rank: int
    measured: Measured
    planned: Measured
    """`peak` is the estimate; nothing is planned for `update`."""

    layer: int
    """Bytes of one layer and micro-batch in `planned.kept`."""

    layers: int
    """Bytes of all layers in `planned.kept`."""

    formula: float | None
    """What the published formula gives for these layers."""

    @property
    def equal(self) -> bool:
        """Whether states and kept activations are the plan's to the byte."""
        names = ("parameters", "gradients", "optimizer", "kept", "units", "host")
        return all(getattr(self.measured, name) == getattr(self.planned, name) for name in names)


def config_of(flags: str, world_size: int, sizes: dict[str, int]) -> RunConfig:
    """Raises ValueError if the flags are not legal."""
    config = resolve(parse_args(f"{COMMON.format(**sizes)} {flags}".split()), world_size)
    if problems := validate(config, world_size):
        raise ValueError("; ".join(map(str, problems)))
    return config


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
    return Measured(parameters, gradients, optimizer, kept, peak, update, units.most, host)


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


def plan(config: RunConfig, world_size: int) -> tuple[list[Measured], list[RankActivations]]:
    """The dry run's, by pipeline rank."""
    dims = ParallelDims.from_config(config.parallel, world_size)
    micro = config.training.num_microbatches
    assert micro is not None
    activations = activations_of_ranks(micro_batch_of(config), micro)
    found = []
    for rank, held in enumerate(activations):
        plan = states_of_rank(config.model, config.parallel, config.optimizer, config.ddp, dims, rank)
        states, units = plan.memory, plan.in_flight.parameters + plan.in_flight.gradients
        optimizer = states.optimizer
        kept = held.peak + held.weight_copies
        peak, host = held.total + plan.in_flight.total, states.host + held.host
        found.append(Measured(states.parameters, states.gradients, optimizer, kept, peak, 0, units, host))
    return found, activations


def activation_bytes_per_layer(
    config: TransformerConfig,
    micro_batch_size: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str | None = None,
) -> float:
    """Bytes that one layer of the published reference keeps for one micro-batch (arXiv 2205.05198, table 2).

    The formulas hold for 16-bit activations, dropout on, as many key/value heads as heads, an MLP of width 4h
    with GeLU and an attention that keeps its scores: a yardstick for any model, exact for that one.
    """
    s, h, a = config.seq_length, config.hidden_size, config.num_attention_heads
    sbh = s * micro_batch_size * h
    scores = 5 * a * s / h
    if recompute == "full":
        return 2 * sbh
    if recompute == "selective":
        scores = 0
    if sequence_parallel:
        return sbh / tp * (34 + scores)
    return sbh * (10 + 24 / tp + scores / tp)


def formula_of(config: RunConfig) -> float | None:
    """Bytes of one layer and micro-batch by the published formula, where it speaks of such a layer."""
    model, parallel = config.model, config.parallel
    if parallel.context_parallel_size > 1 or model.gated or model.recomputed_modules not in ((), ("core_attn",)):
        return None
    sizes = config.training.micro_batch_size, parallel.tensor_model_parallel_size, parallel.sequence_parallel
    return activation_bytes_per_layer(model, *sizes, model.recompute_granularity)


def layers_in_flight(config: RunConfig, held: RankActivations, pp_rank: int) -> int:
    """Layers whose activations a rank holds at its peak, once for each micro-batch."""
    stages = pipeline_stages(config.model, config.parallel)
    own = pipeline_layout(config.model, config.parallel).stages_of(pp_rank)
    return sum(count * len(stages[stage].layers) for count, stage in zip(held.in_flight, own, strict=True))


def layer_bytes(config: RunConfig) -> int:
    """Saved activations of one layer and micro-batch, from the plan."""
    planned = ActivationPlan(micro_batch_of(config))
    one, two = (planned.stage(Stage(range(n), first=False, last=False)).kept for n in (1, 2))
    return two - one


def rows_of(name: str, sizes: dict[str, int]) -> list[Row]:
    """One row for each rank of a layout."""
    world_size, flags = LAYOUTS[name]
    config = config_of(flags, world_size, sizes)
    planned, activations = plan(config, world_size)
    dims = ParallelDims.from_config(config.parallel, world_size)
    of_layer, layer = formula_of(config), layer_bytes(config)
    rows = []
    for rank, measured in enumerate(run_world(world_size, measure, config)):
        pp_rank = dims.coords(rank)["pp"]
        layers = layers_in_flight(config, activations[pp_rank], pp_rank)
        formula = None if of_layer is None else of_layer * layers
        rows.append(Row(name, rank, measured, planned[pp_rank], layer, layer * layers, formula))
    return rows


@dataclass(frozen=True)
class LossRow:
    """The loss of one rank: bytes beside its logits at most, and of its largest fp32 tensor."""

    tp: int
    extra: int
    largest_fp32: int
    whole_fp32: int
    """s b V/tp 4: what logits in fp32 would take."""


def measure_loss(rank: int, world_size: int, tokens: int, vocab: int) -> LossRow:
    """Forward and backward of the loss over bf16 logits [tokens, 1, vocab / tp] that an operation has made."""
    state = initialize_model_parallel(world_size) if world_size > 1 else ParallelState()
    columns = vocab // world_size
    made_from = torch.randn(tokens, 1, columns, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocab, (tokens, 1))
    with LiveMemory() as live:
        logits = made_from * 1.0
        live.restart_peak()
        before = live.now
        loss = vocab_parallel_cross_entropy(logits, labels, state.tp, vocab)
        torch.autograd.grad(loss.sum(), logits)
        return LossRow(world_size, live.peak - before, live.largest_fp32, 4 * tokens * columns)


def kib(size: int) -> str:
    return f"{size / 2**10:,.0f}"


def say(row: Row, sizes: dict[str, int]) -> None:
    """Prints a line of the table."""
    found, plan = row.measured, row.planned
    states = found.parameters + found.gradients + found.optimizer
    layer = row.layer / (sizes["seq"] * sizes["hidden"])
    ratio = "" if not row.formula else f"{row.layers / row.formula:.3f}"
    print(
        f"{row.layout:<38}{row.rank:>3}{kib(states):>10}{kib(found.kept):>10}{'equal' if row.equal else 'DIFFER':>8}"
        f"{kib(found.peak):>10}{kib(plan.peak):>10}{found.peak / plan.peak:>7.2f}"
        f"{kib(found.host):>9}{kib(found.update):>9}{layer:>8.2f}{ratio:>9}"
    )
    if not row.equal:
        print(f"    measured {found}\n    planned  {plan}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="NAME")
    for name, value in SMALL.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--loss-tokens", type=int, default=1024, help="s b of the loss that is measured")
    parser.add_argument("--loss-vocab", type=int, default=50304, help="its V")
    args = parser.parse_args(argv)
    sizes = {name: getattr(args, name) for name in SMALL}
    facts = machine() | sizes
    say_machine(facts)
    shape = f"L {args.layers}, h {args.hidden}, a 8, s {args.seq}, V {args.vocab}"
    print(f"{shape}, micro-batches of 1, 8 samples a step, bf16, Adam; KiB of each rank")
    titles = ("states", "kept", "= plan", "peak", "planned", "ratio", "host", "update", "layer", "formula")
    widths = (10, 10, 8, 10, 10, 7, 9, 9, 8, 9)
    print(f"{'layout':<41}" + "".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True)))
    rows: list[Any] = []
    for name in args.only:
        for row in rows_of(name, sizes):
            say(row, sizes)
            rows.append(row)
    for tp in (1, 2):
        loss = run_world(tp, measure_loss, args.loss_tokens, args.loss_vocab)[0]
        rows.append(loss)
        share, largest = loss.extra / loss.whole_fp32, loss.largest_fp32 / loss.whole_fp32
        print(
            f"loss, TP {tp}, s b {args.loss_tokens}, V {args.loss_vocab}: {kib(loss.extra)} KiB beside the logits, "
            f"{share:.3f} of logits in fp32; its largest fp32 tensor {largest:.3f}"
        )
    write_json(args.json, facts, rows)
    return 0 if all(row.equal for row in rows if isinstance(row, Row)) else 1


if __name__ == "__main__":
    sys.exit(main())
