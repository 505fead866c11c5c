"""Flags for text files as training data and for fill-in-the-middle samples. This module does not import torch."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from megatron.core.config.data import DatasetConfig, weight_of
from megatron.core.config.flag_spec import Section, flag
from megatron.core.dist_checkpointing.path_kind import PATH_KINDS
from megatron.core.registry import imported
from megatron.training.config.flags import EXTENSION_SECTIONS, dashed
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

if TYPE_CHECKING:
    from megatron.core.datasets.dataset import Dataset
    from megatron.core.tokenizers import Tokenizer


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(TextDataConfig)
    paths = _paths_of(config)
    plain = [word for word in own.text_key if "=" not in word]
    if len(plain) > 1:
        rule = "a record has one document, so that only one key can apply to all data sets"
        example = f"{paths[-1] if paths else 'b.jsonl'}={plain[-1]}"
        yield Problem("--text-key", " ".join(plain), rule, f"set the other keys as PATH=KEY, such as {example}")
    for word in (word for word in own.text_key if "=" in word):
        path = next((each for each in paths if word.startswith(f"{each}=")), word.rpartition("=")[0])
        if word == f"{path}=":
            yield Problem("--text-key", word, "names no key", "write PATH=KEY")
        elif path not in paths and "://" not in path and not glob.glob(path):
            # A path that exists on disk is accepted, because the data may belong to a later phase.
            rule = f"there is no data set {path}; the data sets of the run are {', '.join(paths) or 'none'}"
            yield Problem("--text-key", word, rule, "correct the path in PATH=KEY")


@extension_flags("text files", may_change=True, rules=rules)
@dataclass(frozen=True)
class TextDataConfig:
    """Options for making documents from text files."""

    text_key: tuple[str, ...] = flag(("text",), "--json-keys", many=True)
    """Key of JSON objects, or column of tables, that contains the document. PATH=KEY sets the key or column for one
    data set."""

    text_documents: str = flag("file", choices=("file", "line"))
    """Unit of a document in a plain text file: the whole file, or a line."""

    append_eod: bool = True
    """End each document of text files with the end-of-document token, if the tokenizer has one."""

    max_bad_lines: int = flag(0, at_least=0)
    """Largest number of unreadable records to skip in text files. If there are more of them, an error is raised."""

    tokenizer_workers: int | None = flag(None, above=0)
    """Number of processes per node that tokenize text files. By default, small inputs are tokenized by one process, and
    large inputs by one process per core."""

    def key_of(self, path: str) -> str:
        """Return the JSON key that contains the documents of a data set."""
        own = [word[len(path) + 1 :] for word in self.text_key if word.startswith(f"{path}=")]
        return (own or [word for word in self.text_key if "=" not in word] or ["text"])[-1]


def rules_of_fill_in_middle(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(FillInMiddleConfig)
    if own.fim_data:
        if config.tokenizer.tokenizer_type is None:
            yield Problem("--fim-data", None, "needs a tokenizer to cut text", "add --tokenizer-type and its files")
        if config.data.dataset != "gpt":
            yield Problem.exclusive("--fim-data", None, f"--dataset-type {config.data.dataset}")
        if own.fim_fragment_rate != FillInMiddleConfig.fim_fragment_rate and own.fim_split_sample is None:
            rule, remedy = "has no effect without --fim-split-sample", "add the token that splits documents"
            yield Problem("--fim-fragment-rate", own.fim_fragment_rate, rule, remedy)
        return
    for name, value in vars(own).items():
        if value != getattr(FillInMiddleConfig, name) and (name, value) != ("fim_rate", 0.0):
            yield Problem(dashed(name), value, "has no effect without --fim-data", "add --fim-data")


@extension_flags("fill in the middle", may_change=True, rules=rules_of_fill_in_middle)
@dataclass(frozen=True)
class FillInMiddleConfig:
    """Options for fill-in-the-middle samples."""

    fim_data: bool = False
    """Rearrange documents for fill-in-the-middle: move the middle of a document after its end (arXiv 2207.14255)."""

    fim_rate: float = flag(0.5, at_least=0, at_most=1)
    """Fraction of documents that --fim-data rearranges."""

    fim_spm_rate: float = flag(0.5, at_least=0, at_most=1)
    """Fraction of rearranged documents that have the order suffix, prefix, middle. All other rearranged documents have
    the order prefix, suffix, middle."""

    fim_split_sample: str | None = None
    """Token at which documents are split into fragments. Each fragment is rearranged separately."""

    fim_fragment_rate: float = flag(0.5, at_least=0, at_most=1)
    """Fraction of fragments that are rearranged. Fragments are the parts into which --fim-split-sample splits a
    document."""

    fim_no_prefix: str | None = None
    """Documents and fragments that begin with this text are not rearranged."""

    fim_prefix_token: str = "<fim_prefix>"
    """Token before the prefix of a rearranged document."""

    fim_middle_token: str = "<fim_middle>"
    """Token before the middle of a rearranged document."""

    fim_suffix_token: str = "<fim_suffix>"
    """Token before the suffix of a rearranged document."""

    fim_pad_token: str = "<fim_pad>"
    """Token that pads rearranged samples. The loss ignores predictions of this token."""

    fim_eod_token: str | None = None
    """Token between documents. Default: the tokenizer's end-of-document token."""

    def wrapped(self, dataset: Dataset, config: DatasetConfig, tokenizer: Tokenizer | None, seed: int) -> Dataset:
        """Wrap the data set in fill-in-the-middle samples if --fim-data is given; otherwise, return the data set
        unchanged.

        Args:
            dataset: Data set to wrap.
            config: Data configuration.
            tokenizer: Tokenizer of the run; --fim-data requires one.
            seed: Seed of the random numbers.
        """
        if not self.fim_data:
            return dataset
        made: Dataset = imported(f"{__package__}.fill_in_middle:FillInMiddle")(dataset, config, tokenizer, seed)
        return made


def _paths_of(config: RunConfig) -> list[str]:
    """Return all data paths that the flags of a run specify."""
    data = config.data
    words = [*(data.data_path or ()), *(data.train_data_path or ()), *(data.valid_data_path or ())]
    words += [*(data.test_data_path or ()), *(word.partition("=")[2] for word in data.valid or ())]
    return list(dict.fromkeys(re.sub(r"@[0-9.]+:[0-9.]+$", "", word) for word in words if weight_of(word) is None))


PATH_KINDS.register("text", f"{__package__}.path_kind:TEXT", about="is text", order=45)


def of_users(section: Section) -> dict[str, list[dict[str, object]]]:
    """Return the flag values of user extensions, so that dataset hashes depend on them. The flags of built-in
    extensions are left out, because they do not change the token ids."""
    own = (each.cls for each in EXTENSION_SECTIONS.values() if not each.cls.__module__.startswith("megatron."))
    return {"extension_options": [asdict(section.options(cls)) for cls in own]}
