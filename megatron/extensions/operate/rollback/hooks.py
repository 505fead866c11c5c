"""Callback that keeps earlier training states (--rollback-on-spike). After a loss spike, the run returns to one of
these states and skips batches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import PurePath
from typing import Any

from torch import Tensor

from megatron.core.dist_checkpointing.path_kind import saved_folders
from megatron.core.dist_checkpointing.storage import Checkpoint, on_first_rank
from megatron.extensions.operate.peer_copies.hooks import PeerCopies
from megatron.extensions.operate.rollback.decision import Decision, decide
from megatron.extensions.operate.rollback.flags import RollbackFlags, interval_of, uses_peer_copies
from megatron.extensions.operate.rollback.held_states import HeldCheckpoint, HeldStates, tensors_of_world
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import saved_metadata
from megatron.training.hooks import Callback, Log, RunView, Task, Verdict
from megatron.training.progress import Interval, Progress, StepsTakenBackError
from megatron.training.reliability.run_status import record_event
from megatron.training.run import TrainingRun
from megatron.training.step_guard import ADVICE_SPIKE, BadStepError

NAME = "rollback"
"""Name of this callback's state in checkpoints."""


@dataclass(frozen=True)
class Mark:
    """The part of the state after a step that is not in checkpoints: the progress of the current log interval, and the
    counts of meters."""

    interval: Interval
    elapsed: float
    counts: tuple[Tensor, ...]

    @classmethod
    def of(cls, run: TrainingRun) -> Mark:
        """Capture the state after the last step."""
        interval = run.interval
        kept = replace(interval, losses=list(interval.losses), results=list(interval.results), excluded=0.0)
        counts = tuple(tensor.clone() for meter in run.meters for tensor in meter.step_state())
        return cls(kept, interval.seconds(), counts)

    def restore(self, run: TrainingRun) -> None:
        """Restore the log interval and the meters to the captured state."""
        kept = self.interval
        begun = time.perf_counter() - self.elapsed
        run.interval = replace(kept, start=begun, losses=list(kept.losses), results=list(kept.results))
        now = [tensor for meter in run.meters for tensor in meter.step_state()]
        for tensor, before in zip(now, self.counts, strict=True):
            tensor.copy_(before)


class Rollback(Callback):
    """Callback that rolls a run back after a loss spike. This callback must process the verdict on each step before any
    other callback."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._options, self._interval = config.options(RollbackFlags), interval_of(config)
        self._by_peers = uses_peer_copies(config)
        self.passed_over: list[tuple[int, int]] = []
        """Pairs (first iteration, last iteration), one for each range of skipped batches."""

        self.rollbacks = 0
        self.last_to = 0
        """Iteration that the run returned to at the last rollback; 0 if there was no rollback."""

        self._states = HeldStates()
        self._marks: dict[int, Mark] = {}
        self._run: TrainingRun | None = None
        self._log: Log | None = None

    def state(self) -> dict[str, object]:
        own = {"rollbacks": self.rollbacks, "last_to": self.last_to}
        return own | {"passed_over": [list(each) for each in self.passed_over]}

    def load_state(self, state: object) -> None:
        found: dict[str, Any] = state if isinstance(state, dict) else {}
        self.passed_over = [(int(first), int(last)) for first, last in found.get("passed_over", ())]
        self.rollbacks, self.last_to = int(found.get("rollbacks", 0)), int(found.get("last_to", 0))

    def on_start(self, run: RunView) -> None:
        assert isinstance(run, TrainingRun)
        self._run = run
        self._pass_over(run)

    def _pass_over(self, run: TrainingRun) -> None:
        for first, last in self.passed_over:
            run.passed_over.update(range(first, last + 1))

    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        """Copy the state at the start of the run, and return the task that copies later states. Collective."""
        self._run, self._log = run, log
        if not self._by_peers:
            tensors, _ = run.saver.checkpoint.contents(run.progress)
            self._tensors = tensors_of_world(tensors, run.runtime.state.world)
        self._hold()
        return (Task("state to go back to", self._interval, self._hold, counts=True),)

    def _hold(self) -> None:
        run = self._run
        assert run is not None
        if not self._by_peers:
            run.guard.settle()
            run.guard.store_means()
            contents = run.saver.checkpoint.contents(run.progress)
            self._states.next().take(run.progress.iteration, *contents)
        self._marks[run.progress.iteration] = Mark.of(run)
        for old in sorted(self._marks)[:-2]:
            del self._marks[old]

    def on_step_end(self, run: RunView) -> None:
        assert isinstance(run, TrainingRun)
        run.guard.settle()

    def on_verdict(self, verdict: Verdict) -> None:
        """Roll the run back if the step was a spike. The rollback is a collective over all ranks."""
        run, options = self._run, self._options
        if not verdict.result.spike or run is None:
            return
        if self.rollbacks >= options.max_rollbacks:
            message = f"{verdict}, after {self.rollbacks} rollbacks, the maximum set by --max-rollbacks"
            raise BadStepError(message, ADVICE_SPIKE)
        spike = verdict.step.iteration
        found = decide(spike, options.rollback_steps, options.rollback_batches, self._interval, self.last_to)
        run.saver.wait()
        for checkpoint in self._sources(run, found):
            raise StepsTakenBackError(partial(self._go_back, verdict, found, checkpoint))
        run.say(f" {verdict}: there is no earlier state to go back to")

    def _sources(self, run: TrainingRun, found: Decision) -> Iterable[Checkpoint | PurePath]:
        """Yield the states that the run can return to, in order of preference. First, yield the state that `found`
        selects, if this state is in memory. Then yield the checkpoints on disk up to this state, from which the run can
        recompute the state. Finally, yield the states in memory that precede the spike. Collective."""
        if (checkpoint := self._in_memory(run, found.to)) is not None:
            yield checkpoint
        yield from self._on_disk(run, found.to)
        for held in self._states.held:
            if held.iteration < found.spike:
                yield HeldCheckpoint(held, self._tensors)

    def _in_memory(self, run: TrainingRun, iteration: int) -> Checkpoint | None:
        if self._by_peers:
            copies = next(each for each in run.callbacks if isinstance(each, PeerCopies))
            return copies.checkpoint_of(iteration)
        held = self._states.at(iteration)
        return None if held is None else HeldCheckpoint(held, self._tensors)

    def _on_disk(self, run: TrainingRun, iteration: int) -> list[PurePath]:
        """Return the checkpoints up to an iteration, newest first. Checkpoints of steps that were rolled back are
        omitted."""
        root = self.config.checkpoint.save_root

        def folders() -> list[PurePath]:
            found = {} if root is None else saved_folders(root)
            numbers = sorted((number for number in found if number <= iteration), reverse=True)
            return [found[number] for number in numbers if self._is_of_run(found[number], number)]

        return on_first_rank(folders, run.runtime.state.world)

    def _is_of_run(self, folder: PurePath, iteration: int) -> bool:
        """Return True if the training up to a checkpoint skipped the same batches as this run."""
        try:
            saved = saved_metadata(folder) or {}
            before = Rollback(self.config)
            before.load_state(saved.get("callbacks", {}).get(NAME))
        except ValueError:
            return False
        return before.passed_until(iteration) == self.passed_until(iteration)

    def passed_until(self, iteration: int) -> set[int]:
        """Return all iterations up to `iteration` whose batches are skipped."""
        passed = (number for first, last in self.passed_over for number in range(first, last + 1))
        return {number for number in passed if number <= iteration}

    def _go_back(self, verdict: Verdict, found: Decision, source: Checkpoint | PurePath) -> None:
        """Return to the state in `source`. When the run later reaches the batches that `found` selects, it skips these
        batches. Collective."""
        run, began = self._run, time.perf_counter()
        assert run is not None
        kept = [*self.passed_over, (found.first, found.last)]
        run.runtime.watchdog.doing(f"going back from iteration {found.spike}")
        count, checkpoint = self.rollbacks + 1, run.saver.checkpoint
        if isinstance(source, Checkpoint):
            where = "copies in memory of hosts" if self._by_peers else "memory"
            position = checkpoint.resume_with(source, _silent, run.data.fingerprint_at, where)
        else:
            where = str(source)
            position = checkpoint.resume_from(where, _silent, run.data.fingerprint_at, "")
        self._set_position(run, position)
        self.passed_over, self.rollbacks = kept, count
        self.last_to = max(self.last_to, found.to)
        self._pass_over(run)
        self._tell(run, verdict, found, where, time.perf_counter() - began)

    def _set_position(self, run: TrainingRun, position: Progress) -> None:
        """Set the progress of the run back to `position`, and discard all records of later steps."""
        loaded_from = run.progress.loaded_from
        for each in fields(Progress):
            setattr(run.progress, each.name, getattr(position, each.name))
        run.progress.loaded_from = loaded_from
        if (judge := run.guard.judge) is not None:
            means = position.running_means or (0.0,) * judge.state.numel()
            judge.state = judge.state.new_tensor(means)
        iteration = position.iteration
        self._states.drop_after(iteration)
        self._marks = {number: mark for number, mark in self._marks.items() if number <= iteration}
        if iteration in self._marks:
            self._marks[iteration].restore(run)
        else:
            run.interval = Interval()
        run.measured.clear()
        run.saver.last = None
        if self._log is not None:
            self._log.go_back(iteration)

    def _tell(self, run: TrainingRun, verdict: Verdict, found: Decision, where: str, seconds: float) -> None:
        at = run.progress.iteration
        first, last = found.first, found.last
        which = f"iteration {first}" if first == last else f"iterations {first} to {last}"
        run.say(f" {verdict}: going back to iteration {at} from {where}; the samples of {which} are passed over")
        if run.runtime.is_main:
            total, tokens = verdict.result.sums
            values = {"lm_loss": total / max(tokens, 1.0), "grad_norm": verdict.result.grad_norm}
            facts = {"iteration": found.spike, **values, "to": at, "passed_over": [first, last], "source": where}
            record_event(self.config.checkpoint.save, "rollback", **facts, seconds=round(seconds, 3))


def _silent(line: str) -> None:
    """Discard a log line about loading a checkpoint, because the log line about the rollback contains the same
    information."""
