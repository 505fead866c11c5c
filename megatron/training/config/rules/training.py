"""Rules for batch size, training length, learning-rate schedule, checkpoints and skipped steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.training.config.batch_size import batch_schedule, legal_sizes, samples_of_run
from megatron.training.config.flags import all_flags, dashed, value_of
from megatron.training.config.problem import Problem, divides, multiples, unless_at_most, unless_multiple
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS


def skipped_steps(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Report a problem if --max-skipped-iterations is set, but no enabled check can skip steps."""
    checks = [flag for flag in all_flags() if flag.spec.skips_steps]
    count = c.checks.max_skipped_iterations
    if count and not any(value_of(c, check) for check in checks):
        rule = f"needs {' or '.join(check.name for check in checks)}: without such a check, no step is skipped"
        remedies = [f"remove {dashed(f'no_{check.field}')}" for check in checks if check.default]
        remedies += [f"add {check.name}" for check in checks if not check.default][:1]
        yield Problem("--max-skipped-iterations", count, rule, ", or ".join(remedies))


def samples_of_micro_batches(c: RunConfig, world_size: int) -> tuple[int, str]:
    """Return the number of samples in one micro-batch, summed over all replicas, and a text for messages that shows how
    the number is computed. The number is 0 if the layout is not valid; this function does not report invalid
    layouts."""
    micro, model = c.training.micro_batch_size, c.parallel.model_parallel_size
    dp = 0 if micro < 1 or model < 1 or world_size % model else world_size // model
    return micro * dp, f"--micro-batch-size {micro} * data-parallel size {dp} ="


def batch(c: RunConfig, world_size: int) -> Iterator[Problem]:
    t, (step, name) = c.training, samples_of_micro_batches(c, world_size)
    if not step:
        return
    shown = f"{name} {step}"
    if not divides(step, t.global_batch_size):
        remedy, replicas = multiples(t.global_batch_size or step, step), step // t.micro_batch_size
        if t.global_batch_size and t.global_batch_size % replicas == 0:
            smaller = math.gcd(t.global_batch_size // replicas, t.micro_batch_size)
            remedy += f", or use --micro-batch-size {smaller}"
        yield Problem("--global-batch-size", t.global_batch_size, f"must be a multiple of {shown}", remedy)
    elif t.num_microbatches and t.global_batch_size and t.num_microbatches * step != t.global_batch_size:
        rule = f"must be --global-batch-size {t.global_batch_size} / ({shown})"
        remedy = f"remove it, or use {t.global_batch_size // step}"
        yield Problem("--num-microbatches", t.num_microbatches, rule, remedy)
    yield from unless_multiple("--eval-global-batch-size", t.eval_global_batch_size, name, step)


def callbacks_evaluate(c: RunConfig) -> bool:
    """Return True if one of the run's callbacks evaluates the model."""
    return any(facts.evaluates and facts.when(c) for facts in map(CALLBACKS.facts, CALLBACKS))


def length(c: RunConfig, world_size: int) -> Iterator[Problem]:
    t, derived = c.training, dict(c.given)
    fields = ("train_iters", "train_samples", "train_tokens")
    given = {f"--{name.replace('_', '-')}": derived.get(name, getattr(t, name)) for name in fields}
    iters, own_samples, _ = given.values()
    names = [name for name, value in given.items() if value is not None]
    if iters is not None and own_samples is not None:
        yield Problem.exclusive("--train-iters", iters, "--train-samples")
    if not names and c.data.dataset == "mock" and not t.skip_train:
        remedy = "add --train-iters, --train-samples or --train-tokens"
        yield Problem("--mock-data", None, "synthetic data has no epochs, so the run needs a length", remedy)
    if t.skip_train and t.eval_iters == 0 and not callbacks_evaluate(c):
        flags = filter(None, (CALLBACKS.facts(name).evaluates for name in CALLBACKS))
        remedy = ", or add ".join(["raise --eval-iters", *flags])
        yield Problem("--skip-train", None, "leaves nothing to do, because --eval-iters is 0", remedy)
    samples, size = samples_of_run(c), t.global_batch_size
    if batch_schedule(c) and size:
        size = legal_sizes(c).at(0)
    if names and samples is not None and size and 0 <= samples < size:
        by_tokens = t.train_tokens is not None and (own_samples is None or samples < own_samples)
        name, unit = ("--train-tokens", c.model.seq_length) if by_tokens else ("--train-samples", 1)
        rule = f"is less than one step of {size} samples"
        yield Problem(name, given[name], rule, f"nearest: {size * unit}")


def schedule(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o, t = c.optimizer, c.training
    by_samples = t.train_samples is not None or t.train_tokens is not None
    by_iters = t.train_iters is not None
    wrong, right = ("iters", "samples") if by_samples else ("samples", "iters")
    if by_samples or by_iters:
        for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            value = getattr(o, f"{stem}_{wrong}")
            if value:
                name = f"--{stem.replace('_', '-')}"
                rule = f"the run's length is given in {'samples or tokens' if by_samples else 'iterations'}"
                yield Problem(f"{name}-{wrong}", value, rule, f"use {name}-{right}{_converted(c, value, by_samples)}")
    if o.lr is not None and o.lr > 0:
        for flag, value in (("--min-lr", o.min_lr), ("--lr-warmup-init", o.lr_warmup_init)):
            yield from unless_at_most(flag, value, "--lr", o.lr)
    if o.decoupled_lr is not None and o.decoupled is not None:
        yield from unless_at_most("--decoupled-min-lr", o.decoupled.min_lr, "--decoupled-lr", o.decoupled_lr)
    yield from _decay_length(c, right, by_samples or by_iters)
    yield from _weight_decay(c)


def _converted(c: RunConfig, value: int, to_samples: bool) -> str:
    """Convert iterations to samples, or samples to iterations, and format the number for a message. Return an empty
    text if the batch size varies, because the numbers are then not proportional."""
    size = c.training.global_batch_size
    if not size or size < 0 or batch_schedule(c):
        return ""
    return f" {value * size if to_samples else -(-value // size)}"


def _decay_length(c: RunConfig, unit: str, known: bool) -> Iterator[Problem]:
    o = c.optimizer
    whole = samples_of_run(c) if unit == "samples" else c.training.train_iters
    if o.lr_decay_tokens and getattr(o, f"lr_decay_{unit}") is None and c.training.global_batch_size:
        step = c.model.seq_length * (1 if unit == "samples" else legal_sizes(c).at(0))
        rule = f"is less than one {'sequence' if unit == 'samples' else 'step'} of {step} tokens"
        yield Problem("--lr-decay-tokens", o.lr_decay_tokens, rule, f"nearest: {step}")
    decay = getattr(o, f"lr_decay_{unit}") or whole
    warmup, anneal = getattr(o, f"lr_warmup_{unit}"), getattr(o, f"lr_wsd_decay_{unit}")
    if known and decay and warmup >= decay > 0:
        rule = f"must be less than the decay length of {decay}"
        yield Problem(f"--lr-warmup-{unit}", warmup, rule, f"nearest: {decay - 1}, or raise --lr-decay-{unit}")
    if o.lr_decay_style == "WSD":
        if not o.has_anneal:
            remedy = f"add --lr-wsd-decay-{unit}, or --lr-wsd-decay-fraction 0.2 for the last 20 %"
            yield Problem("--lr-decay-style", "WSD", "needs the length of the final anneal", remedy)
        elif known and decay and anneal and anneal > decay:
            rule = f"must be at most the length of the decay, {decay}"
            yield Problem(f"--lr-wsd-decay-{unit}", anneal, rule, f"nearest: {decay}")


def _weight_decay(c: RunConfig) -> Iterator[Problem]:
    o = c.optimizer
    start = o.weight_decay if o.start_weight_decay is None else o.start_weight_decay
    end = o.weight_decay if o.end_weight_decay is None else o.end_weight_decay
    if o.weight_decay_incr_style == "constant" and start != end:
        rule = f"cannot start at {start:g} and end at {end:g}"
        yield Problem("--weight-decay-incr-style", "constant", rule, "use linear or cosine, or equal values")
