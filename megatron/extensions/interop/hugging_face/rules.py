"""Validation rules for the flags of Hugging Face exports and of custom families. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.extensions.interop.hugging_face.family_files import add_families, family_to_write
from megatron.extensions.interop.hugging_face.flags import HuggingFaceConfig
from megatron.extensions.interop.hugging_face.write_config import choose_family, config_to_hf
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def exports(c: RunConfig, world_size: int) -> Iterator[Problem]:
    options, family = c.options(HuggingFaceConfig), None
    try:
        add_families(options.hf_family or ())
        family = family_to_write(options.hf_family or ())
    except ValueError as error:
        yield from Problem.of_errors("--hf-family", None, error)
    if family is not None and options.export_hf_interval is None:
        rule = "selects the family of exports, but the run exports nothing"
        yield Problem("--hf-family", family, rule, "add --export-hf-interval, or remove the flag")
    wanted, interval = options.export_hf_interval, c.checkpoint.save_interval
    if wanted is not None and c.checkpoint.save is not None and (not interval or (interval > 0 and wanted % interval)):
        rule = f"exports checkpoints, so it must be a multiple of --save-interval {interval or '(not given)'}"
        nearest = interval * max(1, round(wanted / interval)) if interval else wanted
        remedy = f"nearest: {nearest}" if interval else f"add --save-interval {wanted}"
        yield Problem("--export-hf-interval", wanted, rule, remedy)
    # Before training starts, refuse models that no Hugging Face folder can express, because every export would fail.
    if wanted is None or c.model.num_layers < 1:
        return
    flag, remedy = "--export-hf-interval", "change the model or remove the flag"
    try:
        if family is None:
            choose_family(c.model)
        else:
            config_to_hf(c.model, family)
    except ArithmeticError:
        # Other flag rules report impossible sizes.
        return
    except ValueError as error:
        named = ("--hf-family", family, str(error), "select another family, or remove the flag")
        yield Problem(*(named if family is not None else (flag, wanted, str(error), remedy)))
