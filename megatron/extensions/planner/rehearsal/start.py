"""Where a run would start, as far as this machine sees its --load: at iteration 0, or from which checkpoint."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing.latest_checkpoint import candidates
from megatron.core.dist_checkpointing.path_kind import kind_of
from megatron.core.dist_checkpointing.storage import open_checkpoint
from megatron.core.parallel_state import Axis
from megatron.core.parts import MODEL_LOADERS
from megatron.training.checkpointing import check_fits, check_may_start, converted
from megatron.training.config.run_config import RunConfig
from megatron.training.plan import plan_of


def start_of_run(config: RunConfig) -> tuple[list[str], list[str]]:
    """(where a run would start, problems for which it would not). The metadata of checkpoints are read, and no tensors:
    a damaged file is not found."""
    options = config.checkpoint
    if options.load is None:
        return ["a run would start at iteration 0, without --load"], []
    load = Path(options.load)
    if kind_of(load) in MODEL_LOADERS:
        return [f"a run would start at iteration 0 with the weights of {load}, which were not read"], []
    try:
        return _start(config, load)
    except (ValueError, OSError) as error:
        return [], [f"start: {error}"]


def _start(config: RunConfig, load: Path) -> tuple[list[str], list[str]]:
    options, found = config.checkpoint, candidates(load)
    lines = list(found.remarks)
    for folder in found.folders:
        try:
            checkpoint = open_checkpoint(folder, Axis())
        except (ValueError, OSError) as error:
            lines.append(f"skipped checkpoint {folder}: {error}")
            continue
        consumed = int(checkpoint.payload.get("consumed_samples") or 0)
        plan = plan_of(config)
        there = config if len(plan.phases) < 2 else plan.trained(consumed).config
        check_fits(checkpoint, there, options.load_optim and not (options.finetune or converted(checkpoint)), None)
        anew = options.finetune or options.reset_iteration or converted(checkpoint)
        iteration = 0 if anew else checkpoint.payload.get("iteration", 0)
        return [*lines, f"a run would start at iteration {iteration} from {folder}, whose tensors were not read"], []
    if lines:
        raise ValueError(f"{load} holds no checkpoint that can be loaded: {'. '.join(lines)}")
    check_may_start(options)
    missing = "there is no such folder" if not load.exists() else "it holds no checkpoint"
    return [f"a run would start at iteration 0: --load {load}: {missing} on this machine"], []
