"""Reactions of a run to audit results: events, log lines, fields of metric records, and the end of the run if a rank
computes wrong values twice."""

from __future__ import annotations

import time
from collections import Counter

from megatron.extensions.operate.audit.verdict import Finding
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.run_status import record_event
from megatron.training.run import TrainingRun

TWICE = 2
"""Number of audits with wrong values after which a rank is treated as failed."""


class AuditError(RuntimeError):
    """Raised if a rank has computed wrong values in two audits, or if its weights are damaged."""


class Outcome:
    """Results of the audits since this process started. The results are the same on all ranks."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        self._save, self._rank = config.checkpoint.save, rank
        self._counts: Counter[int] = Counter()
        self._audits = self._disagreements = 0

    def add(self, run: TrainingRun, iteration: int, finding: Finding | None) -> None:
        """Count an audit, and report its finding if the two computations of the step differ. Call this method before
        the optimizer step, so that a wrong gradient is not applied."""
        self._audits += 1
        if finding is None:
            return
        self._disagreements += 1
        self._counts.update(finding.ranks)
        run.say(f" {finding.line(iteration)}")
        if run.runtime.is_main:
            record_event(
                self._save,
                "audit",
                iteration=iteration,
                ranks=list(finding.ranks),
                hosts=list(finding.hosts),
                first=f"{finding.kind} {finding.tensor}",
                relative_difference=finding.relative,
                cause=finding.cause,
                disagreements=max(self._counts[rank] for rank in finding.ranks),
            )
        self._end_if_due(iteration, finding)

    def _end_if_due(self, iteration: int, finding: Finding) -> None:
        """Raise AuditError if two audits have found the same rank at fault, or if this audit has found wrong weights.
        Every rank raises the error, but the faulty rank raises it first."""
        due = [rank for rank in finding.ranks if self._counts[rank] >= TWICE]
        if not due and not finding.damages_state:
            return
        if self._rank not in finding.ranks:
            time.sleep(1.0)  # wait, so that the faulty rank reports the error first
        why = f"it has disagreed {TWICE} times" if due else "its state is damaged"
        raise AuditError(f"{finding.line(iteration)}; {why}; replace its device or exclude its host, then resume")

    def values(self) -> dict[str, object]:
        """Return the audit fields for metric records."""
        return {"audits": self._audits, "audit_disagreements": self._disagreements}
