"""The flag of runs that are compared with a prediction. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.extensions.plan.ladder.expectation import read_expectation
from megatron.training.config.batch_size import legal_sizes, samples_of_run
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    path = config.options(ExpectFlags).expect
    if path is None:
        return
    name, training = "--expect", config.training
    try:
        expected = read_expectation(path)
    except (OSError, ValueError) as error:
        rule = getattr(error, "strerror", None) or str(error)
        yield Problem(name, path, rule, "give the ladder.json of tools/ladder.py --output")
        return
    for field, planned in (("hidden_size", expected.hidden_size), ("num_layers", expected.num_layers)):
        if (here := getattr(config.model, field)) != planned:
            rule = f"predicts a model of --{field.replace('_', '-')} {planned}, and this one has {here}"
            yield Problem(name, path, rule, "give the prediction of this model")
    samples = samples_of_run(config)
    if training.train_iters is not None:
        samples = legal_sizes(config).samples(training.train_iters)
    tokens = (samples or 0) * config.model.seq_length
    if samples and not 0.99 < tokens / expected.tokens < 1.01:
        rule = f"predicts a run of {expected.tokens:,} tokens, and this one has {tokens:,}"
        yield Problem(name, path, rule, "give the prediction of a run of this length")
    if not training.eval_iters and not training.full_validation:
        yield Problem.no_effect(name, path, "an evaluation (--eval-iters above 0)")


@extension_flags("expected loss", may_change=True, rules=rules)
@dataclass(frozen=True)
class ExpectFlags:
    """Comparison of a run with the prediction of a ladder."""

    expect: str | None = flag(None, path="local")
    """ladder.json of tools/ladder.py, which predicts this run: each validation loss is logged with its distance from
    the predicted curve, and a warning when it leaves the band."""


CALLBACKS.register(
    "expected loss",
    f"{__package__}.expected:ExpectedLoss",
    when=lambda config: config.options(ExpectFlags).expect is not None,
)
