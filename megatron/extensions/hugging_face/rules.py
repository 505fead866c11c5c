"""Rules of exports to Hugging Face folders. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.extensions.hugging_face.flags import HuggingFaceConfig
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def exports(c: RunConfig, world_size: int) -> Iterator[Problem]:
    options = c.options(HuggingFaceConfig)
    wanted, interval = options.export_hf_interval, c.checkpoint.save_interval
    if wanted is None:
        if options.export_hf_dir is not None:
            yield Problem.no_effect("--export-hf-dir", options.export_hf_dir, "--export-hf-interval")
    elif c.checkpoint.save is None:
        yield Problem.no_effect("--export-hf-interval", wanted, "--save")
    elif not interval or (interval > 0 and wanted % interval):
        rule = f"exports checkpoints, so it must be a multiple of --save-interval {interval or '(not given)'}"
        nearest = interval * max(1, round(wanted / interval)) if interval else wanted
        remedy = f"nearest: {nearest}" if interval else f"add --save-interval {wanted}"
        yield Problem("--export-hf-interval", wanted, rule, remedy)
