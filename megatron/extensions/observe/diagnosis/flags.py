"""Diagnosis flags, rules and callbacks. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.flag_spec import Condition, flag
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from megatron.training.config.flags import named_value
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

FINDING = "finding.json"
"""Name of the file that describes the step saved in a folder."""


def _by_torch(config: RunConfig) -> bool:
    own = config.options(DiagnosisConfig)
    return own.profile and (own.use_pytorch_profiler or config.parallel.cpu)


BY_TORCH = Condition("--profile --use-pytorch-profiler", _by_torch)
BY_NSYS = Condition("--profile on GPUs", lambda c: c.options(DiagnosisConfig).profile and not _by_torch(c))


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(DiagnosisConfig)
    threshold, length = own.layer_growth_threshold, config.training.train_iters
    if threshold and not 1 < threshold < math.inf:
        remedy = f"the default is {DiagnosisConfig.layer_growth_threshold}"
        yield Problem("--layer-growth-threshold", threshold, "must be 0 or above 1", remedy)
    profiles = own.profile or own.record_memory_history
    for used, kind, start, end in (
        (profiles, "profile", own.profile_step_start, own.profile_step_end),
        (own.trace, "trace", own.trace_step_start, own.trace_step_end),
    ):
        if used and end <= start:
            rule = f"must be above --{kind}-step-start {start}"
            yield Problem(f"--{kind}-step-end", end, rule, f"nearest: {start + 1}")
    if profiles and any(not 0 <= rank < world_size for rank in own.profile_ranks):
        rule = f"must be below the {world_size} ranks"
        yield Problem("--profile-ranks", own.profile_ranks, rule, "remove the others")
    yield from _unwritten(own, config)
    yield from _undumped(own, config)
    if own.trace and length is not None and 0 < length <= own.trace_step_start:
        rule = f"has no effect in a run of --train-iters {length}"
        remedy = f"use {max(0, length - 2)} and --trace-step-end {length}"
        yield Problem("--trace-step-start", own.trace_step_start, rule, remedy, harmless=True)


def _unwritten(own: DiagnosisConfig, config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each flag that would write files to --save although --save is a URL."""
    save = config.checkpoint.save
    if save is None or config.checkpoint.save_folder is not None or named_value(config, "tensorboard_dir"):
        return
    for used, name in ((_by_torch(config), "--profile"), (own.trace, "--trace")):
        if used:
            rule = f"is a URL, but {name} writes files only to mounted file systems"
            yield Problem("--save", save, rule, "add --tensorboard-dir FOLDER")


def _undumped(own: DiagnosisConfig, config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that does not permit --dump-step."""
    if own.dump_step is None:
        return
    if own.dump_step_dir is None and config.checkpoint.save_folder is None:
        yield Problem("--dump-step", own.dump_step, "needs a folder to write to", "add --dump-step-dir FOLDER")
    folder = Path(own.dump_step_dir or "")
    if own.dump_step_dir and folder.is_dir() and any(folder.iterdir()) and not (folder / FINDING).is_file():
        rule, remedy = "contains other files, which a dump would replace", "name a new folder"
        yield Problem("--dump-step-dir", own.dump_step_dir, rule, remedy)
    if not PIPELINE_SCHEDULES.facts(config.parallel.schedule).flushes:
        rule = (
            f"needs the weights that the step used, but --pipeline-schedule {config.parallel.schedule} overwrites them"
        )
        yield Problem("--dump-step", own.dump_step, rule, "use --pipeline-schedule 1f1b")
    dropout = [
        f"{flag} {value:g}"
        for flag, value in (
            ("--hidden-dropout", config.model.hidden_dropout),
            ("--attention-dropout", config.model.attention_dropout),
        )
        if value
    ]
    if dropout:
        rule = f"dumps a step that tools/referee.py refuses, because the run has {' and '.join(dropout)}"
        remedy = "use --hidden-dropout 0 --attention-dropout 0"
        yield Problem("--dump-step", own.dump_step, rule, remedy, harmless=True)


@extension_flags("diagnosis: layer statistics, stragglers, profiles", may_change=True, rules=rules)
@dataclass(frozen=True)
class DiagnosisConfig:
    log_layer_stats: int = flag(0, at_least=0, excludes="--cuda-graph-impl local: a replayed graph runs no hooks")
    """Number of iterations between per-layer statistics: norms of weights, gradients and updates, and statistics of
    activations, attention logits and routers. 0 disables them."""

    layer_growth_threshold: float = flag(1.2, at_least=0, no_effect_without="--log-layer-stats")
    """--log-layer-stats: report a layer or a tensor-parallel rank if one of its statistics grows by this factor over
    the last 10 records while the same statistic of the other layers or ranks does not. 0 disables reports."""

    check_replicas: int | None = flag(None, "--check-weight-hash-across-dp-replicas-interval")
    """Number of iterations between bitwise comparisons of replicated parameters and optimizer state. The run stops if
    any replicas differ."""

    log_straggler: bool = flag(
        False, excludes="--cuda-graph-impl local: forward and backward pass cannot be timed separately"
    )
    """Report the slowest ranks of each phase of a step."""

    straggler_minmax_count: int = flag(1, above=0)
    """--log-straggler: number of ranks reported for each phase."""

    dump_step: int | None = flag(None, above=0)
    """Write the weights, samples, loss and gradients of this iteration to disk. tools/referee.py compares the written
    values with an fp64 computation, which needs --hidden-dropout 0 --attention-dropout 0."""

    dump_step_dir: str | None = flag(None, path="local", writes="folder", no_effect_without="--dump-step")
    """Folder of --dump-step; default: steps/iter_N in --save."""

    profile: bool = False
    """Profile some steps with nsys on GPUs or with torch's profiler. torch's profiler writes traces for Perfetto to the
    folder profile in --tensorboard-dir or --save."""

    profile_step_start: int = flag(10, at_least=0)
    """--profile: iteration after which the profile starts."""

    profile_step_end: int = flag(12, above=0)
    """--profile: iteration after which the profile ends."""

    profile_ranks: tuple[int, ...] = flag((0,), many=True, at_least=0)
    """--profile: ranks that are profiled."""

    trace: bool = flag(
        False,
        excludes="--cuda-graph-impl local: a replayed graph does not run actions and collectives separately",
    )
    """Trace some steps of all ranks with synchronized clocks into one file for Perfetto, in the folder trace of
    --tensorboard-dir or --save. The trace contains pipeline actions, messages, collectives, phases of the step, and the
    planned pipeline."""

    trace_step_start: int = flag(10, at_least=0, no_effect_without="--trace")
    """--trace: iteration after which the trace starts."""

    trace_step_end: int = flag(12, above=0, no_effect_without="--trace")
    """--trace: iteration after which the trace ends."""

    use_pytorch_profiler: bool = flag(False, no_effect_without="--profile")
    """--profile: use torch's profiler instead of nsys on GPUs."""

    pytorch_profiler_collect_shapes: bool = flag(False, no_effect_without=BY_TORCH)
    """--profile: record operand shapes in traces of torch's profiler."""

    pytorch_profiler_collect_callstack: bool = flag(False, no_effect_without=BY_TORCH)
    """--profile: record the Python stack of each operation in traces of torch's profiler."""

    record_shapes: bool = flag(False, no_effect_without=BY_NSYS)
    """--profile: record operand shapes in nsys ranges."""

    record_memory_history: bool = flag(
        False, no_effect_without=Condition("GPUs", lambda config: not config.parallel.cpu)
    )
    """GPUs: record memory allocations for torch's memory viewer. The record is written at --profile-step-end, at the
    end of a run that ends earlier, and when memory runs out."""

    memory_snapshot_path: str = flag("snapshot.pickle", path="local")
    """--record-memory-history: file to write. The rank is appended to the file name."""


@extension_flags("spikes", may_change=True, part_of="checks")
@dataclass(frozen=True)
class SpikeFlags:
    """Flags for detecting steps whose loss or gradient norm is far above its running mean."""

    check_for_spiky_loss: bool = flag(False, skips_steps=True)
    """Report losses far above the mean of recent steps."""

    spiky_loss_factor: float = flag(2.0, above=1)
    """--check-for-spiky-loss: report losses above this multiple of the mean."""

    check_for_large_grads: bool = flag(False, skips_steps=True)
    """Report gradient norms far above the mean of recent steps."""

    large_grads_factor: float = flag(10.0, above=1)
    """--check-for-large-grads: report gradient norms above this multiple of the mean."""


def _when(wants: Callable[[DiagnosisConfig], object]) -> Callable[[RunConfig], bool]:
    return lambda config: bool(wants(config.options(DiagnosisConfig)))


CALLBACKS.register(
    "profiler", f"{__package__}.profiler:Profiler", when=_when(lambda o: o.profile or o.record_memory_history)
)
CALLBACKS.register("tracer", f"{__package__}.trace.tracer:Tracer", when=_when(lambda o: o.trace))
CALLBACKS.register("step dump", f"{__package__}.gradient_dump:GradientDump", when=_when(lambda o: o.dump_step))
CALLBACKS.register("replicas", f"{__package__}.check_replicas:ReplicaCheck", when=_when(lambda o: o.check_replicas))
CALLBACKS.register("stragglers", f"{__package__}.straggler:Stragglers", when=_when(lambda o: o.log_straggler))
CALLBACKS.register(
    "layer statistics", f"{__package__}.layer_stats.statistics:LayerStatistics", when=_when(lambda o: o.log_layer_stats)
)
CALLBACKS.register("first value that is not finite", f"{__package__}.step_dump:FirstNonFinite")
CALLBACKS.register("last collectives", f"{__package__}.hang_analysis:LastCollectives")
CALLBACKS.register(
    "spikes",
    f"{__package__}.spikes:SpikeCheck",
    when=lambda c: c.options(SpikeFlags).check_for_spiky_loss or c.options(SpikeFlags).check_for_large_grads,
)
