"""Check runs that --expect compares with a prediction."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.extensions.plan.ladder.expectation import Expectation, read_expectation
from megatron.extensions.plan.ladder.flags import ExpectFlags
from megatron.training.config.batch_size import legal_sizes, samples_of_run
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    path = config.options(ExpectFlags).expect
    if path is None:
        return
    name, training = "--expect", config.training
    try:
        expected = read_expectation(path)
    except (OSError, ValueError) as error:
        rule = getattr(error, "strerror", None) or str(error)
        yield Problem(name, path, rule, "pass the ladder.json that tools/ladder.py --output writes")
        return
    for field, planned in (("hidden_size", expected.hidden_size), ("num_layers", expected.num_layers)):
        if (here := getattr(config.model, field)) != planned:
            rule = f"predicts a model of --{field.replace('_', '-')} {planned}, but this one has {here}"
            yield Problem(name, path, rule, "pass the prediction for this model")
    yield from _other_parameters(config, path, expected)
    yield from _other_batch_or_rate(config, path, expected)
    samples = samples_of_run(config)
    if training.train_iters is not None:
        samples = legal_sizes(config).samples(training.train_iters)
    tokens = (samples or 0) * config.model.seq_length
    if samples and not 0.99 < tokens / expected.tokens < 1.01:
        rule = f"predicts a run of {expected.tokens:,} tokens, but this one has {tokens:,}"
        yield Problem(name, path, rule, "pass the prediction for a run of this length")
    if not training.eval_iters and not training.full_validation:
        yield Problem.no_effect(name, path, "an evaluation (--eval-iters above 0)")


def _other_parameters(config: RunConfig, path: str, expected: Expectation) -> Iterator[Problem]:
    """Yield a problem if the model has the expected number of layers and channels but a different number of
    parameters."""
    model = config.model
    if (model.hidden_size, model.num_layers) != (expected.hidden_size, expected.num_layers) or not model.vocab_size:
        return
    # This module imports torch, which other runs do not need.
    from megatron.extensions.plan.ladder.rungs import counted_parameters

    try:
        here = counted_parameters(model)
    except (ArithmeticError, AssertionError, ValueError):
        return  # other rules report invalid sizes
    if not 0.99 < here / expected.parameters < 1.01:
        rule = f"predicts a model of {expected.parameters:,} parameters, but this one has {here:,}"
        yield Problem("--expect", path, rule, "pass the prediction for this model")


def _other_batch_or_rate(config: RunConfig, path: str, expected: Expectation) -> Iterator[Problem]:
    batch, rate = config.training.global_batch_size, config.optimizer.lr
    for name, planned, here in (
        ("--global-batch-size", expected.batch_size, batch),
        ("--lr", expected.rate, rate),
    ):
        if planned is not None and planned != here:
            rule = f"predicts a run of {name} {planned:g}, but this one has {here}, so the loss may differ"
            yield Problem(
                "--expect", path, rule, "use the predicted run's value to compare like with like", harmless=True
            )
