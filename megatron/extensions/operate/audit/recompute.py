"""Process that recomputes the audited steps of a run from snapshots on the CPU. Usage:

    python -m megatron.extensions.operate.audit.recompute FOLDER

Each snapshot is a subfolder of FOLDER. The process reads the names of snapshots from standard input, one per line, and
writes `result.json` to each snapshot. Each step is computed twice: in the run's number format and in a wider number
format. The difference between the gradients of the two computations shows the effect of rounding on each gradient, and
determines the tolerance.

FOLDER contains these files:

    FOLDER/run_config.yaml: configuration of the run.
    FOLDER/pieces.json: parts of the gradients that each rank computes and owns.
    FOLDER/iter_0000100/weights-*.safetensors: weight shards before the step, named `NAME@OFFSET`.
    FOLDER/iter_0000100/samples-*.npz: samples of the step.
    FOLDER/iter_0000100/job.json: the step, the run's loss and gradient sums, and the value of --audit-by.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

import megatron.extensions
from megatron.core.datasets.samplers import DataIterator
from megatron.core.distributed.finalize_model_grads import reduce_model_grads
from megatron.core.parallel_state import ParallelState
from megatron.extensions.observe.diagnosis.gradient_dump import assembled, read_box
from megatron.extensions.observe.diagnosis.step_dump import CONFIG, SAMPLES, SavedSamples
from megatron.extensions.observe.diagnosis.step_replay import config_of
from megatron.extensions.operate.audit.sketch import SIGNS, sums_of
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import CheckpointConfig, RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.initialize import Runtime, set_determinism
from megatron.training.progress import Step
from megatron.training.reliability.launch import Launch
from megatron.training.run import TrainingRun
from megatron.training.setup import build_run

WEIGHTS = "weights-*.safetensors"
JOB = "job.json"
RESULT = "result.json"
PIECES = "pieces.json"

MARGIN = 8.0
"""Largest allowed distance between a gradient of the run and the recomputed gradient, as a multiple of the rounding
error. The multiple is larger than 1, because the run sums in a different order than the recomputation, and because
distances are only estimates."""

LEAST_ALLOWED = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 4e-2, "float16": 1e-2}
"""Minimum tolerance for relative differences, keyed by number format."""


class Piece(NamedTuple):
    """Part of a gradient that one rank computes or owns. `offset` and `shape` select a slice of the parameter. The
    piece consists of the elements [start, stop) of the flattened gradient of this slice."""

    rank: int
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def read(cls, values: Sequence[object]) -> Piece:
        """Create a `Piece` from the list of its fields, as read from JSON."""
        rank, name, offset, shape, start, stop = values
        assert isinstance(offset, list) and isinstance(shape, list)
        return cls(rank, name, tuple(offset), tuple(shape), start, stop)  # type: ignore[arg-type]

    def of(self, whole: Tensor) -> Tensor:
        """Return the elements of the full gradient `whole` that belong to this piece."""
        box = whole[tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))]
        return box.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True)
class Result:
    """Result of the comparison of a step with its recomputation."""

    loss: float
    """Relative difference between the loss of the run and the recomputed loss."""

    allowed_loss: float
    first: str | None = None
    """Name of the first parameter, in the order of the backward pass, whose gradient differs; None if all gradients
    agree."""

    relative: float = 0.0
    allowed: float = 0.0
    ranks: tuple[int, ...] = ()
    """Ranks whose parts of the gradient of `first` differ most from the recomputed gradient."""

    where: str = ""
    """Description of the gradient that differs: the gradient of one data-parallel replica, or the sum over ranks."""

    largest: float = 0.0
    """Largest relative difference of a gradient, divided by the tolerance for that gradient."""

    problem: str = ""
    """Reason why the step was not recomputed; empty if there is a result."""

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read the result in a file. Raises OSError if the file cannot be read, and ValueError if the file is
        damaged."""
        values = json.loads(path.read_text())
        return cls(**values | {"ranks": tuple(values["ranks"])})


Gaps = dict[int, float]
"""Maps each rank to the relative difference between its part of a gradient and the recomputed gradient."""

Look = Callable[[int, Mapping[str, Tensor]], None]


class Recomputation:
    """Recomputation of a run's steps in a single process and in a given number format."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.dtype = dtype
        config = replace(config_of(folder, ()), checkpoint=CheckpointConfig())
        parallel = replace(
            config.parallel,
            cpu=True,
            fp16=dtype == "float16",
            bf16=dtype == "bfloat16",
            fp32=dtype == "float32",
            fp64=dtype == "float64",
        )
        self.config: RunConfig = resolve_legal(replace(config, parallel=parallel), 1)
        set_determinism(self.config)
        self.run: TrainingRun = build_run(self.config, Runtime(Launch(), torch.device("cpu"), ParallelState()))
        self.run.data.close()
        self.run_micro_batch = parse_args(["--config", str(folder / CONFIG)]).training.micro_batch_size or 1

    def gradients(self, snapshot: Path, step: Step, look: Look | None = None) -> tuple[float, dict[str, Tensor]]:
        """Recompute a step, and return the mean loss and the gradients in fp64. The gradients are summed over
        data-parallel replicas. The dict contains the parameters in the order in which the backward pass completes their
        gradients. For each replica, `look` is called with the index and the gradients of this replica."""
        run, passes = self.run, self.run.forward_backward
        self._load(snapshot)
        samples = SavedSamples(snapshot, self.run_micro_batch)
        run.data.train = DataIterator(samples, micro_batch_size=self.config.training.micro_batch_size or 1)
        run.data.train.deal = samples.deal
        given = passes.prepared(step, run.data.read_batches(step), 1.0)
        replicas = len(list(snapshot.glob(SAMPLES)))
        whole: dict[str, Tensor] = {}
        losses = torch.zeros(2, dtype=torch.float64)
        for replica in range(replicas):
            part = replace(given, batches=given.batches[replica::replicas], scaled=given.scaled[replica::replicas])
            sums = passes.gradients(part)
            losses += sums.loss_and_tokens
            found = self._taken(reduce_model_grads(run.ddp, given.total_tokens, run.runtime.state, given.seed))
            if look is not None:
                look(replica, found)
            whole = {name: whole[name] + grad if whole else grad for name, grad in found.items()}
        passes.discard_step()
        total, tokens = losses.tolist()
        return total / max(tokens, 1.0), whole

    def _taken(self, factor: Tensor) -> dict[str, Tensor]:
        """Return all parameter gradients in fp64, multiplied by `factor`."""
        found = {}
        for model in reversed(list(self.run.stages.values())):
            for name, (param, _) in reversed(model.named_metas().items()):
                if param.requires_grad:
                    grad: Tensor = param.main_grad  # type: ignore[attr-defined]
                    found[name] = grad.double() * factor
        return found

    def _load(self, snapshot: Path) -> None:
        boxes: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
        for path in sorted(snapshot.glob(WEIGHTS)):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    name, offset = read_box(key)
                    boxes.setdefault(name, []).append((offset, file.get_tensor(key)))
        for model in self.run.stages.values():
            for name, (param, meta) in model.named_metas().items():
                param.data.copy_(assembled(meta.global_shape, boxes[name]))


class Auditor:
    """Recompute steps of a run in a single process, and compare the results with the results of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        dtype = parse_args(["--config", str(folder / CONFIG)]).parallel.params_dtype
        wide = "float64" if dtype in ("float32", "float64") else "float32"
        self.own, self.wide = Recomputation(folder, dtype), Recomputation(folder, wide)
        kept = json.loads((folder / PIECES).read_text())
        self.owned = [Piece.read(values) for values in kept["owned"]]
        self.terms = [(replica, Piece.read(values)) for replica, values in kept["terms"]]

    def judge(self, snapshot: Path) -> Result:
        """Compare a step with its recomputation. `snapshot` is a folder with the weights and samples of the step."""
        job = json.loads((snapshot / JOB).read_text())
        step, by_layout = Step(**job["step"]), job["means"] == "layout"
        terms: dict[str, Gaps] = {}
        look = partial(self._look, job["terms"], terms)
        own_loss, own = self.own.gradients(snapshot, step, look if by_layout else None)
        wide_loss, wide = self.wide.gradients(snapshot, step, None if by_layout else look)
        expected, expected_loss = (own, own_loss) if by_layout else (wide, wide_loss)
        least = LEAST_ALLOWED[self.own.dtype]
        result = Result(_gap(job["loss"], expected_loss), max(least, MARGIN * _gap(own_loss, wide_loss)))
        owned = self._compared(job["owned"], expected)
        for name in expected:
            allowed = max(least, MARGIN * relative(own[name], wide[name]))
            for cause, gaps in (("a term of one replica", terms.get(name, {})), ("the sum over ranks", owned[name])):
                largest = max(gaps.values(), default=0.0)
                result = replace(result, largest=max(result.largest, largest / allowed))
                if largest > allowed and result.first is None:
                    ranks = tuple(sorted(rank for rank, gap in gaps.items() if gap >= largest / 2))
                    result = replace(result, first=name, relative=largest, allowed=allowed, ranks=ranks, where=cause)
        return result

    def _look(
        self, sketches: Sequence[Sequence[float]], found: dict[str, Gaps], replica: int, grads: Mapping[str, Tensor]
    ) -> None:
        """Compare the recomputed gradients of one data-parallel replica with the random-sign sums of the run's
        gradients, and add the relative differences to `found`."""
        for (own, piece), sketch in zip(self.terms, sketches, strict=True):
            if own == replica:
                part = piece.of(grads[piece.name])
                found.setdefault(piece.name, {})[piece.rank] = gap_of(sketch, part) / norm(part)

    def _compared(self, sketches: Sequence[Sequence[float]], expected: Mapping[str, Tensor]) -> dict[str, Gaps]:
        """Return the relative differences between the run's reduced gradients and the expected gradients."""
        found: dict[str, Gaps] = {name: {} for name in expected}
        for piece, sketch in zip(self.owned, sketches, strict=True):
            whole = expected[piece.name]
            found[piece.name][piece.rank] = gap_of(sketch, piece.of(whole)) / norm(whole)
        return found


def norm(x: Tensor) -> float:
    """Return the norm of a tensor, or a tiny positive number if the norm is zero."""
    return max(1e-300, torch.linalg.vector_norm(x).item())


def gap_of(sketch: Sequence[float], expected: Tensor) -> float:
    """Estimate the norm of the difference between the tensor `expected` and another tensor. `sketch` contains the
    random-sign sums of the other tensor."""
    if not all(map(isfinite, sketch)):
        return inf
    sums = sums_of(expected).tolist()
    return sqrt(sum((a - b) ** 2 for a, b in zip(sketch, sums, strict=True)) / SIGNS)


def relative(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference of two tensors, divided by the norm of the second tensor."""
    scale = torch.linalg.vector_norm(other).item()
    return torch.linalg.vector_norm(one - other).item() / scale if scale else 0.0


def _gap(one: float, other: float) -> float:
    gap = abs(one - other) / max(abs(other), 1e-300)
    return gap if gap == gap else inf


def main(folder: Path) -> None:
    """Recompute the step of each snapshot whose name arrives on standard input. Return at the end of the input."""
    megatron.extensions.load()
    auditor: Auditor | None = None
    for line in sys.stdin:
        snapshot = folder / line.strip()
        try:
            auditor = auditor or Auditor(folder)
            result = auditor.judge(snapshot)
        except Exception as error:  # after any error, the run continues without this audit
            result = Result(0.0, 0.0, problem=f"{type(error).__name__}: {error}")
        text = json.dumps(asdict(result))
        (snapshot / f"{RESULT}.new").write_text(text)
        (snapshot / f"{RESULT}.new").rename(snapshot / RESULT)


def forget(snapshot: Path) -> None:
    """Delete the folder of a snapshot that has been processed."""
    shutil.rmtree(snapshot, ignore_errors=True)


if __name__ == "__main__":
    os.nice(10)
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
