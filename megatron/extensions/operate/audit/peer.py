"""Audits by other ranks (--audit-by peer). Before an audited step, each rank computes the micro-batches of another
rank, which holds the same weights in another data-parallel replica. Each rank then runs the step with its own
micro-batches, and compares this computation with the computation of the same micro-batches by its peer.

The peer of a rank is the rank that also computes the micro-batches of this rank. Random numbers depend only on samples
and positions, so both ranks compute the same values. In deterministic mode, the values are bitwise equal. If the
recordings of a rank and its peer differ, all ranks compute the step once more. The third result shows which of the two
ranks computed wrong values. The optimizer then uses the gradients of the third computation.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.collectives import all_reduce_, gather_objects, start_all_to_all
from megatron.core.datasets.samplers import DataIterator
from megatron.core.distributed.finalize_model_grads import reduce_model_grads
from megatron.extensions.operate.audit.flags import AuditFlags, shift
from megatron.extensions.operate.audit.outcome import Outcome
from megatron.extensions.operate.audit.sketch import COLUMNS, distance, hash_of, norm_of, sketch_of
from megatron.extensions.operate.audit.tape import Entry, Tape
from megatron.extensions.operate.audit.verdict import BUCKET, GRADIENT, SENT, WEIGHT, Difference, Report, decide
from megatron.training.data import put_on_device
from megatron.training.forward_backward import Sums
from megatron.training.hooks import Callback, Log, Meter, Task
from megatron.training.progress import Interval, Step
from megatron.training.run import TrainingRun
from megatron.training.train_step import TrainStep

ALLOWED = {"torch.float64": 1e-10, "torch.float32": 1e-4, "torch.bfloat16": 4e-2, "torch.float16": 1e-2}
"""Largest relative difference that counts as rounding error when the same tensor is computed twice, keyed by dtype.
Deterministic runs allow no difference."""

ALLOWED_SUMS = {"torch.float64": 1e-12, "torch.float32": 1e-5, "torch.bfloat16": 2e-2, "torch.float16": 5e-3}
"""Largest relative difference that counts as rounding error when the same gradients are reduced over ranks twice, keyed
by the dtype of the reduction."""


FLOOR = 1e-3
"""Relative differences between gradients are computed with a divisor of at least this fraction of the largest gradient
norm. Without a minimum, gradients that consist only of rounding errors would have large relative differences."""


class Recording:
    """Recording of one computation of a step on this rank. A recording contains sketches of the forward and backward
    passes, and of the reduced gradients."""

    sums: Sums

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.reduced: dict[str, Tensor] = {}

    def close(self, run: TrainingRun) -> None:
        """Compute sketches of the reduced gradients. Call this method after the gradients are reduced."""
        for bucket in run.ddp.buckets:
            for piece in bucket.owned_pieces:
                self.reduced[piece.meta.name] = sketch_of(bucket.owned_grad(piece))
        self.entries, self.rows = self.tape.rows()
        grads = [place for place, entry in enumerate(self.entries) if entry.kind == GRADIENT]
        norms = [norm_of(row[1:]) for row in self.rows[grads].tolist()]
        self.floor = FLOOR * max((norm for norm in norms if isfinite(norm)), default=0.0)


class PeerAudit(Callback, Meter):
    """Callback that compares audited steps with their computation by another rank (--audit-by peer)."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        self.run = run
        options, state = self.config.options(AuditFlags), run.runtime.state
        self.interval = options.audit_interval
        moved = shift(self.config, run.runtime.launch.world_size)
        assert moved is not None, "the rules of --audit-by require another data-parallel replica"
        dp = state.dp
        self.source, self.peer = (dp.rank - moved) % dp.size, (dp.rank + moved) % dp.size
        """Data-parallel ranks: for comparison, this rank also computes the micro-batches of `source`, and `peer` also
        computes the micro-batches of this rank."""

        self.exact = self.config.training.deterministic
        self.outcome = Outcome(self.config, run.runtime.launch.rank)
        self._weights: dict[str, Tensor] = {}
        self._noted_at: int | None = None
        """Iteration that the run had completed when the hashes in `_weights` were computed."""

        self._before: Recording | None = None
        self._now: Recording | None = None
        self._open = ExitStack()
        self._step: Step | None = None
        return (self,)

    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        ahead = lambda: self._is_next(1)  # noqa: E731
        return (
            Task("weights for the audit", None, self._note_weights, also=ahead, counts=True),
            Task("audit", None, self._begin, also=ahead, counts=True, before_step=True),
        )

    def _is_next(self, ahead: int) -> bool:
        iteration = self.run.progress.iteration + ahead
        skipped = iteration in (self.config.checks.iterations_to_skip or ())
        return iteration % self.interval == 0 and iteration <= self.run.train_iters and not skipped

    def _note_weights(self) -> None:
        """Store hashes of the weights. This method is called after a step if the next step is an audited step."""
        self._settle()
        self._weights, self._noted_at = self._hashes_of_weights(shards=True), self.run.progress.iteration

    def _settle(self) -> None:
        self.run.guard.settle()
        self.run.optimizer.finish_param_sync()

    def _hashes_of_weights(self, shards: bool = False) -> dict[str, Tensor]:
        """Return a hash for each parameter that is not sharded over data-parallel ranks. If `shards` is True, also
        return a hash for each shard of this rank. Hashes of shards cannot be compared with the hashes of the peer,
        because the peer holds different shards."""
        parts = list(self.run.ddp.sharded_params())
        sharded = {piece.meta.name for piece in parts}
        found = {piece.meta.name: hash_of(piece.data) for piece in parts if shards}
        for model in self.run.stages.values():
            for name, (param, _) in model.named_metas().items():
                if name not in sharded:
                    found[name] = hash_of(param)
        return found

    def _begin(self) -> None:
        """Compute and record the next step with the micro-batches of the data-parallel rank `source`. Then start a
        second recording, for the step that this rank will run with its own micro-batches."""
        run = self.run
        self._settle()
        step = run.progress.next_step(run.batch_sizes)
        run.runtime.watchdog.doing(f"step {step.iteration}, audit")
        # this is the first step of the process, or the first step after a rollback
        if self._noted_at != run.progress.iteration:
            self._weights = self._hashes_of_weights(shards=True)
        self._before = self._computed(step, self._batches_of(step, self.source))
        run.forward_backward.discard_step()
        self._now = Recording(self._tape())
        self._open.enter_context(self._now.tape.of_passes(run, self._microbatches(step)))
        self._step = step
        run.runtime.watchdog.doing(f"step {step.iteration}")

    def _microbatches(self, step: Step) -> int:
        """Return the number of micro-batches that each rank processes in a step."""
        return step.samples // self.run.data.train.row

    def _tape(self) -> Tape:
        """Return a new tape whose first entries are hashes of the weights."""
        tape, none = Tape(), torch.zeros(COLUMNS - 1, dtype=torch.int64, device=self.run.runtime.device)
        for name, found in self._hashes_of_weights().items():
            tape.entries.append(Entry(WEIGHT, name))
            tape.sketches.append(torch.cat([found[None], none]))
        return tape

    def _batches_of(self, step: Step, dp_rank: int) -> list[Batch]:
        """Read the micro-batches of a data-parallel rank from the dataset."""
        train, size = self.run.data.train, self.run.runtime.state.dp.size
        reader = DataIterator(
            train.dataset, micro_batch_size=train.micro_batch_size, dp_rank=dp_rank, dp_size=size, name="audit"
        )
        reader.deal, reader.with_sources = train.deal, train.with_sources
        taken = reader.next_step(step.first_sample, step.samples)
        return put_on_device(taken, self.run.data.model, self.run.runtime)

    def _computed(self, step: Step, batches: list[Batch]) -> Recording:
        """Compute a step in which this rank processes the micro-batches `batches`. Return a recording of the forward
        and backward passes and of the reduced gradients. Collective."""
        run, recording = self.run, Recording(self._tape())
        with recording.tape.of_passes(run, len(batches)):
            given = run.forward_backward.prepared(step, batches, run.optimizer.loss_scale)
            for meter in run.meters:
                if meter is not self:
                    meter.begin_step(step)
            sums = run.forward_backward.gradients(given)
            reduce_model_grads(run.ddp, sums.total_tokens, run.runtime.state, sums.seed)
        recording.close(run)
        recording.sums = sums
        return recording

    def gradients_ready(self, factor: Tensor) -> None:
        """Before the optimizer step, compare this rank's recording of the step with the recording that its peer made of
        the same micro-batches."""
        if self._step is None or self._now is None or self._before is None:
            return
        run, step = self.run, self._step
        world = run.runtime.state.world
        self._open.close()
        self._now.close(run)
        lacking = self._weights_changed()
        theirs = self._exchanged(self._before)
        first = self._first(self._now, theirs)
        reduced = self._reduced_differences()
        found = torch.tensor([first is not None or bool(reduced) or bool(lacking)], device=run.runtime.device).long()
        differs = all_reduce_(found, world, dist.ReduceOp.MAX).item() > 0
        finding = None
        if differs:
            report = self._report(step, theirs, first, reduced, lacking)
            finding = decide(gather_objects(report, world))
        self._step = self._now = self._before = None
        self._weights, self._noted_at = {}, None
        self.outcome.add(run, step.iteration, finding)

    def _weights_changed(self) -> tuple[str, ...]:
        """Return the names of the weights whose hashes have changed although the optimizer has not updated the
        weights."""
        now = self._hashes_of_weights(shards=True)
        names = [name for name in self._weights if name in now]
        if not names:
            return ()
        both = torch.stack([torch.stack([side[name] for name in names]) for side in (self._weights, now)])
        return tuple(name for name, same in zip(names, (both[0] == both[1]).tolist(), strict=True) if not same)

    def _exchanged(self, recording: Recording) -> Tensor:
        """Send the recording of another rank's micro-batches to that rank, and receive the peer's recording of this
        rank's micro-batches. Return the received recording as an int64 tensor [n, 1 + COLUMNS]. This method is a
        collective over the data-parallel ranks."""
        dp, device = self.run.runtime.state.dp, self.run.runtime.device
        rows = recording.rows.to(device)
        outgoing, incoming = [0] * dp.size, [0] * dp.size
        outgoing[self.source] = incoming[self.peer] = 1
        count = torch.tensor([len(rows)], device=device)
        expected = int(start_all_to_all(count, outgoing, incoming, dp).wait())
        outgoing[self.source], incoming[self.peer] = len(rows), expected
        return start_all_to_all(rows, outgoing, incoming, dp).wait().cpu()

    def _first(self, recording: Recording, rows: Tensor) -> int | None:
        """Compare the recording of this rank with `rows`, the recording of its peer. Return the index of the first
        recorded tensor that differs; None if all tensors agree."""
        own = recording.rows
        length = min(len(own), len(rows))
        unequal = (own[:length, :2] != rows[:length, :2]).any(dim=1).nonzero().view(-1).tolist()
        for place in unequal:
            if self._differs(recording.entries[place], own[place].tolist(), rows[place].tolist()):
                return int(place)
        return length - 1 if len(own) != len(rows) else None

    def _differs(self, entry: Entry, one: list[int], other: list[int]) -> bool:
        if one[0] != other[0] or self.exact or entry.kind == WEIGHT:
            return one[:2] != other[:2]
        assert self._now is not None
        floor = self._now.floor if entry.kind in (GRADIENT, BUCKET) else 0.0
        return distance(one[1:], other[1:], floor) > self._allowed(ALLOWED)

    def _allowed(self, table: dict[str, float]) -> float:
        return table[f"torch.{self.config.parallel.params_dtype}"]

    def _reduced_differences(self) -> tuple[tuple[str, float], ...]:
        """Return pairs (parameter name, relative difference) for the reduced gradients of this rank that differ between
        the first and the repeated computation of the step."""
        assert self._now is not None and self._before is not None
        now, before = self._now.reduced, self._before.reduced
        if not now:
            return ()
        rows = zip(torch.stack(list(now.values())).tolist(), torch.stack(list(before.values())).tolist(), strict=True)
        reduce_dtype = str(self.run.ddp.buckets[0].reduce_dtype) if self.run.ddp.buckets else "torch.float32"
        two = self.run.runtime.state.axis("dp_cp").size == 2
        allowed = 0.0 if self.exact and two else ALLOWED_SUMS[reduce_dtype]
        if not self.exact:
            allowed = max(allowed, self._allowed(ALLOWED))
        pairs = list(rows)
        floor = FLOOR * max(norm_of(one) for one, _ in pairs)
        gaps = [(name, distance(one, other, floor)) for name, (one, other) in zip(now, pairs, strict=True)]
        return tuple((name, gap) for name, gap in gaps if gap > allowed)

    def _report(
        self,
        step: Step,
        theirs: Tensor,
        first: int | None,
        reduced: tuple[tuple[str, float], ...],
        changed: tuple[str, ...],
    ) -> Report:
        """Compute the micro-batches of this rank for the third time, and return the report of this rank on the
        differences. Collective."""
        run, now = self.run, self._now
        assert now is not None
        own_rank, dp = run.runtime.launch.rank, run.runtime.state.dp
        run.forward_backward.discard_step()
        again = self._computed(step, self._batches_of(step, dp.rank))
        if isinstance(run.step, TrainStep):
            run.step.sums.loss_and_tokens.copy_(again.sums.loss_and_tokens)
        difference = None
        sent: list[str] = []
        if first is not None:
            rows, entry = [each[first].tolist() for each in (now.rows, theirs)], now.entries[first]
            third = again.rows[first].tolist() if first < len(again.rows) else None
            same = [third is not None and not self._differs(entry, third, row) for row in rows]
            gap = distance(rows[0][1:], rows[1][1:])
            difference = Difference(entry.kind, entry.label, gap, entry.key, *same)
            for place, each in enumerate(now.entries[: len(theirs)]):
                if each.kind == SENT and self._differs(each, now.rows[place].tolist(), theirs[place].tolist()):
                    sent.append(each.key)
        peer = dp.ranks[self.peer]
        return Report(own_rank, socket.gethostname(), peer, difference, frozenset(sent), changed, reduced)

    def reads_result(self, iteration: int) -> bool:
        return iteration % self.interval == 0

    def report(self, summed: Tensor, interval: Interval) -> dict[str, object]:
        return self.outcome.values()

    def take(self) -> Tensor:
        return torch.zeros(0, dtype=torch.float64, device=self.run.runtime.device)
