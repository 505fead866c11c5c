"""Build the runs of a ladder. Each run uses the target's configuration at a smaller width or depth, by default with the
target's ratio of tokens to parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from megatron.core.config.model import TransformerConfig
from megatron.core.pipeline_parallel.stage_parameters import active_parameters, count_parameters
from megatron.extensions.data.phases.flags import BatchScheduleFlags, PhasesConfig
from megatron.extensions.optim.mup.widths import WIDTHS, scaled_widths
from megatron.extensions.optim.schedules.flags import ScheduleFlags
from megatron.extensions.optim.schedules.pieces import absolute
from megatron.training.config.batch_size import legal_sizes, samples_of_run
from megatron.training.config.flags import field_table, named_value, with_named
from megatron.training.config.prepare import load_config
from megatron.training.config.run_config import RunConfig

UNITS = ("train_iters", "train_samples", "train_tokens")
LENGTHS = tuple(
    f"lr_{part}_{unit}"
    for part, units in (
        ("warmup", ("iters", "samples", "tokens")),
        ("decay", ("iters", "samples", "tokens")),
        ("wsd_decay", ("iters", "samples")),
    )
    for unit in units
)
"""Fields of the learning rate schedule that are scaled in proportion to the length of the run."""


@dataclass(frozen=True)
class Size:
    """Size of a model and length of its training run."""

    hidden_size: int
    num_layers: int
    parameters: int
    """Number of parameters that take part in a token's matrix products (N). An embedding that does not share the output
    layer's weights is not counted."""

    iterations: int
    tokens: int

    @property
    def compute(self) -> float:
        return 6.0 * self.parameters * self.tokens


@dataclass(frozen=True)
class Rung:
    """One run of a ladder: a small run (rung) or the target run."""

    size: Size
    rate: float
    changes: tuple[tuple[str, object], ...] = ()
    """Configuration fields whose values differ from the target's, as pairs (field, value)."""

    @property
    def name(self) -> str:
        """Folder name of the rung."""
        size = self.size
        return f"h{size.hidden_size}-l{size.num_layers}-t{size.tokens}-r{self.rate:g}"


@dataclass(frozen=True)
class Wanted:
    """Requested rungs."""

    widths: Sequence[int] = ()
    depths: Sequence[int] = ()
    ratios: Sequence[float] = ()
    """Ratios of tokens to parameters; if empty, only the target's ratio is used."""

    rates: Sequence[float] = ()
    """Learning rates; if empty, only the target's rate is used."""

    swept: Sequence[int] = ()
    """Widths that are trained at every learning rate in `rates`; if empty, all widths. If only some widths are listed,
    these widths are also trained at the target's learning rate, and all other widths are trained only at the target's
    rate."""

    evaluations: int = 20
    """Number of evaluations per run."""


@dataclass(frozen=True)
class Ladder:
    """Runs of a ladder, with the target run that they predict."""

    target: Rung
    config: RunConfig
    rungs: tuple[Rung, ...]
    evaluations: int

    def interval(self, rung: Rung) -> int:
        """Return the number of iterations between evaluations of a rung."""
        return rung.size.iterations // self.evaluations

    def changes(self, rung: Rung) -> list[str]:
        """Return the flags whose values differ between a rung and the target."""
        return [word for field, value in rung.changes for word in (field_table()[field].name, str(value))]

    def flags(self, rung: Rung, folder: Path) -> list[str]:
        """Return the flags of a rung, to be appended to the target's flags. Unless --save-interval is set, the rung
        saves a checkpoint at every evaluation."""
        place, interval = str(folder / rung.name), str(self.interval(rung))
        saves = [] if self.config.checkpoint.save_interval is not None else ["--save-interval", interval]
        return [*self.changes(rung), "--eval-interval", interval, *saves, "--save", place, "--load", place]


def counted_parameters(model: TransformerConfig) -> int:
    """Return the number of parameters that a ladder counts for a model (N, see `Size.parameters`)."""
    count = count_parameters(model)
    return active_parameters(model) - (count.embedding if count.output_layer else 0)


def build_ladder(flags: Sequence[str], wanted: Wanted) -> Ladder:
    """Build the ladder of the run that `flags` describe. Raises a ValueError that lists all problems."""
    config, problems = load_config(flags)
    told = [str(problem) for problem in problems if not problem.harmless]
    told = told or list(_refused(config, wanted))
    if told:
        raise ValueError("\n".join(told))
    assert config.optimizer.lr is not None
    step = (config.training.global_batch_size or 1) * config.model.seq_length
    iterations = _iterations(config)
    size = Size(
        config.model.hidden_size,
        config.model.num_layers,
        counted_parameters(config.model),
        iterations,
        iterations * step,
    )
    target = Rung(size, config.optimizer.lr)
    rungs = tuple(dict.fromkeys(_rungs(config, target, wanted, step)))
    too_large = [rung.name for rung in rungs if rung.size.compute >= size.compute]
    if too_large:
        raise ValueError(f"{', '.join(too_large)}: needs at least as much compute as the target; use smaller sizes")
    return Ladder(target, config, rungs, wanted.evaluations)


def _iterations(config: RunConfig) -> int:
    given = config.training.train_iters
    return given if given is not None else legal_sizes(config).iterations(samples_of_run(config) or 0)


def _refused(config: RunConfig, wanted: Wanted) -> Iterator[str]:
    if not wanted.widths and not wanted.depths:
        yield "--widths: pass at least one width, or pass --depths"
    yield from _wrong_values(config, wanted)
    if wanted.widths and wanted.depths and len(wanted.widths) != len(wanted.depths):
        rule = f"has {len(wanted.depths)} values, but --widths has {len(wanted.widths)}"
        yield f"--depths: {rule}; pass one depth per width"
    if _iterations(config) < wanted.evaluations:
        rule = f"is more than the target's {_iterations(config)} iterations"
        yield f"--evaluations {wanted.evaluations}: {rule}; lower it"
    if config.options(BatchScheduleFlags).changes_batches or config.options(PhasesConfig).data_phases is not None:
        yield "a ladder needs a constant batch size and one phase; remove --rampup-batch-size etc. or --data-phases"
    if config.training.eval_iters == 0 and not config.training.full_validation:
        yield "--eval-iters 0: a ladder compares validation losses; raise --eval-iters, or add --full-validation"
    if (text := config.options(ScheduleFlags).lr_schedule) is not None and (pieces := list(absolute(text))):
        yield f"--lr-schedule: `{pieces[0]}` does not shrink with the run; specify its length in percent"
    for width in wanted.widths:
        yield from _uneven(config, width) if width > 0 else ()


def _wrong_values(config: RunConfig, wanted: Wanted) -> Iterator[str]:
    for name, values in (
        ("--widths", wanted.widths),
        ("--depths", wanted.depths),
        ("--tokens-per-parameter", wanted.ratios),
        ("--rates", wanted.rates),
    ):
        for value in values:
            if not 0 < value < math.inf:
                yield f"{name} {value:g}: must be above 0 and finite; pass another value"
    if len(wanted.rates) == 1 and wanted.rates[0] != config.optimizer.lr:
        rule = f"is a single rate, but the target has --lr {config.optimizer.lr:g}"
        yield f"--rates {wanted.rates[0]:g}: {rule}; pass several rates, or set the target's --lr to this rate"
    if wanted.swept and not wanted.rates:
        yield f"--sweep-widths {wanted.swept[0]}: has no effect without --rates; add --rates"
    for width in wanted.swept:
        if width not in wanted.widths:
            yield f"--sweep-widths {width}: is not one of --widths; add it to --widths, or remove it"


def _uneven(config: RunConfig, width: int) -> Iterator[str]:
    for field, value in _widths(config, width).items():
        if value < 1 or value.denominator != 1:
            name, here = field_table()[field].name, named_value(config, field)
            rule = f"{name} {here} cannot be scaled to a whole number at this width"
            yield f"--widths {width}: {rule}; use a multiple of {Fraction(here, config.model.hidden_size).denominator}"


def _widths(config: RunConfig, width: int) -> dict[str, Fraction]:
    """Return the configuration fields that depend on the width, scaled to another width. Fields that do not affect this
    model are omitted."""
    here = count_parameters(config.model)

    def counts(field: str) -> bool:
        twice = with_named(config, {field: 2 * named_value(config, field)})
        return field in WIDTHS[:4] or count_parameters(twice.model) != here

    return {field: value for field, value in scaled_widths(config, width).items() if counts(field)}


def _rungs(config: RunConfig, target: Rung, wanted: Wanted, step: int) -> Iterator[Rung]:
    old, depth = config.model.hidden_size, config.model.num_layers
    widths = wanted.widths or [old] * len(wanted.depths)
    ratios = wanted.ratios or [target.size.tokens / target.size.parameters]
    for width, layers in zip(widths, wanted.depths or [depth] * len(widths), strict=True):
        sizes = {field: int(value) for field, value in _widths(config, width).items()} | {"num_layers": layers}
        parameters = counted_parameters(with_named(config, sizes).model)
        rates = _rates(target, wanted, width)
        for ratio in ratios:
            pieces = max(1, round(ratio * parameters / step / wanted.evaluations))
            iterations = pieces * wanted.evaluations
            size = Size(width, layers, parameters, iterations, iterations * step)
            lengths = _lengths(config, target.size.iterations, iterations)
            for rate in rates:
                yield Rung(size, rate, (*sizes.items(), *lengths.items(), ("lr", rate)))


def _rates(target: Rung, wanted: Wanted, width: int) -> list[float]:
    """Return the learning rates at which models of a width are trained. If only some widths are swept, every width is
    also trained at the target's learning rate, because the law compares all sizes at this rate."""
    if not wanted.rates or (wanted.swept and width not in wanted.swept):
        return [target.rate]
    alone = wanted.swept and {*wanted.swept} != {*wanted.widths}
    return [*wanted.rates, *([target.rate] if alone and target.rate not in wanted.rates else [])]


def _lengths(config: RunConfig, before: int, iterations: int) -> dict[str, int]:
    """Return the configuration fields that set a rung's length and learning rate schedule, in the units that the target
    uses (iterations, samples or tokens)."""
    fields = {field: getattr(config.training, field) for field in UNITS}
    fields |= {field: getattr(config.optimizer, field) for field in LENGTHS}
    given = dict(config.given)
    scaled = {}
    for field, value in fields.items():
        value = given.get(field, value)
        if value:
            scaled[field] = round(value * iterations / before)
    return scaled
