"""Reader of the --data-phases file, a YAML list of phases. Each list entry states where the phase begins and which
flags it changes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megatron.training.config.flags import field_table, parse_int, spelling_table
from megatron.training.config.problem import Problem
from megatron.training.config.reading import FlagReader
from megatron.training.config.yaml_text import Plain, compose, plain, texts_of

UNITS = {
    "from-samples": "samples",
    "from-tokens": "tokens",
    "from-iterations": "iterations",
    "from-iters": "iterations",
}

FRACTION = "from-fraction"
"""Key that states the start of a phase as a fraction of the run's length."""

DATA = ("data_path",)
SIZES = ("micro_batch_size", "global_batch_size")
POSITIONS = (
    "seq_length",
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
)
LR_FRACTIONS = ("lr_warmup_fraction", "lr_wsd_decay_fraction")
LR_SHAPE = ("lr", "min_lr", "lr_decay_style", "lr_warmup_init", *LR_FRACTIONS, "lr_wsd_decay_style")
LR_LENGTHS = tuple(
    f"lr_{part}_{unit}"
    for part, units in (
        ("warmup", ("iters", "samples", "tokens")),
        ("decay", ("iters", "samples", "tokens")),
        ("wsd_decay", ("iters", "samples")),
    )
    for unit in units
)
FIELDS = (*DATA, *SIZES, *POSITIONS, *LR_SHAPE, *LR_LENGTHS)
"""Configuration fields that a phase may change."""


@dataclass(frozen=True)
class PhaseEntry:
    """Entry of the phase file, which defines one training phase."""

    where: str
    """Location of the phase in the file, for messages."""

    name: str
    unit: str
    start: float
    """Position of the phase's beginning, in samples, tokens or iterations depending on `unit`, or as a fraction of the
    run."""

    values: tuple[tuple[str, object], ...]
    """Flags that the phase changes, as (field, value) pairs."""

    anew: bool | tuple[str, ...] = False
    """True if all data sources restart from their beginning in this phase, or a tuple with the names of the data
    sources that restart. False if no data source restarts."""

    def value(self, field: str) -> object:
        return dict(self.values).get(field)

    def whole(self, field: str) -> int | None:
        """Return the value to which the phase sets an integer field. Return None if the phase does not change the
        field."""
        value = self.value(field)
        assert value is None or isinstance(value, int)
        return value

    @property
    def own_lr(self) -> bool:
        """True if the phase has its own learning-rate schedule."""
        return any(field in (*LR_SHAPE, *LR_LENGTHS) for field, _ in self.values)


def read_phases(path: str) -> tuple[tuple[PhaseEntry, ...], tuple[Problem, ...]]:
    """Return the phases of a file, in order, and all problems with the file."""
    try:
        changed = Path(path).stat().st_mtime_ns
    except OSError as error:
        return (), (Problem("--data-phases", path, f"cannot be read: {error.strerror}", "correct the path"),)
    return _read(path, changed)


@lru_cache(maxsize=8)
def _read(path: str, changed: int) -> tuple[tuple[PhaseEntry, ...], tuple[Problem, ...]]:
    remedy = "write a list of phases, each a mapping such as `- {from-tokens: 1e9, data-path: 0.7 A 0.3 B}`"
    try:
        node = compose(path)
    except (OSError, ValueError) as error:
        return (), (Problem("--data-phases", path, f"cannot be read: {' '.join(str(error).split())}", remedy),)
    if node is None or not node.tag.endswith(":seq") or not node.value:
        return (), (Problem("--data-phases", path, "is not a list of phases", remedy),)
    found, problems = [], []
    for number, item in enumerate(node.value):
        where = f"{path}: phase {number}"
        if not item.tag.endswith(":map"):
            problems.append(Problem(where, None, "is not a mapping", remedy))
            continue
        entry, wrong = _entry(where, number, [(str(key.value), plain(value)) for key, value in item.value])
        found.append(entry)
        problems += wrong
    names = [entry.name for entry in found]
    for entry in found:
        if names.count(entry.name) > 1:
            rule, remedy = "is already the name of another phase", "give each phase its own name"
            problems.append(Problem(f"{entry.where}: name", entry.name, rule, remedy))
    return tuple(found), tuple(dict.fromkeys(problems))


def _entry(where: str, number: int, items: Sequence[tuple[str, Plain]]) -> tuple[PhaseEntry, list[Problem]]:
    known = dict(items)
    name = str(known.get("name") or number)
    where = f"{where} ({name})" if "name" in known else where
    reader, problems = FlagReader(), list[Problem]()
    starts: list[tuple[str, float]] = []
    anew: bool | tuple[str, ...] = False
    for key, value in items:
        dashes = key.lstrip("-").replace("_", "-")
        flag, _ = spelling_table().get(f"--{dashes}", (None, True))
        if dashes == "name":
            continue
        if dashes in UNITS:
            try:
                starts.append((UNITS[dashes], parse_int(str(value))))
                if starts[-1][1] < 0:
                    raise ValueError
            except (ValueError, OverflowError):
                rule = "must be an integer, at least 0"
                problems.append(Problem(f"{where}: {key}", " ".join(texts_of(value)), rule, "correct it"))
        elif dashes == FRACTION:
            try:
                starts.append(("fraction", float(str(value))))
                if not 0 <= starts[-1][1] < 1:
                    raise ValueError
            except ValueError:
                rule = "must be at least 0 and below 1: the fraction of the run that is before the phase"
                remedy = "use for example 0.8 for the last 20 %"
                problems.append(Problem(f"{where}: {key}", " ".join(texts_of(value)), rule, remedy))
        elif dashes == "starts-anew":
            anew = value if isinstance(value, bool) else tuple(texts_of(value))
        elif flag is None or flag.field not in FIELDS:
            problems.append(_unknown(where, key, dashes))
        elif flag.field in DATA:
            words = shlex.split(value) if isinstance(value, str) else texts_of(value)
            reader.read_entry(where, key, words)
        else:
            reader.read_entry(where, key, value)
    if not starts and number == 0:
        starts = [("samples", 0)]
    if len(starts) != 1 and not any("from-" in problem.flag for problem in problems):
        rule = "has more than one beginning" if starts else "has no beginning"
        problems.append(
            Problem(where, None, rule, "give one of from-samples, from-tokens, from-iterations and from-fraction")
        )
    unit, start = starts[0] if starts else ("samples", 0)
    if number == 0 and start:
        rule = "the first phase must begin with the run"
        problems.append(Problem(f"{where}: from-{unit}", start, rule, "use 0, or put a phase before it"))
    values = tuple((field, value) for field, value in reader.values.items())
    return PhaseEntry(where, name, unit, start, values, anew), [*problems, *reader.problems]


def _unknown(where: str, key: str, dashes: str) -> Problem:
    import difflib

    legal = [
        "name",
        *list(UNITS)[:3],
        FRACTION,
        "starts-anew",
        *(field_table()[field].name.lstrip("-") for field in FIELDS),
    ]
    close = difflib.get_close_matches(dashes, legal, n=1, cutoff=0.8)
    rule = "a phase cannot change this" if f"--{dashes}" in spelling_table() else "unknown key"
    return Problem(f"{where}: {key}", None, rule, f"did you mean {close[0]}?" if close else f"keys: {', '.join(legal)}")
