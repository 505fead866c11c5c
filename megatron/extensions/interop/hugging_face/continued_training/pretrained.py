"""Model and tokenizer flags of a run that starts from a Hugging Face folder in --load.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from megatron.core.config.data import TokenizerConfig
from megatron.core.config.model import TransformerConfig
from megatron.core.dist_checkpointing.file_storage import located
from megatron.extensions.interop.conversion.formats import tokenizer_config
from megatron.extensions.interop.conversion.stored_input import local_config
from megatron.extensions.interop.hugging_face.continued_training.rotary_changes import (
    ROTARY_FIELDS,
    longest_sequence,
    replaced_scaling,
    rotary_notices,
)
from megatron.extensions.interop.hugging_face.family_files import add_families
from megatron.extensions.interop.hugging_face.flags import CONFIG, HuggingFaceConfig
from megatron.extensions.interop.hugging_face.read_config import (
    config_from_hf,
    fields_of,
    read_json,
    text_model,
    unread_keys,
)
from megatron.extensions.interop.hugging_face.write_config import settings_of
from megatron.training.config.arguments import changed_by_start
from megatron.training.config.flags import flags_of, value_of, with_fields, with_named
from megatron.training.config.problem import Problem
from megatron.training.config.reading import FlagReader
from megatron.training.config.run_config import RunConfig


def with_pretrained_flags(config: RunConfig, reader: FlagReader) -> RunConfig:
    """Return the configuration with the model and tokenizer of the Hugging Face folder in --load.

    Explicit model flags are kept if they do not change the model's outputs, or if continued training may change them
    (such as --rotary-base). For any other flag that contradicts the folder, a problem is added to the flag reader.
    """
    load = config.checkpoint.load
    assert load is not None
    try:
        add_families(config.options(HuggingFaceConfig).hf_family or ())
    except ValueError as error:
        reader.problems += Problem.of_errors("--hf-family", None, error)
        return config
    try:
        here = local_config(located(load))
        whole = read_json(here / CONFIG)
        theirs, _ = text_model(whole)
        model = config_from_hf(theirs)
    except ValueError as error:
        reader.problems += Problem.of_errors("--load", load, error)
        reader.suspects |= {flag.name for flag in flags_of("model")}
        return config
    own, changed = fields_of(model) | {"seq_length": config.model.seq_length}, changed_by_start(config)
    for flag in flags_of("model"):
        if flag.field not in reader.values:
            continue
        value = value_of(config, flag)
        free = flag.field in changed or _is_free(config, model, flag.field, value)
        if free or not _contradicts(model, flag.field, value):
            own[flag.field] = value
            continue
        rule = f"is {own[flag.field]} in {here / CONFIG}"
        remedy = "remove the flag: the model's flags are read from the folder"
        if flag.field == "vocab_size":
            remedy += "; a larger value adds tokens"
        reader.problems.append(Problem(flag.name, value, rule, remedy))
    if model.rotary:
        own |= replaced_scaling(model, own, reader.values)
    longest, of_length = longest_sequence(model, own, here / CONFIG, reader.values)
    own |= longest
    reader.problems += of_length
    note = f"--load {load} is a Hugging Face model ({theirs['model_type']}): its config.json has the model's flags"
    tokenizer = tokenizer_config(located(load))
    usual = TokenizerConfig(extension_options=config.extension_options)
    if config.tokenizer != usual or tokenizer.tokenizer_type is None:
        tokenizer = config.tokenizer
    else:
        note += ", and the tokenizer from its files"
    reader.notes += [
        note,
        *rotary_notices(model, own, here / CONFIG),
        *unread_keys(theirs),
        *_other_format(load, whole | theirs, config),
    ]
    return with_named(replace(config, tokenizer=tokenizer), own)


def _other_format(load: str, hf_config: Mapping[str, object], config: RunConfig) -> Iterator[str]:
    """Yield a notice if the folder's weights are 16-bit, but the run uses float32 because no flag sets the number
    format."""
    stored, run = hf_config.get("dtype", hf_config.get("torch_dtype")), config.parallel
    flag = {"bfloat16": "--bf16", "float16": "--fp16"}.get(str(stored))
    if flag and run.params_dtype == "float32" and not run.fp32:
        rule = f"has weights in {stored}, but this run computes, saves and exports float32"
        yield f"--load {load} {rule}: add {flag} to keep this format, or --fp32 to confirm float32"


def _contradicts(model: TransformerConfig, field: str, value: object) -> bool:
    """Return True if setting the model field to `value` would change the model's outputs."""
    try:
        return settings_of(with_fields(model, {field: value})) != settings_of(model)
    except (ValueError, ArithmeticError, TypeError):
        return True


def _is_free(config: RunConfig, model: TransformerConfig, field: str, value: object) -> bool:
    """Return True if continued training may set a model field to `value`, although the field of the folder's model has
    a different value.

    A run may have a larger vocabulary size than the folder's model. The additional tokens are then added to the model.
    With a NullTokenizer, any --vocab-size is accepted here, because this tokenizer may add tokens to the vocabulary
    later.
    """
    if field == "vocab_size":
        return config.tokenizer.tokenizer_type == "NullTokenizer" or (
            isinstance(value, int) and value > (model.vocab_size or 0)
        )
    return model.rotary and field in ROTARY_FIELDS
