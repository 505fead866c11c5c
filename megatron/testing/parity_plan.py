"""Definition of the rows of `megatron.testing.parity`: their flags, numbers of ranks and validation. This module does
not import torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import DDPConfig, ModelParallelConfig, PrecisionConfig
from megatron.testing.parity_rows import (
    CHECKPOINTS,
    EXPERT_CHECKPOINTS,
    EXPERT_LAYOUTS,
    FINITE_DIFFERENCES,
    GIVEN,
    LAYOUTS,
    ONE_PROCESS,
    chosen,
    of_schedule,
    print_errors,
)
from megatron.training.config.arguments import flat_values, parse_args, with_flags
from megatron.training.config.flags import all_flags, with_named
from megatron.training.config.prepare import tokenizer_vocabulary
from megatron.training.config.run_config import CheckpointConfig, ChecksConfig, LoggingConfig, RunConfig
from megatron.training.config.validation import resolve, resolve_legal, validate

DEFAULTS = Path(__file__).with_name("parity_defaults.yaml")
VOCAB_SIZE = 60


@dataclass(frozen=True)
class Row:
    """Row of the table: a test and its verdict."""

    name: str
    ranks: int
    flags: str = ""
    verdict: str = "equal"
    """Verdict of the test. The verdict is "trained" for the row `one-process`, and "equal", "differs", "crashed" or
    "refused" for the other rows."""

    difference: float | None = None
    """Largest relative difference between the compared tensors, or None if the row compares no tensors."""

    why: str = ""
    """Reason for the verdict: the first tensor that differs, the rule that refuses the layout, or the error and the
    line that raised it."""

    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.verdict in ("differs", "crashed")

    def __str__(self) -> str:
        difference = "" if self.difference is None else f"{self.difference:.1e}"
        verdict = self.verdict.upper() if self.failed else self.verdict
        return (
            f"{self.name:<32} {self.ranks:>5}  {verdict:<8} {difference:>8} {self.seconds:>6.1f}  {self.why}".rstrip()
        )


class ParityPlan:
    """Plan of one model's parity table: the name, flags and configuration of each row, before any row is trained."""

    def __init__(self, flags: Sequence[str], steps: int = 2, max_ranks: int = 8) -> None:
        """Read `flags`, a command line of pretrain_gpt.py.

        Raises ValueError with every problem of the flags, one per line.
        """
        self.steps, self.max_ranks = steps, max_ranks
        read = read_flags(flags, steps)
        self.given = in_fp64(read)
        self.unused = changed_flags(read, self.given)
        self.model = on_one_process(self.given)
        resolve_legal(self.model, 1)

    @property
    def layouts(self) -> dict[str, str]:
        """Return a dict from the name of each layout to its flags. The dict includes layouts for pipeline schedules of
        extensions."""
        layouts = {GIVEN: "as given"} if self.given != self.model else {}
        layouts |= LAYOUTS | (EXPERT_LAYOUTS if self.model.model.num_experts else {})
        schedule = self.given.parallel.pipeline_schedule
        if schedule is not None and not any(f"schedule {schedule}" in flags for flags in layouts.values()):
            layouts |= of_schedule(schedule)
        return layouts

    @property
    def names(self) -> list[str]:
        """Names of all available rows, in order. The row `one-process` always runs and is not listed."""
        checkpoints = EXPERT_CHECKPOINTS if self.model.model.num_experts else CHECKPOINTS
        return [FINITE_DIFFERENCES, *self.layouts, *checkpoints]

    def config(self, layout: str) -> RunConfig:
        if layout in (ONE_PROCESS, FINITE_DIFFERENCES):
            return self.model
        return self.given if layout == GIVEN else with_flags(self.model, self.layouts[layout].split())

    def plan(self, name: str) -> Row:
        """Return the row for a test that has not run yet. The row is marked as refused if validation rejects one of its
        layouts."""
        parts = name.split("-to-")
        configs = [self.config(part) for part in parts]
        ranks = max(config.parallel.smallest_world_size for config in configs)
        row = Row(name, ranks, "; ".join(self.layouts.get(part, "") for part in parts))
        if ranks > self.max_ranks:
            return replace(row, verdict="refused", why=f"--max-ranks {self.max_ranks}: the layout needs {ranks} ranks")
        for config in configs:
            world_size = config.parallel.smallest_world_size
            if problems := validate(resolve(config, world_size), world_size):
                return replace(row, verdict="refused", why="; ".join(map(str, problems)))
        return row


def read_flags(flags: Sequence[str], steps: int) -> RunConfig:
    """Return the configuration that the flags specify. Sizes that the flags do not set get tiny defaults. If there are
    problems, the function raises a ValueError that lists all of them."""
    config = parse_args(["--config", str(DEFAULTS), *flags])
    data = config.data
    model = config.model
    training = config.training
    if not (data.data_path or data.per_split or data.dataset_type):
        data = replace(data, mock_data=True)
    if config.tokenizer.tokenizer_type is not None:
        model = replace(model, vocab_size=max(tokenizer_vocabulary(config) or 0, model.vocab_size or 0))
    elif data.mock_data and model.vocab_size is None:
        model = replace(model, vocab_size=VOCAB_SIZE)
    if not (training.train_iters or training.train_samples or training.train_tokens):
        training = replace(training, train_iters=steps)
    if training.train_iters is not None and training.train_iters < steps:
        raise ValueError(f"--train-iters {training.train_iters}: is less than --steps {steps}; leave it out")
    return replace(config, data=data, model=model, training=training)


def in_fp64(config: RunConfig) -> RunConfig:
    """Return a copy of the configuration that uses fp64 and CPU ranks of this machine. Evaluation, checkpoints, metrics
    and checks are turned off."""
    parallel = ModelParallelConfig()
    for_gpus = ("compile", "distributed_backend", *(field.name for field in fields(PrecisionConfig)))
    plain = {name: getattr(parallel, name) for name in for_gpus}
    return replace(
        config.without("cuda_graph_impl").without("fp8_format").without("sample_log"),
        parallel=replace(config.parallel, **plain | {"fp64": True, "cpu": True}),
        ddp=replace(config.ddp, grad_reduce_in_bf16=False),
        data=replace(config.data, num_workers=0),
        training=replace(config.training, eval_iters=0),
        checks=ChecksConfig(),
        logging=LoggingConfig(),
        checkpoint=CheckpointConfig(),
    )


def on_one_process(config: RunConfig) -> RunConfig:
    """Return a configuration for the same model and batch, without parallelism or recomputation."""
    model = config.model
    change: Callable[..., TransformerConfig] = replace
    recompute = {f.name: f.default for f in fields(model) if f.name.startswith("recompute_")}
    return replace(
        with_named(config, {"cpu_offloading": False, "cpu_offloading_num_layers": 0}),
        parallel=ModelParallelConfig(fp64=True, cpu=True),
        ddp=DDPConfig(),
        model=change(model, **recompute),
        optimizer=replace(config.optimizer, use_distributed_optimizer=True),
        training=replace(config.training, num_microbatches=None),
    )


def changed_flags(a: RunConfig, b: RunConfig) -> list[str]:
    """Return the explicitly set, non-default flags of `a` whose value differs in `b`."""
    mine, other = flat_values(a), flat_values(b)
    return [f.name for f in all_flags() if mine[f.field] not in (other[f.field], f.default)]


def print_head(flags: Sequence[str], plan: ParityPlan) -> None:
    """Print the command line, and list its flags that have no effect in parity tests."""
    print(f"flags: {shlex.join(flags)}")
    if plan.unused:
        print(f"not used here: {', '.join(plan.unused)}")


def list_rows(flags: Sequence[str], wanted: Sequence[str] | None, steps: int, max_ranks: int) -> int:
    """Print each row with its number of ranks and its flags. Return the exit code."""
    try:
        plan = ParityPlan(flags, steps, max_ranks)
        names = chosen(wanted, plan.names)
    except ValueError as error:
        print_errors(error)
        return 2
    print_head(flags, plan)
    for row in map(plan.plan, names):
        print(f"{row.name:<32} {row.ranks:>5} ranks  {row.flags}" + (f"  refused: {row.why}" if row.why else ""))
    return 0
