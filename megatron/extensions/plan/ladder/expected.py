"""Compare a run's validation losses with the predicted curve (--expect)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.extensions.plan.ladder.expectation import read_expectation
from megatron.extensions.plan.ladder.flags import ExpectFlags
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Log, RunView, Task
from megatron.training.metrics.sinks import Record
from megatron.training.reliability.run_status import record_event


class ExpectedLoss(Callback):
    """Callback that logs how far each validation loss is from the prediction, and warns if a loss leaves the band."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        path = config.options(ExpectFlags).expect
        assert path is not None
        self.expected = read_expectation(path)
        self.outside = False
        self._run: Any = None
        self._log: Log | None = None

    def tasks(self, run: Any, log: Log) -> Sequence[Task]:
        self._run, self._log = run, log
        return ()

    def on_evaluation(self, run: RunView, split: str, record: Record) -> None:
        tokens = self._run.plan.tokens(run.progress.consumed_samples)
        expected, loss = self.expected.at(tokens), record.get("valid_loss")
        if split != "valid" or expected is None or not isinstance(loss, float):
            return
        distance, iteration = loss / expected.loss - 1, run.progress.iteration
        outside = not expected.low <= loss <= expected.high
        found = {"expected_loss": expected.loss, "expected_low": expected.low, "expected_high": expected.high}
        assert self._log is not None
        self._log.write({"iteration": iteration, **found, "distance_from_expected": distance})
        band = f"{expected.low:.4f} to {expected.high:.4f}"
        run.say(f" expected loss: {expected.loss:.4f} ({band}); this one is {distance:+.2%}")
        if outside and not self.outside:
            where = "above" if loss > expected.high else "below"
            run.say(f" WARNING: the validation loss {loss:.4f} of iteration {iteration} is {where} the band {band}")
            if self._run.runtime.is_main:
                save = self.config.checkpoint.save
                record_event(save, "unexpected loss", iteration=iteration, valid_loss=loss, **found)
        self.outside = outside

    def state(self) -> bool:
        return self.outside

    def load_state(self, state: object) -> None:
        self.outside = state is True
