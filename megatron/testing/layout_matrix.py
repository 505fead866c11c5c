"""Trains a model at a matrix of layouts and compares each with one process; see `megatron.testing.parity`."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.parallel import DDPConfig, ModelParallelConfig, PrecisionConfig
from megatron.testing import gradient_check
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
from megatron.testing.reshard import Checkpoints, kinds
from megatron.testing.snapshot import Snapshot, differences, moved_by_rounding, relative_difference, train_in_world
from megatron.training.config.arguments import flat_values, parse_args, with_flags
from megatron.training.config.flags import all_flags, with_named
from megatron.training.config.prepare import tokenizer_vocabulary
from megatron.training.config.run_config import CheckpointConfig, ChecksConfig, LoggingConfig, RunConfig
from megatron.training.config.validation import resolve, resolve_legal, validate

TOLERANCE = 1e-9
"""Relative difference that another order of the same sums in fp64 explains after two steps."""

DEFAULTS = Path(__file__).with_name("parity_defaults.yaml")
VOCAB_SIZE = 60


@dataclass(frozen=True)
class Row:
    """The verdict on one layout."""

    name: str
    ranks: int
    flags: str = ""
    verdict: str = "equal"
    """equal, differs, crashed or refused; of one process: trained."""

    difference: float | None = None
    """The largest relative difference; None where nothing is compared in numbers."""

    why: str = ""
    """The first tensor that differs, the rule that refuses the layout, or the error and the line that raised it."""

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


HEAD = f"{'layout':<32} {'ranks':>5}  {'verdict':<8} {'largest':>8} {'s':>6}  first difference, rule or error"


class Parity:
    """One model and the rows of its table. A row trains nothing until it is asked for."""

    def __init__(
        self, flags: Sequence[str], root: Path, steps: int = 2, max_ranks: int = 8, timeout: float = 300.0
    ) -> None:
        """`flags`: a command line of pretrain_gpt.py. Checkpoints are written below `root`. A world that takes longer
        than `timeout` seconds counts as hanging.

        Raises ValueError with every problem of the flags, one a line."""
        self.steps, self.max_ranks, self.timeout = steps, max_ranks, timeout
        read = read_flags(flags, steps)
        self.given = in_fp64(read)
        self.unused = changed_flags(read, self.given)
        self.model = on_one_process(self.given)
        resolve_legal(self.model, 1)
        self.checkpoints = Checkpoints(root)
        self._reference: Snapshot | None = None

    @property
    def reference(self) -> Snapshot:
        """Results of one process. Trained once."""
        if self._reference is None:
            self._reference = train_in_world(1, self.model, self.steps, self.timeout)
        return self._reference

    @property
    def layouts(self) -> dict[str, str]:
        """Name -> flags of every layout, a schedule of an extension included."""
        layouts = {GIVEN: "as given"} if self.given != self.model else {}
        layouts |= LAYOUTS | (EXPERT_LAYOUTS if self.model.model.num_experts else {})
        schedule = self.given.parallel.pipeline_schedule
        if schedule is not None and not any(f"schedule {schedule}" in flags for flags in layouts.values()):
            layouts |= of_schedule(schedule)
        return layouts

    @property
    def names(self) -> list[str]:
        """Every row that can be asked for, in order; `one-process` is always included."""
        checkpoints = EXPERT_CHECKPOINTS if self.model.model.num_experts else CHECKPOINTS
        return [FINITE_DIFFERENCES, *self.layouts, *checkpoints]

    def config(self, layout: str) -> RunConfig:
        if layout in (ONE_PROCESS, FINITE_DIFFERENCES):
            return self.model
        return self.given if layout == GIVEN else with_flags(self.model, self.layouts[layout].split())

    def plan(self, name: str) -> Row:
        """The row before it has run: refused where validation does not allow a layout that it needs."""
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

    def run(self, name: str) -> Row:
        """Trains and compares. A crash is a verdict, not an exception."""
        row, began = self.plan(name), time.perf_counter()
        if row.verdict == "refused":
            return row
        try:
            if name == ONE_PROCESS:
                row = replace(row, verdict="trained", why=f"initial weights: sha256 {weights_hash(self.reference)}")
            elif name == FINITE_DIFFERENCES:
                found = gradient_check.gradient_differences(self.model, self.timeout)
                row = judged(row, ((f"gradient {key}", value) for key, value in found), gradient_check.TOLERANCE)
            elif name in self.layouts:
                snapshot = train_in_world(row.ranks, self.config(name), self.steps, self.timeout)
                row = compared(row, self.reference, snapshot)
            else:
                row = self._resharded(row)
        except Exception as error:
            row = replace(row, verdict="crashed", why=error_line(str(error) or repr(error)))
        return replace(row, seconds=round(time.perf_counter() - began, 2))

    def _resharded(self, row: Row) -> Row:
        source, target = row.name.split("-to-")
        if source not in self.checkpoints.saved:
            config = self.config(source)
            self.checkpoints.visit(source, config.parallel.smallest_world_size, config, train=True)
        config = self.config(target)
        wrong = self.checkpoints.visit(target, config.parallel.smallest_world_size, config, [source])[source]
        if wrong:
            return replace(row, verdict="differs", why=f"{wrong[0]} ({len(wrong)} tensors are not bit-equal)")
        counts = kinds(self.checkpoints.saved[source].truth)
        return replace(row, why="bit-equal: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))


def read_flags(flags: Sequence[str], steps: int) -> RunConfig:
    """The configuration of the flags, tiny where they leave it open. Raises ValueError with every problem."""
    config = parse_args(["--config", str(DEFAULTS), *flags])
    data, model, training = config.data, config.model, config.training
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
    """The configuration in fp64 on CPU ranks of this machine, without evaluation, files and reports."""
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
    """The same model and batch without any parallelism or recomputation."""
    model = config.model
    recompute: dict[str, Any] = {f.name: f.default for f in fields(model) if f.name.startswith("recompute_")}
    return replace(
        with_named(config, {"cpu_offloading": False, "cpu_offloading_num_layers": 0}),
        parallel=ModelParallelConfig(fp64=True, cpu=True),
        ddp=DDPConfig(),
        model=replace(model, **recompute),
        optimizer=replace(config.optimizer, use_distributed_optimizer=True),
        training=replace(config.training, num_microbatches=None),
    )


def changed_flags(a: RunConfig, b: RunConfig) -> list[str]:
    """Flags of `a`, given and not the default, that `b` has another value of."""
    mine, other = flat_values(a), flat_values(b)
    return [f.name for f in all_flags() if mine[f.field] not in (other[f.field], f.default)]


def compared(row: Row, reference: Snapshot, snapshot: Snapshot) -> Row:
    """The verdict on a layout's snapshot beside that of one process."""
    for one, other, where in ((reference, snapshot, "at this layout"), (snapshot, reference, "on one process")):
        if only := [key for key in one.tensors if key not in other.tensors]:
            return replace(row, verdict="differs", why=f"{only[0]}: missing {where}, as are {len(only) - 1} others")

    apart = dict[str, int]()

    def exactly() -> Iterator[tuple[str, float]]:
        """Infinite differences of replicas that differ, and of initial weights of which a bit does. Elements that only
        rounding moves are left out where they differ."""
        for key, value in differences(reference, snapshot):
            bits = key.startswith("initial ") and not torch.equal(reference[key], snapshot[key])
            if bits or key in snapshot.differing_replicas:
                value = float("inf")
            elif value > TOLERANCE:
                name = key.rpartition(" ")[2]
                moved = moved_by_rounding(reference, snapshot, name, TOLERANCE)
                if moved is not None and moved.shape == reference[key].shape and moved.any():
                    value = relative_difference(reference[key][~moved], snapshot[key][~moved])
                    apart[name] = int(moved.sum())
            yield key, value

    row = judged(row, exactly(), TOLERANCE)
    if apart and not row.failed:
        others = f" and {len(apart) - 1} more parameters" if len(apart) > 1 else ""
        what = f"{sum(apart.values())} elements of {next(iter(apart))}{others}"
        row = replace(row, why=f"apart from {what}, whose gradient is zero but for rounding")
    torn = snapshot.differing_replicas
    first = next((message for key, message in torn.items() if row.why.startswith(f"{key}: ")), None)
    return row if first is None else replace(row, why=first)


def judged(row: Row, found: Iterator[tuple[str, float]], tolerance: float) -> Row:
    """The row with the largest difference, and the first that is above `tolerance`."""
    pairs = list(found)
    row = replace(row, difference=max((value for _, value in pairs), default=0.0))
    wrong = [(key, value) for key, value in pairs if not value <= tolerance]
    if not wrong:
        return row
    others = f", and {len(wrong) - 1} more of {len(pairs)} tensors" if len(wrong) > 1 else ""
    return replace(row, verdict="differs", why=f"{wrong[0][0]}: {wrong[0][1]:.1e}{others}")


def weights_hash(snapshot: Snapshot) -> str:
    """SHA-256 of the initial weights of the whole model."""
    digest = hashlib.sha256()
    for key in sorted(key for key in snapshot.tensors if key.startswith("initial weight")):
        digest.update(key.encode() + snapshot[key].numpy().tobytes())
    return digest.hexdigest()


def error_line(text: str) -> str:
    """The error of the first rank that failed, in one line, and the last line of code outside of packages."""
    first = re.split(r"\nrank \d+ of \d+:\n", text)[0]
    frames = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', first)
    own = [frame for frame in frames if "site-packages" not in frame[0]] or frames
    own = [frame for frame in own if "/megatron/" not in frame[0]] or own
    messages = re.findall(r"^(?!Traceback|rank \d)\w[\w.]*(?:: .*)?$", first, re.MULTILINE)
    message = messages[-1] if messages else first.strip().splitlines()[-1]
    return message + (f" ({own[-1][0]}:{own[-1][1]} in {own[-1][2]})" if own else "")


def run_rows(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Runs or lists the rows that a command line asks for, and returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="parity-") as root:
        try:
            parity = Parity(flags, Path(root), args.steps, args.max_ranks, args.timeout)
            names = chosen(args.layouts, parity.names)
            if torch.cuda.is_initialized():
                raise ValueError("--extension: a module that is imported uses CUDA, after which ranks cannot be forked")
        except ValueError as error:
            print_errors(error)
            return 2
        print(f"flags: {shlex.join(flags)}")
        if parity.unused:
            print(f"not used here: {', '.join(parity.unused)}")
        if args.list:
            for row in map(parity.plan, names):
                print(
                    f"{row.name:<32} {row.ranks:>5} ranks  {row.flags}" + (f"  refused: {row.why}" if row.why else "")
                )
            return 0
        return report(parity, names, args.json)


def report(parity: Parity, names: Sequence[str], path: Path | None) -> int:
    """Runs the rows, prints each when it is done, and returns the exit code."""
    print(HEAD)
    rows, began = list[Row](), time.perf_counter()
    for name in [ONE_PROCESS, *names]:
        rows.append(parity.run(name))
        print(rows[-1], flush=True)
        if rows[0].failed:
            break  # nothing to compare with
    verdicts = Counter(row.verdict for row in rows[1:])
    counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "nothing compared"
    print(f"{len(rows) - 1} rows: {counted} ({time.perf_counter() - began:.0f} s)")
    if path is not None:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if any(row.failed for row in rows):
        return 1
    return 0 if verdicts["equal"] else 2
