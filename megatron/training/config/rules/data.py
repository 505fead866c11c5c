"""Rules for data sets and tokenizers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.data import TOKENIZERS
from megatron.core.dist_checkpointing.path_kind import data_kind_of
from megatron.training.config.flags import dashed, flags_of, value_of
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def listed(c: RunConfig) -> list[str]:
    """Return the names of the extension flags that select data and that have a value. Such flags contain lists of data
    sets, which are read before the run starts."""
    return [flag.name for flag in flags_of("data") if flag.section != "data" and value_of(c, flag)]


def data(c: RunConfig, world_size: int) -> Iterator[Problem]:
    d = c.data
    names = ("--train-data-path", "--valid-data-path", "--test-data-path")
    own = [n for n, v in zip(names, (d.train_data_path, d.valid_data_path, d.test_data_path), strict=True) if v]
    whole, made_up = ["--data-path"] if d.data_path else [], ["--mock-data"] if d.mock_data else []
    kinds = [", ".join(names) for names in (whole, own, made_up, listed(c)) if names]
    if not kinds and d.dataset == "gpt":
        remedy = "add --data-path, --train-data-path or --mock-data"
        yield Problem("--data-path", None, "the run has no training data", remedy)
    if len(kinds) > 1:
        yield Problem.exclusive(kinds[0], None, " and ".join(kinds[1:]))
    if own and not d.train_data_path:
        yield Problem("--train-data-path", None, f"is required with {own[0]}", "add the training data")
    yield from _blends(c)


def _blends(c: RunConfig) -> Iterator[Problem]:
    # Imported here because these modules import numpy, which --help and parsing do not need.
    from megatron.core.datasets.build import parse_blend
    from megatron.core.datasets.indices import parse_split

    d = c.data
    for flag, values in (
        ("--data-path", d.data_path),
        ("--train-data-path", d.train_data_path),
        ("--valid-data-path", d.valid_data_path),
        ("--test-data-path", d.test_data_path),
    ):
        if values:
            try:
                parse_blend(flag, values)
            except ValueError as error:
                yield Problem.of_message(flag, values, str(error))
    if d.data_path:
        try:
            shares = parse_split(d.split)
        except ValueError as error:
            yield Problem.of_message("--split", d.split, str(error))
        else:
            if shares[0] <= 0:
                yield Problem(
                    "--split",
                    d.split,
                    "leaves no training data",
                    "use a share above 0 for training, for example 969,30,1",
                )


def validation_sets(c: RunConfig, world_size: int) -> Iterator[Problem]:
    data, training = c.data, c.training
    if data.dataset != "gpt":
        for flag, given in (("--valid", data.valid), ("--full-validation", training.full_validation)):
            if given:
                yield Problem(flag, None, f"{data.dataset} data has no files to evaluate", f"remove {flag}")
        return
    if data.multiple_validation_sets and not data.valid_data_path:
        yield Problem("--multiple-validation-sets", None, "needs --valid-data-path", "add the prefixes of the sets")
    try:
        data.named_sets  # noqa: B018
    except ValueError as error:
        yield Problem.of_message("--valid", data.valid, str(error))


def _text_files(c: RunConfig) -> Iterator[Problem]:
    if c.data.dataset != "gpt":
        return
    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for word in (word for word in getattr(c.data, field) or () if data_kind_of(word) is not None):
            rule = "is text, whose tokens need a tokenizer"
            remedy = "add --tokenizer-type and its files, or give the prefix of an indexed dataset"
            yield Problem(dashed(field), word, rule, remedy)


def tokenizer(c: RunConfig, world_size: int) -> Iterator[Problem]:
    t = c.tokenizer
    if t.tokenizer_type is None:
        yield from _text_files(c)
        if c.model.vocab_size is None:
            remedy = "add --tokenizer-type, or --vocab-size if the data is already tokenized"
            yield Problem("--tokenizer-type", None, "is required, because no flag gives the vocabulary size", remedy)
        return
    for field in TOKENIZERS.facts(t.tokenizer_type).needs:
        if not getattr(t, field):
            name = dashed(field)
            yield Problem(name, None, f"is required by --tokenizer-type {t.tokenizer_type}", f"add {name} FILE")
    if t.tokenizer_type == "NullTokenizer" and c.model.vocab_size is None:
        remedy = "add --vocab-size with the number of token ids, EOD included as the last one"
        yield Problem("--vocab-size", None, "is required by --tokenizer-type NullTokenizer", remedy)
