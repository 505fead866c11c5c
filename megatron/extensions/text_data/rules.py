"""Rules of fill-in-the-middle samples. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megatron.extensions.text_data.flags import FillInMiddleConfig
from megatron.training.config.flags import dashed
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def fill_in_middle(c: RunConfig, world_size: int) -> Iterator[Problem]:
    fim = c.options(FillInMiddleConfig)
    if fim.fim_data:
        if c.tokenizer.tokenizer_type is None:
            yield Problem("--fim-data", None, "cuts text: it needs a tokenizer", "add --tokenizer-type and its files")
        if c.data.dataset != "gpt":
            yield Problem.exclusive("--fim-data", None, f"--dataset-type {c.data.dataset}")
        if fim.fim_fragment_rate != FillInMiddleConfig.fim_fragment_rate and fim.fim_split_sample is None:
            rule, remedy = "has no effect without --fim-split-sample", "add the token that cuts documents"
            yield Problem("--fim-fragment-rate", fim.fim_fragment_rate, rule, remedy)
        return
    for each in fields(FillInMiddleConfig):
        value = getattr(fim, each.name)
        if value != each.default and (each.name, value) != ("fim_rate", 0.0):
            yield Problem(dashed(each.name), value, "has no effect without --fim-data", "add --fim-data")
