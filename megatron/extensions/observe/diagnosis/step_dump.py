"""Search for the origin of a non-finite loss or gradient. A step that ends the run is saved, so that it can be
replayed.

    SAVE/nan/iter_0000012/finding.json              the step, and the first non-finite value
    SAVE/nan/iter_0000012/run_config.yaml           the configuration
    SAVE/nan/iter_0000012/samples-00000.npz         the samples, one file per data-parallel rank
    SAVE/nan/iter_0000012/iter_0000011/             the checkpoint of the previous step

--load also accepts the folder of a step. A run that loads such a folder resumes immediately before the step.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.core.collectives import gather_objects
from megatron.core.config.json_text import parse_json
from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.sample_format import Sample
from megatron.core.datasets.samplers import MicroBatch
from megatron.core.dist_checkpointing.storage import CheckpointError, on_first_rank, save
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from megatron.extensions.observe.diagnosis.flags import FINDING
from megatron.extensions.observe.diagnosis.nonfinite_search import Finding, search
from megatron.training.checkpoints.checkpointing import RunCheckpoint
from megatron.training.config.arguments import save_config
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Meter, StepFinding, Verdict
from megatron.training.progress import Progress, Step
from megatron.training.reliability.visible_text import visible
from megatron.training.run import TrainingRun

CONFIG = "run_config.yaml"
SAMPLES = "samples-*.npz"

ADVICE = "replay the step, in one process or under another layout, and inspect the module and the samples"
NOT_REPRODUCED = (
    "a second run of the step, with the same weights and samples, produced only finite values, so neither the weights "
    "nor the samples are the cause. Suspect the hardware, or a race condition in a kernel"
)

NEWER_WEIGHTS = (
    "a second run of the step, with the weights after the update that overlapped with the step, produced only finite "
    "values, so the cause is the older weights or the hardware"
)
"""Text that is reported if a second run of the step finds no non-finite value, under a pipeline schedule without a
flush. A schedule without a flush does not keep the weights that a step used, so the second run uses newer weights."""


@dataclass(frozen=True)
class SavedStep:
    """Contents of `finding.json`."""

    step: Step
    loss_scale: float
    finding: Finding | None
    """First non-finite value; None if all values were finite when the step ran again."""

    @classmethod
    def read(cls, folder: Path) -> SavedStep:
        """Read the saved step in a folder. Raises ValueError if the folder contains no saved step."""
        try:
            values = parse_json((folder / FINDING).read_text())
            finding = values["finding"]
            return cls(Step(**values["step"]), values["loss_scale"], finding and Finding.from_json(finding))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} holds no saved step: {FINDING}: {error}") from error


class FirstNonFinite(Callback):
    """Callback that reports where the first non-finite value was computed."""

    run: TrainingRun

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        self.run = run
        return ()

    def search(self, verdict: Verdict) -> StepFinding:
        return search_and_save(self.run, verdict)


def search_and_save(run: TrainingRun, verdict: Verdict) -> StepFinding:
    """Run a step again to find the first module or gradient with a non-finite value. If the non-finite result of the
    step ends the run, also save the step to --save. Collective."""
    step, watchdog = verdict.step, run.runtime.watchdog
    phase = watchdog.status.phase
    watchdog.doing(f"{phase}, running iteration {step.iteration} again to find the first value that is not finite")
    finding = search(run.forward_backward, step, run.data.read_batches(step), verdict.result.loss_scale)
    watchdog.doing(phase)
    flushes = PIPELINE_SCHEDULES.facts(run.config.parallel.schedule).flushes
    nothing = NOT_REPRODUCED if flushes else NEWER_WEIGHTS
    text = finding.describe() if finding is not None else nothing
    if not verdict.ends_run:
        return StepFinding(text)
    text += not_saved(run.config)
    if run.config.checkpoint.save_folder is not None:
        run.saver.wait()
        before = replace(run.progress, iteration=step.iteration - 1, consumed_samples=step.first_sample)
        try:
            saved = SavedStep(step, verdict.result.loss_scale, finding)
            batches = run.data.train.next_step(step.first_sample, step.samples)
            folder = run.config.checkpoint.save_folder / "nan" / f"iter_{step.iteration:07d}"
            save_step(folder, saved, batches, run.saver.checkpoint, before)
            text += f"\nthe step and the state before it were saved; to replay it: python tools/replay_step.py {folder}"
        except CheckpointError as error:
            print(visible(f"{socket.gethostname()}: the step was not saved: {error}"), file=sys.stderr, flush=True)
    if finding is not None and finding.rank != run.runtime.launch.rank:
        time.sleep(1.0)  # let the rank that computed the first non-finite value report first
    return StepFinding(text, ADVICE)


def not_saved(config: RunConfig) -> str:
    """Return a message which says that the step was not saved, because --save is a URL. Return an empty string if
    --save is a folder or is not set."""
    save = config.checkpoint.save
    if save is None or config.checkpoint.save_folder is not None:
        return ""
    rule = "is a URL, but steps can be saved only to mounted file systems, so this step was not saved"
    return f"\n{Problem('--save', save, rule, 'use --save FOLDER to save and replay such a step')}"


def save_step(
    folder: Path, saved: SavedStep, batches: Sequence[MicroBatch], checkpoint: RunCheckpoint, before: Progress
) -> None:
    """Save a step, together with the state of the run before the step, to a folder. This function must be called before
    the update of the step. Collective.

    Args:
        folder: Folder to create.
        saved: Contents of `finding.json`.
        batches: The step's samples on this data-parallel rank.
        checkpoint: Checkpoint writer of the run.
        before: Progress of the run before the step.

    Raises:
        CheckpointError: A rank cannot write its files. Every rank raises the error.
    """
    state, plan = checkpoint.state, checkpoint.plan
    own = checkpoint.config if plan is None else plan.at(saved.step.first_sample).config
    on_first_rank(partial(_begin, folder, own, saved), state.world)
    problem = None
    if state.tp.first and state.pp.first and state.cp.first:
        problem = write_samples(batches, folder / f"samples-{state.dp.rank:05d}.npz")
    if problems := [found for found in gather_objects(problem, state.world) if found]:
        raise CheckpointError(problems[0])
    save(folder, before.iteration, *checkpoint.contents(before), state.world)


def _begin(folder: Path, config: RunConfig, step: SavedStep) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    given = tuple((field, value) for field, value in config.given if field != "vocab_size")
    # The vocabulary size is saved as a value, because a replay has no tokenizer from which to derive it.
    save_config(replace(config, given=given), folder / CONFIG)
    (folder / FINDING).write_text(json.dumps(asdict(step), indent=1))


def write_samples(batches: Sequence[MicroBatch], path: Path) -> str | None:
    """Write the samples of this data-parallel rank. Return an error message if writing fails; otherwise None."""
    arrays = {}
    for name in batches[0]:
        parts = [part.cpu().numpy() for batch in batches if (part := batch[name]) is not None]
        if parts:
            arrays[name] = np.concatenate(parts)
    try:
        np.savez(path, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        return str(error)
    return None


class SavedSamples:
    """Dataset of the samples of a saved step. Each sample has the same index as in the run."""

    def __init__(self, folder: Path, micro_batch_size: int) -> None:
        self.samples: dict[int, Sample] = {}
        dealt = []
        for path in sorted(folder.glob(SAMPLES)):
            with np.load(path, allow_pickle=False) as arrays:
                columns = {name: arrays[name] for name in arrays.files}
            numbers = columns.pop("sample_index")
            dealt.append(numbers.reshape(-1, micro_batch_size))
            for row, number in enumerate(numbers.tolist()):
                self.samples[number] = {name: column[row] for name, column in columns.items()}
        if not self.samples:
            raise ValueError(f"{folder} holds no samples: {SAMPLES}")
        self.order = np.stack(dealt, axis=1).ravel()
        """Sample indices in the order of the run's micro-batches: first the samples of the first micro-batch of each
        replica, then the samples of the second micro-batch of each replica, and so on."""

        self.fingerprint = str(folder)

    def deal(self, dataset: Dataset, samples: range, replicas: int, micro_batch_size: int) -> NDArray[np.int64]:
        """Return the sample indices of all micro-batches as an array [micro-batches, replicas, micro_batch_size]. The
        number of replicas may differ from the number in the saved run. A different micro-batch size does not change the
        order of the samples.
        """
        dealt: NDArray[np.int64] = self.order.reshape(-1, replicas, micro_batch_size)
        return dealt

    def __len__(self) -> int:
        return max(self.samples) + 1

    def __getitem__(self, index: int) -> Sample:
        optional: Sample = {"position_ids": None, "document_ids": None}
        return optional | self.samples[index]

    def origin(self, index: int) -> str:
        return f"{self.fingerprint}:{index}+0"

    def text(self, index: int) -> NDArray[np.int64]:
        sample = self.samples[index]
        tokens, labels = sample["tokens"], sample["labels"]
        assert tokens is not None and labels is not None
        return np.append(tokens, labels[-1:])
