"""Selection of the checkpoints to merge and of their weights. The weighted mean of the checkpoints is the input of a
conversion."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import PurePath

from megatron.core.dist_checkpointing.file_storage import storage_of
from megatron.core.dist_checkpointing.path_kind import OURS, PATH_KINDS, kind_of, saved_folders
from megatron.extensions.interop.conversion.convert import Input, recognize
from megatron.extensions.interop.conversion.formats import Options, Source
from megatron.extensions.interop.conversion.merge_weights import Decay, decay_weights, equal_weights, given_weights
from megatron.extensions.interop.conversion.merged_source import MergedSource, Part, opened_alike
from megatron.training.config.run_config import RunConfig
from megatron.training.plan import plan_class
from megatron.training.reliability.url_credentials import redacted

RECORD_VERSION = 1


@dataclass(frozen=True)
class Selection:
    """User's selection of checkpoints to merge."""

    inputs: Sequence[PurePath]
    last: int | None = None
    """Number of checkpoints to merge, counted back from the newest one. The selection must have a single input, which
    is a folder of checkpoints."""

    stable: bool = False
    """True to select only checkpoints from before the learning rate decay. The last update before such a checkpoint
    used the peak learning rate."""

    iterations: Sequence[int] = ()
    """Iterations of the checkpoints to merge. If there is a single input, the iterations select checkpoints in this
    folder. If there are several inputs, entry i is the iteration of input i."""


@dataclass(frozen=True)
class Weighting:
    """Settings that determine the weight of each checkpoint in a merge. Either `given` contains the weights, or the
    weights emulate the learning rate decay `decay`. If neither `given` nor `decay` is set, all weights are equal."""

    given: Sequence[float] | None = None
    allow_unnormalized: bool = False
    decay: Decay | None = None


@dataclass(frozen=True)
class Chosen:
    """Checkpoint to merge."""

    path: PurePath
    iteration: int | None
    """Iteration of the checkpoint, taken from the folder name or specified by the user. None if the iteration is
    unknown."""


def checkpoints_in(root: PurePath) -> dict[int, PurePath]:
    """Return the checkpoints in the iter_N subfolders of a folder, keyed by iteration. Models in other formats are
    included, but incomplete checkpoints are omitted."""
    found: dict[int, PurePath] = dict(saved_folders(root))
    for name in storage_of(root).names(root):
        if match := re.fullmatch(r"iter_(\d+)", name):
            kind = kind_of(root / name)
            if kind not in OURS and PATH_KINDS.facts(kind).model:
                found[int(match[1])] = root / name
            elif kind != "checkpoint":
                found.pop(int(match[1]), None)
    return dict(sorted(found.items()))


def choose(selection: Selection) -> list[Chosen]:
    """Return the selected checkpoints. Checkpoints from a single run are sorted from the oldest to the newest. Raises
    ValueError if a selected checkpoint is missing."""
    inputs, iterations = selection.inputs, selection.iterations
    if selection.last is None and (len(inputs) > 1 or not iterations):
        if iterations and len(iterations) != len(inputs):
            raise ValueError(f"--iterations has {len(iterations)} values for {len(inputs)} inputs; give one per input")
        if len(inputs) < 2:
            raise ValueError(
                f"--input {inputs[0]}: a merge needs several checkpoints; give more inputs, or --last or --iterations "
                "with the folder of a run"
            )
        known: Sequence[int | None] = iterations or [None] * len(inputs)
        return [Chosen(path, iteration) for path, iteration in zip(inputs, known, strict=True)]
    if len(inputs) > 1:
        raise ValueError(f"--last takes the folder of one run, not {len(inputs)} inputs; give one, or remove --last")
    saved = checkpoints_in(inputs[0])
    wanted = list(iterations) if selection.last is None else _last(selection, saved)
    if missing := [iteration for iteration in wanted if iteration not in saved]:
        there = ", ".join(map(str, saved)) or "none"
        raise ValueError(
            f"--iterations: {inputs[0]} has no checkpoint of {', '.join(map(str, missing))}; "
            f"its checkpoints are {there}"
        )
    return [Chosen(saved[iteration], iteration) for iteration in wanted]


def _last(selection: Selection, saved: dict[int, PurePath]) -> list[int]:
    root, count = selection.inputs[0], selection.last or 0
    allowed, which = list(saved), "checkpoints"
    if selection.stable and saved:
        newest = saved[max(saved)]
        config = recognize(newest).open(newest, Options()).config
        rate = learning_rates(config)
        if rate is None:
            raise ValueError(f"--stable: {newest} does not record its learning rate schedule; give --iterations")
        allowed = [iteration for iteration in saved if _equal(rate(iteration), config.optimizer.lr or 0.0)]
        which = f"checkpoints at the peak learning rate ({', '.join(map(str, allowed)) or 'none'})"
    if len(allowed) < count:
        raise ValueError(f"--last {count}: {root} has {len(allowed)} {which}; use a lower number")
    return allowed[-count:]


def merged_input(chosen: Sequence[Chosen], weighting: Weighting, with_state: bool) -> Input:
    """Return an `Input` that provides the weighted mean of the checkpoints. The checkpoints are opened only when the
    conversion opens the input."""
    paths = tuple(each.path for each in chosen)
    return Input("merge", paths, partial(_open, chosen, weighting, with_state))


def _open(chosen: Sequence[Chosen], weighting: Weighting, with_state: bool, options: Options) -> Source:
    sources = opened_alike([each.path for each in chosen], options)
    iterations = [_iteration(each, source) for each, source in zip(chosen, sources, strict=True)]
    weights = _weights(weighting, chosen, sources, iterations)
    paths = [each.path for each in chosen]
    record = _record(paths, iterations, weights, weighting.decay) | {"optimizer_state": with_state}
    parts = [Part(*each) for each in zip(paths, sources, weights, strict=True)]
    merged = MergedSource(parts, record, with_state)
    if weighting.given is None and None not in iterations:
        merged.notes += tuple(_remarks(merged.config, [int(each or 0) for each in iterations], chosen))
    return merged


def _record(
    paths: Sequence[PurePath], iterations: Sequence[int | None], weights: Sequence[float], decay: Decay | None
) -> dict[str, object]:
    """Return the description of the merged checkpoints for the metadata of the output. `decay` is the learning rate
    decay that the merge emulates, if any. Credentials are removed from the URLs in `paths`."""
    sources = [
        {"path": redacted(str(path)), "iteration": iteration, "weight": weight}
        for path, iteration, weight in zip(paths, iterations, weights, strict=True)
    ]
    emulated = None if decay is None else {"style": decay.style, "floor": decay.floor}
    return {"version": RECORD_VERSION, "sources": sources, "emulated_decay": emulated}


def _iteration(chosen: Chosen, source: Source) -> int | None:
    """Return the iteration of a checkpoint. Raises ValueError if the iteration stored in the checkpoint differs from
    the iteration that the user specified."""
    own = None if source.progress is None else source.progress.iteration
    if own is not None and chosen.iteration is not None and own != chosen.iteration:
        raise ValueError(f"--iterations: {chosen.path} is of iteration {own}, not {chosen.iteration}")
    return chosen.iteration if own is None else own


def _weights(
    weighting: Weighting, chosen: Sequence[Chosen], sources: Sequence[Source], iterations: Sequence[int | None]
) -> list[float]:
    if weighting.given is not None:
        return given_weights(weighting.given, len(chosen), weighting.allow_unnormalized)
    if weighting.decay is None:
        return equal_weights(len(chosen))
    known = [iteration for iteration in iterations if iteration is not None]
    if len(known) < len(chosen):
        unknown = chosen[list(iterations).index(None)].path
        raise ValueError(
            f"--emulate-decay: {unknown} does not record its iteration; give the iterations of all checkpoints "
            "with --iterations"
        )
    if any(after <= before for before, after in pairwise(known)):
        raise ValueError(
            f"--emulate-decay: the iterations {', '.join(map(str, known))} must increase; give the checkpoints of a "
            "run from the oldest to the newest"
        )
    _refuse_other_rates(chosen, sources, known)
    samples = [source.progress.scheduled_samples for source in sources if source.progress is not None]
    return decay_weights(weighting.decay, samples if len(samples) == len(known) else known, known)


def _refuse_other_rates(chosen: Sequence[Chosen], sources: Sequence[Source], iterations: Sequence[int]) -> None:
    """Raise ValueError if the run's learning rate was not constant from the first to the last checkpoint."""
    rate = learning_rates(sources[-1].config)
    if rate is None:
        return
    spread = _rates(rate, iterations)
    if not _equal(*spread):
        raise ValueError(
            f"--emulate-decay: the learning rate of the run was not constant from iteration {iterations[0]} to "
            f"{iterations[-1]} ({spread[1]:.3g} to {spread[0]:.3g}), so a decay cannot be emulated; choose "
            "checkpoints between its warm-up and its decay, as --last with --stable does, or give --weights"
        )


def _remarks(config: RunConfig, iterations: Sequence[int], chosen: Sequence[Chosen]) -> Iterator[str]:
    known, of_one_run = sorted(iterations), all(each.iteration is not None for each in chosen)
    if of_one_run and len({after - before for before, after in pairwise(known)}) > 1:
        yield f"the iterations {', '.join(map(str, known))} are not evenly spaced"
    rate = learning_rates(config)
    if rate is not None and not _equal(*(spread := _rates(rate, known))):
        yield (
            f"the learning rate was not constant from iteration {known[0]} to {known[-1]} ({spread[1]:.3g} to "
            f"{spread[0]:.3g}); --last with --stable selects checkpoints before the decay"
        )


def learning_rates(config: RunConfig) -> Callable[[int], float] | None:
    """Return a function that maps an iteration of a run to the learning rate of its update. Return None if `config`
    does not determine the learning rate schedule."""
    training = config.training
    if (
        config.optimizer.lr is None
        or (training.train_iters, training.train_samples, training.train_tokens) == (None,) * 3
    ):
        return None
    try:
        plan, problems = plan_class(config).planned(config)
        if plan is None or problems:
            return None
        schedule, sizes = plan.schedule(), plan.schedule_sizes
    except ValueError:
        return None
    return lambda iteration: schedule.lr_at(sizes.samples(max(0, iteration - 1)))


def _rates(rate: Callable[[int], float], iterations: Sequence[int]) -> tuple[float, float]:
    """Return the minimum and the maximum learning rate between the first and the last checkpoint. `iterations` contains
    the iterations of the checkpoints. Only two updates between each pair of consecutive checkpoints are considered: the
    first one and the last one."""
    ends = [rate(each) for before, after in pairwise(iterations) for each in (before + 1, after)]
    return min(ends), max(ends)


def _equal(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=1e-6)
