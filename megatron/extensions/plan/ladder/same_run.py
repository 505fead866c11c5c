"""Check for runs in a ladder's folder that were started with different flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.path_kind import RUN_CONFIG
from megatron.extensions.plan.ladder.rungs import Ladder, Rung
from megatron.training.config.arguments import config_of, read_flags
from megatron.training.config.flags import EXTENSION_SECTIONS, Flag, all_flags, value_of
from megatron.training.config.prepare import load_config
from megatron.training.config.run_config import RunConfig

FREE_SECTIONS = frozenset(("parallel", "ddp", "checks", "logging", "checkpoint"))
FREE_GROUPS = frozenset(("memory", "observe", "operate", "pipeline", "plan"))
"""Groups of built-in extensions whose flags do not change what a model learns."""

PRECISION = frozenset(("fp16", "bf16", "fp32", "fp64"))
FREE = frozenset(
    "micro_batch_size num_microbatches exit_interval exit_duration_in_mins exit_signal_handler exit_margin_in_mins "
    "eval_interval manual_gc manual_gc_interval manual_gc_eval deterministic num_workers data_cache_path "
    "tokenizer_workers".split()
)


def runs_of_other_flags(ladder: Ladder, rungs: Sequence[Rung], flags: Sequence[str], folder: Path) -> list[str]:
    """Return a problem if the ladder's folder contains earlier runs of `rungs` that were started with different flags.
    The problem lists the flags that differ in the first of these runs.

    The check compares each run's run_config.yaml. Flags of the layout, logs and checkpoints are not compared."""
    found = {rung.name: text for rung in rungs if (text := _differences(ladder, rung, flags, folder))}
    if not found:
        return []
    name, text = next(iter(found.items()))
    more = f", as {len(found) - 1} more are" if len(found) > 1 else ""
    rule = f"belongs to a run with other flags ({text}){more}"
    return [f"--output {folder}: {name} {rule}; choose another --output, or delete the runs"]


def _differences(ladder: Ladder, rung: Rung, flags: Sequence[str], folder: Path) -> str:
    file = folder / rung.name / RUN_CONFIG
    if not file.is_file():
        return ""
    saved = config_of(read_flags(["--config", str(file)]).values)
    there, here = _values(saved), _values(load_config([*flags, *ladder.changes(rung)])[0])
    return ", ".join(f"{name} {value} there, {here[name]} here" for name, value in there.items() if value != here[name])


def _values(config: RunConfig) -> dict[str, Any]:
    """Return the value of each flag, as `save_config` writes it. Values that were derived from user input are replaced
    with the original input."""
    given = dict(config.given)
    given.pop("global_batch_size", None)
    return {flag.name: given.get(flag.field, value_of(config, flag)) for flag in all_flags() if _counts(flag)}


def _counts(flag: Flag) -> bool:
    if flag.section in EXTENSION_SECTIONS:
        group = EXTENSION_SECTIONS[flag.section].cls.__module__.removeprefix("megatron.extensions.").partition(".")[0]
        return group not in FREE_GROUPS and flag.field not in FREE
    free = flag.section in FREE_SECTIONS and flag.field not in PRECISION
    return not free and flag.field not in FREE and not flag.spec.without_effect
