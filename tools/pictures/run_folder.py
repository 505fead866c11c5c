"""Read the files in the --save folder of a run. Missing and damaged files are skipped and listed in `notes`.

This module does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.config.json_text import parse_json
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dist_checkpointing import path_kind
from megatron.core.dist_checkpointing.integrity import misfits, read_manifest
from megatron.core.dist_checkpointing.path_kind import EVENTS, METRICS_FILE, RUNS, kind_of, refusal
from megatron.core.dist_checkpointing.path_kind import RUN_CONFIG as CONFIG
from megatron.core.parallel_dims import ParallelDims
from megatron.training.config.rules.saved_types import metadata_problem
from megatron.training.config.yaml_text import load_yaml

if TYPE_CHECKING:
    from megatron.extensions.observe.diagnosis.trace.trace_file import Trace

LAYOUT = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "use_tp_pp_dp_mapping"),
)
"""Flags that determine the layout."""

AXES = ("tp", "cp", "dp", "pp", "ep")
MOST_RANKS, MOST_ITERATIONS = 2**20, 2**53
Record = dict[str, Any]


@dataclass
class RunFolder:
    """Data of a run that could be read from its folder. `notes` describes files that could not be read."""

    path: Path
    records: list[Record] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """Value of each flag and of each derived setting. The keys are flag names without leading dashes."""

    events: list[Record] = field(default_factory=list)
    outcome: dict[str, str] = field(default_factory=dict)
    checkpoints: list[Record] = field(default_factory=list)
    stacks: dict[str, str] = field(default_factory=dict)
    """First part of each stack dump, keyed by file name."""

    trace_path: Path | None = None
    trace: Trace | None = None
    notes: list[str] = field(default_factory=list)

    phases: list[tuple[float, str]] = field(default_factory=list)
    """For each data phase that has begun, the number of iterations before it and its name. The list is empty if the run
    has a single data phase."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return named_folder(self.path).name

    @property
    def world_size(self) -> int | None:
        """Number of ranks at the last start of the run. The number is read from the recorded start, the trace, or the
        configured parallel sizes. The value is None if all of these sources are missing."""
        starts = [event.get("world_size") for event in self.events if event.get("event") == "start"]
        if starts and isinstance(starts[-1], int) and 0 < starts[-1] <= MOST_RANKS:
            return starts[-1]
        if self.trace is not None:
            return len(self.trace["otherData"]["ranks"])
        names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
        sizes = [self.config.get(name) for name in (*names, "data-parallel-size")]
        if not all(isinstance(size, int) for size in sizes):
            return None
        tp, pp, cp, dp = sizes
        return tp * pp * cp * dp

    def dims(self) -> ParallelDims | None:
        """Return the parallel layout. Return None if the configuration does not determine a layout, or if the layout
        does not fit the number of ranks."""
        named = {field: self.config.get(field.replace("_", "-")) for field in LAYOUT}
        sizes = {field: size for field, size in named.items() if isinstance(size, int) and size > 0}
        if self.world_size is None or not self.config:
            return None
        try:
            return ParallelDims.from_config(ModelParallelConfig(**sizes), self.world_size)
        except ValueError:
            return None

    @property
    def older_trace(self) -> str:
        """Description of the traced layout if the run was later resumed under a different layout; otherwise, an empty
        string."""
        dims = self.dims()
        if self.trace is None or dims is None:
            return ""
        traced = self.trace["otherData"]["layout"]
        if all(traced[axis] == dims.size(axis) for axis in AXES):
            return ""
        return ", ".join(f"{axis.upper()} {traced[axis]}" for axis in AXES if traced[axis] > 1) or "one rank"

    def values(self, key: str) -> list[tuple[float, float]]:
        """Return the logged values of the metric `key`, as tuples (iteration, value)."""
        found = [(float(record["iteration"]), number(record.get(key))) for record in self.records]
        return [(iteration, value) for iteration, value in found if value is not None]


def named_folder(path: Path) -> Path:
    """Return the folder from which a run gets its name: the checkpoint folder, or the parent of a folder called
    `checkpoints`."""
    path = path.resolve()
    return path.parent if path.name in ("checkpoints", "save") and path.parent.name else path


def labels_of(runs: Sequence[RunFolder]) -> list[str]:
    """Return a name for each run: the run's folder, without the prefix that is common to all runs."""
    folders = [named_folder(run.path) for run in runs]
    if len(set(folders)) < len({run.path.resolve() for run in runs}):
        folders = [run.path.resolve() for run in runs]
    shared = Path(os.path.commonpath(folders))
    shared = shared.parent if shared in folders else shared
    return [str(folder.relative_to(shared)) for folder in folders]


def number(value: Any) -> float | None:
    """Convert a value of a record to a float. Strings such as "NaN" are also converted. Return None if the value is not
    a number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def read_metrics(path: Path, metrics: Path | None = None) -> RunFolder:
    """Read the metrics of a run from its --save folder, or from a metrics file. Raises ValueError if the folder
    contains no files of a run."""
    if path.is_file():
        path, metrics = path.parent, metrics or path
    if not (path.is_dir() if metrics else kind_of(path) in RUNS):
        found = next(iter(sorted(path.glob(f"*/{METRICS_FILE}"))), None)
        remedy = f"did you mean {found.parent}?" if found else "name the --save folder of a run, or its metrics.jsonl"
        raise ValueError(refusal(path, remedy))
    run = RunFolder(path)
    _read_metrics(run, metrics or path / METRICS_FILE)
    if metrics and metrics.name != METRICS_FILE and not run.records and metrics.stat().st_size:
        raise ValueError(refusal(metrics, "name the --save folder of a run, or its --metrics-file"))
    run.phases = list(_phases(run))
    return run


def _phases(run: RunFolder) -> Iterator[tuple[float, str]]:
    """Yield the start of each data phase, as recorded in the newest readable checkpoint."""
    saved = path_kind.saved_folders(run.path) if run.path.is_dir() else {}
    for _, folder in sorted(saved.items(), reverse=True):
        try:
            found = parse_json((folder / path_kind.METADATA).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if (broken := metadata_problem(found) if isinstance(found, dict) else "it is no object") is not None:
            run.notes.append(f"{folder.name}/{path_kind.METADATA} is damaged: {broken}")
            continue
        begun = [(each["first_sample"], each["name"]) for each in found.get("stages") or ()]
        consumed = run.values("consumed_samples")
        for first, name in begun if len(begun) > 1 else []:
            yield max((at for at, samples in consumed if samples <= first), default=0.0), name
        return


def read_run(
    path: Path, metrics: Path | None = None, outcome: Path | None = None, trace: Path | None = None
) -> RunFolder:
    """Read all files of a run. Raises ValueError if the folder contains no files of a run."""
    run = read_metrics(path, metrics)
    path = run.path
    _read_config(run)
    run.events = list(_json_lines(run, path / EVENTS, required=False))
    for file in [outcome] if outcome is not None else [path / "outcome", path.parent / "outcome"]:
        if file.is_file() and not run.outcome:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            run.outcome = dict(line.split("=", 1) for line in lines if "=" in line)
    _read_checkpoints(run)
    for file in sorted(path.glob("stacks/rank-*.txt")):
        if text := file.read_text(encoding="utf-8", errors="replace").strip():
            run.stacks[file.name] = text
    _read_trace(run, trace)
    return run


def _json_lines(run: RunFolder, path: Path, required: bool = True) -> Iterator[Record]:
    """Yield the objects in a file that has one object per line. Lines that do not contain a JSON object are skipped and
    counted in the run's notes."""
    if not path.is_file():
        if required:
            run.notes.append(f"{path.name}: is missing, so the run's metrics are unknown")
        return
    damaged, last = 0, False
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except (ValueError, RecursionError):
                record = None
            last = not isinstance(record, dict)
            damaged += last
            if isinstance(record, dict):
                yield record
    if damaged:
        where = "; it is the last line, so the run was killed while writing it" if last and damaged == 1 else ""
        run.notes.append(f"{path.name}: {damaged} damaged line{'s' if damaged > 1 else ''} skipped{where}")


def _read_metrics(run: RunFolder, path: Path) -> None:
    """Merge all values that training, validation and tasks have logged for an iteration into one record. If a value was
    logged twice, for example by a resumed run, the later value is used."""
    by_iteration: dict[int, Record] = {}
    for record in _json_lines(run, path):
        at = record.get("iteration")
        if isinstance(at, int) and not isinstance(at, bool) and abs(at) < MOST_ITERATIONS:
            by_iteration[at] = by_iteration.get(at, {}) | record
    run.records = [by_iteration[at] for at in sorted(by_iteration)]
    if path.is_file() and not run.records:
        run.notes.append(f"{path.name}: has no record with an iteration; the first comes after --log-interval steps")
    if older := sorted(path.parent.glob(f"{path.stem}.[0-9]*{path.suffix}")):
        run.notes.append(f"metrics of earlier runs in this folder, not shown: {', '.join(each.name for each in older)}")


def _read_config(run: RunFolder) -> None:
    path = run.path / CONFIG
    if not path.is_file():
        run.notes.append(f"{CONFIG}: is missing, so the configuration and the layout are unknown")
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    derived = "\n".join(re.findall(r"^# derived: (.*)$", text, flags=re.M))
    try:
        for part in (derived, text):
            found = load_yaml(part)
            run.config |= {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}
    except ValueError as error:
        run.notes.append(f"{CONFIG}: cannot be read: {' '.join(str(error).split())[:200]}")


def _read_checkpoints(run: RunFolder) -> None:
    try:
        latest = path_kind.read_latest(run.path)
    except ValueError:
        latest = None
    for iteration, folder in sorted(path_kind.saved_folders(run.path).items()):
        try:  # Only file sizes are checked here; `tools/inspect_checkpoint.py` also verifies checksums.
            wrong = misfits(folder, read_manifest(folder))
        except ValueError as error:
            wrong = [str(error)]
        more = f", and {len(wrong) - 1} more files" if len(wrong) > 1 else ""
        files = [path for path in folder.rglob("*") if path.is_file()]
        run.checkpoints.append(
            {
                "iteration": iteration,
                "bytes": sum(path.stat().st_size for path in files),
                "files": len(files),
                "state": f"not complete: {wrong[0]}{more}" if wrong else "complete",
                "latest": iteration == latest,
                "time": folder.stat().st_mtime,
            }
        )


def _read_trace(run: RunFolder, path: Path | None) -> None:
    found = [path] if path is not None else sorted(_traces(run), key=lambda file: file.stat().st_mtime)
    if not found:
        return
    from megatron.extensions.observe.diagnosis.trace.trace_file import (
        read_trace,  # a run without a trace does not need the extension
    )

    run.trace_path = found[-1]
    try:
        run.trace = read_trace(found[-1])
    except (OSError, ValueError) as error:
        run.notes.append(str(error))


def _traces(run: RunFolder) -> list[Path]:
    """Return the trace files in the run's folder and in its --tensorboard-dir. A --tensorboard-dir inside the folder is
    also found if the folder was moved."""
    folders = [run.path]
    if isinstance(board := run.config.get("tensorboard-dir"), str):
        own = Path(board)
        save = Path(str(run.config.get("save") or run.path))
        folders.append(run.path / own.relative_to(save) if own.is_relative_to(save) else own)
    return [file for folder in dict.fromkeys(folders) for file in folder.glob("trace/iterations-*.json.gz")]
