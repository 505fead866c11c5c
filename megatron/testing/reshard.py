"""Bitwise comparison of the ranks' memory after a checkpoint is saved under one layout and loaded under another.

The expected values are copied from the memory of the ranks that save the checkpoint: weights, untrained states such as
router biases, and all optimizer and callback states. Before a load, the memory that receives the loaded values is
filled with NaN. Neither side of the comparison uses the checkpoint code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.testing.snapshot import (
    Fragment,
    Label,
    Snapshot,
    assemble,
    start_callbacks,
    state_fragments,
    whole_step,
)
from megatron.training.checkpoints.checkpointing import RunCheckpoint
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.run import TrainingRun

NOW = Label(0)
NOTHING: Mapping[str, Mapping[str, float]] = {}
Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Block of a global tensor as a tuple (key of the tensor, offset of the block, shape of the block)."""

Counters = tuple[int, int, int]
"""Iteration, consumed samples and optimizer steps."""


@dataclass(frozen=True)
class Saved:
    """Folder of a checkpoint, and the values that were in memory on the ranks that saved it."""

    folder: Path
    truth: Snapshot
    counters: Counters


@dataclass
class Visit:
    """Results of one rank from saving and loading checkpoints under one layout."""

    trained: list[Fragment] = field(default_factory=list)
    """This rank's fragments of the tensors that it trained and saved."""

    counters: Counters = (0, 0, 0)

    wrong: dict[str, list[str]] = field(default_factory=dict)
    """Keys of tensors that differ from the saved tensors, or the reason why the run refused the checkpoint. The dict is
    keyed by the source, which is the layout under which the checkpoint was saved."""

    refused: set[str] = field(default_factory=set)
    """Sources (layouts under which checkpoints were saved) whose checkpoints the run refused to load."""

    boxes: list[Box] = field(default_factory=list)
    """Blocks of global tensors that this rank compared with the saved tensors of every source."""


class Checkpoints:
    """Checkpoints of one model in the folder `root`. The name of each checkpoint is the layout under which it was
    saved."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.saved: dict[str, Saved] = {}

    def visit(
        self,
        name: str,
        world_size: int,
        config: RunConfig,
        sources: Sequence[str] = (),
        train: bool = False,
        rounded: Mapping[str, Mapping[str, float]] = NOTHING,
    ) -> dict[str, list[str]]:
        """Optionally train and save a checkpoint under one layout. Then load checkpoints and compare the loaded values
        with the saved values.

        Args:
            name: Name of the layout and of its checkpoint.
            world_size: Number of ranks.
            config: Configuration under this layout.
            sources: Names of the checkpoints to load.
            train: True to train one step and save a checkpoint `name` first.
            rounded: Kinds of state that are rounded when a source is loaded, each with a relative tolerance: an element
                may differ by the tolerance times (its magnitude + 0.001 * the largest magnitude).

        Returns:
            A dict that maps each source to a list. The list contains the keys of tensors that are not bit-equal after
            the load, or the reason why the run refused the checkpoint.

        Raises:
            ValueError: Validation refuses the configuration.
        """
        home = self.root / name
        if train:
            config = replace(config, checkpoint=replace(config.checkpoint, save=str(home)))
        config = resolve_legal(config, world_size)
        wanted = {source: self.saved[source] for source in sources}
        visits: list[Visit] = run_world(world_size, _visit, config, train, wanted, rounded)
        if train:
            truth = assemble([fragment for each in visits for fragment in each.trained])
            assert not truth.replica_errors, truth.replica_errors
            self.saved[name] = Saved(home, truth, visits[0].counters)
        wrong: dict[str, list[str]] = {}
        boxes = [box for each in visits for box in each.boxes]
        for source in sources:
            wrong[source] = sorted({key for each in visits for key in each.wrong[source]})
            if not any(source in each.refused for each in visits):
                wrong[source] += [f"{key} is on no rank" for key in uncovered(self.saved[source].truth, boxes)]
        return wrong


def _visit(
    rank: int,
    world_size: int,
    config: RunConfig,
    train: bool,
    sources: Mapping[str, Saved],
    rounded: Mapping[str, Mapping[str, float]],
) -> Visit:
    found = Visit()
    with local_run(config, rank, world_size) as run:
        checkpoint = RunCheckpoint(config, run.runtime.state, run.stages, run.optimizer, callbacks=run.callbacks)
        if train:
            start_callbacks(run)
            whole_step(run)
            checkpoint.save(run.progress)
            found.trained = state_fragments(run, NOW)
            found.counters = (run.progress.iteration, run.progress.consumed_samples, run.optimizer.step_count)
        for name, source in sources.items():
            forget(run)
            loads = replace(config, checkpoint=replace(config.checkpoint, load=str(source.folder)))
            try:
                progress = replace(checkpoint, config=loads).load(data=run.data.fingerprint_at)
            except ValueError as error:
                found.wrong[name], found.refused = [str(error)], found.refused | {name}
                continue
            fragments, bounds = state_fragments(run, NOW), rounded.get(name, {})
            found.wrong[name] = [f.key for f in fragments if not _same(f, source.truth, bounds)]
            counters = (progress.iteration, progress.consumed_samples, run.optimizer.step_count)
            if counters != source.counters:
                found.wrong[name].append(f"counters {counters}, saved were {source.counters}")
            found.boxes = [(f.key, f.offset, tuple(f.values.shape)) for f in fragments]
    return found


def forget(run: TrainingRun) -> None:
    """Overwrite with NaN every tensor that a checkpoint restores."""
    run.ddp.gather_params_()
    with torch.no_grad():
        for stage in run.stages.values():
            for param in stage.parameters():
                param.fill_(torch.nan)
        for piece in run.ddp.sharded_params():
            piece.data.fill_(torch.nan)
        with run.optimizer.loading_state() as pieces:
            for piece in pieces:
                piece.data.fill_(torch.nan)
        for piece in (piece for callback in run.callbacks for piece in callback.states):
            piece.data.fill_(torch.nan)
    run.optimizer.step_count = -1


def _same(fragment: Fragment, truth: Snapshot, rounded: Mapping[str, float]) -> bool:
    """Return True if a loaded fragment equals the saved fragment. `rounded` maps kinds of state to relative tolerances.
    Fragments of all other kinds must be bit-equal."""
    if fragment.key not in truth.tensors:
        return False
    saved, kind = part_of(truth, fragment), fragment.key.split()[1]
    if kind not in rounded:
        return torch.equal(fragment.values, saved)
    largest = truth[fragment.key].abs().max().double()
    allowed = rounded[kind] * (saved.double().abs() + 1e-3 * largest)
    return bool(((fragment.values.double() - saved.double()).abs() <= allowed).all())


def part_of(truth: Snapshot, fragment: Fragment) -> torch.Tensor:
    """Return the expected values of `fragment`."""
    place = tuple(slice(o, o + n) for o, n in zip(fragment.offset, fragment.values.shape, strict=True))
    return truth[fragment.key][place]


def uncovered(truth: Snapshot, boxes: Sequence[Box]) -> list[str]:
    """Return the keys of tensors that `boxes`, the blocks of all ranks, do not cover completely."""
    seen = {key: torch.zeros(value.shape, dtype=torch.bool) for key, value in truth.tensors.items()}
    for key, offset, shape in boxes:
        if key in seen:
            seen[key][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = True
    return [key for key, mask in seen.items() if not mask.all()]


def kinds(truth: Snapshot) -> Counter[str]:
    """Count the tensors of each kind in a state snapshot: {"weight": 76, "exp_avg": 76, ...}."""
    return Counter(key.split()[1] for key in truth.tensors)
