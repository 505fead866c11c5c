"""Audit flags. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.parallel_dims import ParallelDims
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from megatron.extensions.operate.audit.verdict import shift_of_replicas
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags
from megatron.training.step_parts import late_update, runs_passes_in_turns

MEANS = ("peer", "layout", "precision")
GRAPHS = "--cuda-graph-impl local: a graph replays only its kernels, so its intermediate values cannot be recorded"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(AuditFlags)
    if not audits(config):
        return
    if not PIPELINE_SCHEDULES.facts(config.parallel.schedule).flushes:
        rule = "computes a step again with the weights that the step used, which --pipeline-schedule 2bw does not keep"
        yield Problem("--audit-interval", own.audit_interval, rule, "use another schedule, or --audit-interval 0")
    if (late := late_update(config)) is not None:
        rule = f"requires that each update precedes the next step, but {late} delays updates"
        yield Problem("--audit-interval", own.audit_interval, rule, "remove one of the two")
    if runs_passes_in_turns(config):
        rule = "compares passes in order, but --overlap-moe-expert-parallel-comm interleaves two passes"
        yield Problem("--audit-interval", own.audit_interval, rule, "remove one of the two")
    if own.audit_by == "peer" and shift(config, world_size) is None:
        rule = "needs two data-parallel replicas that each hold all experts, so that another rank has the same weights"
        yield Problem("--audit-by", own.audit_by, f"{rule}; {world_size} ranks have one", "use --audit-by layout")
    if own.audit_by != "peer":
        yield from _of_process(config)


def _of_process(config: RunConfig) -> Iterator[Problem]:
    """Check the requirements of the background audit process."""
    means = config.options(AuditFlags).audit_by
    if config.checkpoint.save_folder is None:
        rule = "passes steps to a background process through the --save folder"
        yield Problem("--audit-by", means, rule, "give --save FOLDER, or use --audit-by peer")
    if config.model.num_experts:
        rule = "tolerates rounding differences, which may route tokens to other experts"
        yield Problem("--audit-by", means, rule, "use --audit-by peer")


@extension_flags("audit", may_change=True, rules=rules)
@dataclass(frozen=True)
class AuditFlags:
    audit_interval: int = flag(0, at_least=0, excludes=(GRAPHS,))
    """Compute every K-th step a second time by independent means, and compare losses and gradients. A rank that
    computes wrong values in two audits is reported and treated as failed. Set to 0 to disable audits."""

    audit_by: str = flag("peer", choices=MEANS, no_effect_without="--audit-interval above 0")
    """How the step is computed a second time. With peer, each rank also computes the micro-batches of a rank in
    another data-parallel replica. With peer and --deterministic-mode, both results are bitwise equal. With layout, a
    background process on the first rank's host computes the whole step on the CPU while training continues. With
    precision, the background process uses a wider number format than the run."""

    def plan_section(self, config: RunConfig) -> tuple[str, str] | None:
        """Return the title of the plan section about audits, and the entry point of the function that yields the lines
        of this section. Return None if the run has no audits."""
        return ("Audits", f"{__package__}.plan_lines:lines") if audits(config) else None


def audits(config: RunConfig) -> bool:
    """Return True if some steps of a run are computed a second time."""
    return config.options(AuditFlags).audit_interval > 0 and not config.training.skip_train


def shift(config: RunConfig, world_size: int) -> int | None:
    """Return the distance, in data-parallel ranks, between a rank and the rank that computes the same micro-batches for
    --audit-by peer. Return None if there is only one replica."""
    try:
        dims = ParallelDims.from_config(config.parallel, world_size)
    except ValueError:
        return 1  # another rule reports the invalid parallel sizes
    return shift_of_replicas(dims.groups("dp"), dims.groups("ep", "expt_tp"))


def by_peers(config: RunConfig) -> bool:
    """Return True if other ranks recompute audited steps (--audit-by peer)."""
    return audits(config) and config.options(AuditFlags).audit_by == "peer"


def by_process(config: RunConfig) -> bool:
    """Return True if a background process recomputes audited steps."""
    return audits(config) and not by_peers(config)


CALLBACKS.register("audit by peers", f"{__package__}.peer:PeerAudit", when=by_peers)
CALLBACKS.register("audit by a process", f"{__package__}.background:BackgroundAudit", when=by_process)
