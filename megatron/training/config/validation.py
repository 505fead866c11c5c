"""Validation of a configuration before the run starts. This module needs neither torch nor a process group.

`resolve` fills in values that are derived from other values. `validate` reports all violated rules together, each with
the nearest legal value. The rules are in `megatron.training.config.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from megatron.core.config.model import TransformerConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from megatron.training.config.batch_size import batch_schedule, legal_sizes, samples_of_run
from megatron.training.config.flags import (
    EXTENSION_SECTIONS,
    ExtensionSection,
    all_flags,
    dashed,
    flat_values,
    holds,
    value_of,
    with_named,
)
from megatron.training.config.problem import Problem
from megatron.training.config.rules import RULES
from megatron.training.config.rules.data import listed
from megatron.training.config.rules.fields import needs_and_exclusions, single_values
from megatron.training.config.rules.training import callbacks_evaluate
from megatron.training.config.run_config import RunConfig, TrainingConfig
from megatron.training.extensions import problem_in_extension
from megatron.training.plan import RunPlan, plan_class

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["MOCK_VOCAB_SIZE", "Problem", "findings", "notices", "resolve", "validate"]

S = TypeVar("S", bound="DataclassInstance")


MOCK_VOCAB_SIZE = 50257
"""Vocabulary size of a run on synthetic data if the flags set neither a tokenizer nor a vocabulary size. It is the size
of GPT-2's vocabulary."""


def validate(config: RunConfig, world_size: int) -> list[Problem]:
    """Return every problem that prevents a run with `config` on `world_size` ranks. `config` may lack derived
    values."""
    return [problem for problem in findings(config, world_size) if not problem.harmless]


def notices(config: RunConfig, world_size: int) -> list[Problem]:
    """Return notices about flags that have no effect because of the values of other flags."""
    return [problem for problem in findings(config, world_size) if problem.harmless]


def findings(config: RunConfig, world_size: int, resolved: RunConfig | None = None) -> list[Problem]:
    """Return the results of `validate` and `notices`, computed in one pass. `resolved` is the result of `resolve`, if
    known."""
    plan = plan_class(config)
    judge = partial(_own_findings, world_size=world_size, known=(config, resolved))
    return plan.findings(config, world_size, judge, resolved)


def _own_findings(config: RunConfig, world_size: int, known: tuple[RunConfig, RunConfig | None]) -> list[Problem]:
    """Return the problems and notices for a configuration, but not for its training phases. `known` is a pair
    (configuration, its resolved form). If `config` is the configuration in `known`, its resolved form is reused."""
    problems = [*single_values(config), *(problem for *_, problem in switched_off(config))]
    flagged = {problem.flag for problem in problems if not problem.harmless}
    same, resolved = known
    if resolved is None or same is not config:
        resolved = resolve(config, world_size)
    problems += [p for p in needs_and_exclusions(resolved) if p.flag not in flagged]
    for rule in RULES:
        # If a value is wrong by itself, rules that relate this value to other values are skipped. The value is
        # therefore reported only once.
        problems += [p for p in rule(resolved, world_size) if p.flag not in flagged]
    for section in EXTENSION_SECTIONS.values():
        problems += [p for p in _of_extension(section, config, resolved, world_size) if p.flag not in flagged]
    return problems


def _of_extension(section: ExtensionSection, given: RunConfig, config: RunConfig, world_size: int) -> list[Problem]:
    """Return the problems that an extension reports for its flags, or the error that it raises."""
    try:
        return list(section.problems(given, config, world_size))
    except Exception as error:
        if (problem := problem_in_extension(error)) is None:
            raise
        return [problem]


def switched_off(c: RunConfig) -> Iterator[tuple[str, object, Problem]]:
    """Yield (field, new value, notice) for each field that has no effect because of the other flags."""
    single_expert = _is_dense(c)
    if single_expert:
        rule, remedy = (
            "a single expert is equivalent to a dense MLP",
            "remove it to use a dense MLP",
        )
        yield "num_experts", None, Problem("--num-experts", 1, rule, remedy, harmless=True)
    for flag in all_flags():
        for condition in flag.spec.off_without if value_of(c, flag) != flag.default else ():
            if not holds(c, condition):
                yield flag.field, flag.default, Problem.no_effect(flag.name, None, condition.parts[0])
    if c.model.num_experts is None or single_expert:
        for field, default in (("expert_model_parallel_size", 1), ("expert_tensor_parallel_size", None)):
            value = getattr(c.parallel, field)
            if value not in (default, 1):
                yield field, default, Problem.no_effect(dashed(field), value, "--num-experts")


def _is_dense(c: RunConfig) -> bool:
    """Return True if each layer has a single expert that is equivalent to a dense MLP, because the softmax of a single
    logit is 1. In Megatron-DeepSpeed, --num-experts 1 describes a dense model."""
    m = c.model
    own = m.moe_ffn_hidden_size not in (None, m.ffn_hidden_size) or m.moe_shared_expert_intermediate_size is not None
    weighted = "softmax" not in m.moe_router_scores or m.moe_router_topk_scaling_factor not in (None, 1.0)
    drops = any(
        factor is not None and factor < 1 for factor in (m.moe_expert_capacity_factor, m.moe_eval_capacity_factor)
    )
    return m.moe_choices == 1 and not own and not weighted and not drops


def resolve_legal(config: RunConfig, world_size: int) -> RunConfig:
    """Validate and resolve a configuration. Raises ValueError with a message that lists all problems, one per line."""
    config = resolve(config, world_size)
    if problems := validate(config, world_size):
        raise ValueError("\n".join(map(str, problems)))
    return config


def resolve(config: RunConfig, world_size: int, vocab_size: int | None = None) -> RunConfig:
    """Return the configuration with derived values filled in. Given values remain unchanged, even if they are illegal.

    `vocab_size` is the vocabulary size of the tokenizer. If --vocab-size is larger, it takes precedence, so that the
    model has room for more tokens.
    """
    given = config
    config = with_named(config, {field: value for field, value, _ in switched_off(config)})
    if config.training.skip_train:
        config = _without_training(config)
    for extension in EXTENSION_SECTIONS.values():
        config = extension.resolved(config)
    if (schedule := config.parallel.schedule) in PIPELINE_SCHEDULES:
        config = config.with_options(*PIPELINE_SCHEDULES.facts(schedule).asks_for)
    training = _resolve_training(config, world_size)
    files = config.tokenizer.vocab_file or config.tokenizer.merge_file
    config = replace(
        config,
        parallel=_filled(config.parallel, data_parallel_size=_data_parallel_size(config, world_size)),
        model=_resolve_model(config, vocab_size),
        # GPT-2's files imply the GPT-2 tokenizer, which is also Megatron-LM's default.
        tokenizer=_filled(config.tokenizer, tokenizer_type="GPT2BPETokenizer" if files else None),
        training=training,
        optimizer=_resolve_optimizer(config, training),
    )
    before, after = flat_values(given), flat_values(config)
    changed = {field: value for field, value in before.items() if value != after[field]}
    return replace(config, given=tuple((changed | dict(given.given)).items()))


def with_vocabulary(config: RunConfig, vocab_size: int | None) -> RunConfig:
    """Return a resolved configuration with the tokenizer's vocabulary size, if that size is known. The returned
    configuration is the same as if `resolve` had been called with `vocab_size`. If --vocab-size is larger, it takes
    precedence."""
    before = config.model.vocab_size
    if vocab_size is None or (before is not None and before >= vocab_size):
        return config
    given = {"vocab_size": before} | dict(config.given)
    return replace(config, model=replace(config.model, vocab_size=vocab_size), given=tuple(given.items()))


def _filled(section: S, **values: object) -> S:
    """Return a copy of `section` in which each field that is None is set to its value in `values`."""
    return _with(section, {k: v for k, v in values.items() if getattr(section, k) is None and v is not None})


def _with(section: S, values: Mapping[str, object]) -> S:
    """Return a copy of `section` with the fields in `values` replaced."""
    return replace(section, **values)


def _without_training(config: RunConfig) -> RunConfig:
    """Fill in values that a run without training does not need, so that its command line may omit their flags: a
    learning rate, a length and, if only callbacks evaluate, data."""
    training, data = config.training, config.data
    if not names_data(config) and callbacks_evaluate(config) and not training.full_validation:
        data, training = replace(data, mock_data=True), replace(training, eval_iters=0)
    if data.dataset == "mock" and training.train_samples is None and training.train_tokens is None:
        training = _filled(training, train_iters=1)
    return replace(config, data=data, training=training, optimizer=_filled(config.optimizer, lr=1.0))


def names_data(config: RunConfig) -> bool:
    """Return True if the flags select data for training or evaluation."""
    data = config.data
    files = data.data_path or data.per_split or listed(config) or data.valid
    return bool(files) or data.dataset != "gpt" or plan_class(config) is not RunPlan


def _data_parallel_size(config: RunConfig, world_size: int) -> int | None:
    model = config.parallel.model_parallel_size
    return world_size // model if model > 0 and world_size % model == 0 else None


def _resolve_model(config: RunConfig, vocab_size: int | None) -> TransformerConfig:
    model = config.model
    if vocab_size is None and config.tokenizer.tokenizer_type in (None, "NullTokenizer"):
        made_up = config.data.dataset == "mock" and config.tokenizer.tokenizer_type is None
        vocab_size = model.vocab_size or model.default_vocab_size or (MOCK_VOCAB_SIZE if made_up else None)
    if vocab_size is not None:
        model = replace(model, vocab_size=max(vocab_size, model.vocab_size or 0))
    if model.hidden_size <= 0 or model.num_attention_heads <= 0:
        return model
    own_heads = model.hidden_size % model.num_attention_heads == 0 and model.attention_facts.grouped
    return _filled(
        model,
        activation_func=None if model.activation_flags else model.activation,
        ffn_hidden_size=model.ffn_size,
        kv_channels=model.hidden_size // model.num_attention_heads if own_heads else None,
        max_position_embeddings=model.seq_length or None,
    )


def _resolve_training(config: RunConfig, world_size: int) -> TrainingConfig:
    training = config.training
    replicas = _data_parallel_size(config, world_size)
    if replicas and training.micro_batch_size > 0:
        step = training.micro_batch_size * replicas
        given = training.global_batch_size
        size = step * (training.num_microbatches or 1) if given is None else given
        if training.decrease_batch_size_if_needed and size > step:
            size = size // step * step
        training = replace(training, global_batch_size=size)
        if size > 0 and size % step == 0:
            training = _filled(training, num_microbatches=size // step)
    by_tokens = training.train_tokens is not None and training.train_tokens > 0 and config.model.seq_length > 0
    if plan_class(config) is not RunPlan or not by_tokens:
        return training  # The sequence lengths of phases may differ, so the plan converts tokens to samples.
    samples = samples_of_run(config)  # If two lengths are given, the shorter one applies.
    if training.train_iters is not None and training.global_batch_size:
        of_iters = legal_sizes(replace(config, training=training)).samples(training.train_iters)
        samples = of_iters if samples is None else min(samples, of_iters)
        training = replace(training, train_iters=None)
    return replace(training, train_samples=samples or None)


def _resolve_optimizer(config: RunConfig, training: TrainingConfig) -> OptimizerConfig:
    """Convert durations in tokens to samples, or to iterations if the run's length is given in iterations.

    Durations in iterations are also converted to samples if the run's length is given in tokens and the batch size
    varies.
    """
    optimizer, sequence = config.optimizer, config.model.seq_length
    if config.ddp.data_parallel_sharding_strategy == "no_shard":
        optimizer = replace(optimizer, use_distributed_optimizer=False)
    if sequence < 1 or not training.global_batch_size:
        return optimizer
    by_samples = training.train_samples is not None
    unit, other = ("samples", "iters") if by_samples else ("iters", "samples")
    sizes = legal_sizes(replace(config, training=training))
    if batch_schedule(config) and by_samples and config.training.train_iters is not None:
        for stem, none in (("lr_decay", None), ("lr_warmup", 0), ("lr_wsd_decay", None)):
            if iters := getattr(optimizer, f"{stem}_iters"):
                values = {f"{stem}_samples": sizes.samples(iters), f"{stem}_iters": none}
                optimizer = _with(optimizer, values)
    for stem, default in (("lr_decay", None), ("lr_warmup", 0)):
        tokens = getattr(optimizer, f"{stem}_tokens")
        if tokens is not None and tokens >= 0:
            samples = tokens // sequence
            value = samples if by_samples else sizes.iterations(samples)
            converted = {f"{stem}_{unit}": value or default, f"{stem}_{other}": default}
            optimizer = _with(optimizer, converted)
    return optimizer
