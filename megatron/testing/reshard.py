"""Save a checkpoint at one layout, load it at another, and compare memory with memory bit by bit.

The expected contents of a checkpoint are read from the memory of the ranks that saved it: weights, states without a
gradient, and every state of the optimizer and of callbacks. Before a load, all of that is filled with NaN. Neither side
of the comparison is read through the code of checkpoints."""

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
"""(key, offset, shape) of what a rank holds."""

Counters = tuple[int, int, int]
"""Iteration, consumed samples, steps of the optimizer."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and what lay in the memory of the ranks that saved it."""

    folder: Path
    truth: Snapshot
    counters: Counters


@dataclass
class Visit:
    """Findings of one rank at one layout."""

    trained: list[Fragment] = field(default_factory=list)
    """Its part of what was saved."""

    counters: Counters = (0, 0, 0)

    wrong: dict[str, list[str]] = field(default_factory=dict)
    """Source -> keys that are not as they were saved, or why it was refused."""

    refused: set[str] = field(default_factory=set)
    """Sources that the run refused."""

    boxes: list[Box] = field(default_factory=list)
    """The boxes that this rank compared, of every source."""


class Checkpoints:
    """Checkpoints of one model below the folder `root`, each saved at a layout and known by that layout's name."""

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
        """At one layout: with `train`, trains one step and saves it as `name`; then loads the checkpoints `sources`.

        Returns source -> what is not bit-equal after the load, or why the run refuses the checkpoint. Kinds of state
        that a load has `rounded`, by source, may differ by that share of an element and of a thousandth of the largest.
        Raises ValueError if the configuration is not legal.
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
    """Fills everything that a checkpoint holds with NaN."""
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
    """Return whether a fragment is bit-equal to the saved one, or within the bound of a kind that may be `rounded`."""
    if fragment.key not in truth.tensors:
        return False
    saved, kind = part_of(truth, fragment), fragment.key.split()[1]
    if kind not in rounded:
        return torch.equal(fragment.values, saved)
    largest = truth[fragment.key].abs().max().double()
    allowed = rounded[kind] * (saved.double().abs() + 1e-3 * largest)
    return bool(((fragment.values.double() - saved.double()).abs() <= allowed).all())


def part_of(truth: Snapshot, fragment: Fragment) -> torch.Tensor:
    """The values that `fragment` should have."""
    place = tuple(slice(o, o + n) for o, n in zip(fragment.offset, fragment.values.shape, strict=True))
    return truth[fragment.key][place]


def uncovered(truth: Snapshot, boxes: Sequence[Box]) -> list[str]:
    """Tensors of which some element was on no rank."""
    seen = {key: torch.zeros(value.shape, dtype=torch.bool) for key, value in truth.tensors.items()}
    for key, offset, shape in boxes:
        if key in seen:
            seen[key][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = True
    return [key for key, mask in seen.items() if not mask.all()]


def kinds(truth: Snapshot) -> Counter[str]:
    """How many tensors of each kind a snapshot of the state has: {"weight": 76, "exp_avg": 76, ...}."""
    return Counter(key.split()[1] for key in truth.tensors)
