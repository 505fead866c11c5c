"""Hooks for extensions in a run: callbacks, meters, periodic tasks and metrics. This module does not import torch.

A `Callback` is an extension's object in a run. The run calls the callback's methods on events. A callback may add
periodic tasks, checkpoint state, and meters, which count during passes and report at log lines. Built-in extensions use
callbacks too. A program that calls `pretrain` passes its own callbacks and metrics as `Parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

from megatron.core.config.model import TransformerConfig
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, Stored
from megatron.training.metrics.sinks import Record
from megatron.training.progress import BegunRun, Progress, Step
from megatron.training.reliability.launch import Launch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron.core.batch import Batch
    from megatron.core.config.parallel import ModelParallelConfig
    from megatron.core.datasets.dataset import Dataset
    from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, StepResult
    from megatron.training.initialize import Runtime
    from megatron.training.progress import Interval
    from megatron.training.reliability.rank_status import HangAnalysis, RankStatus
    from megatron.training.reliability.watchdog import Watch, Watchdog


@dataclass(kw_only=True)
class RunView:
    """Interface of a run for callbacks and metrics. The object is a `megatron.training.run.TrainingRun`, which contains
    all components of the run."""

    config: RunConfig
    stages: Mapping[int, GPTModel]
    """This rank's pipeline stages."""
    optimizer: DistributedOptimizer
    progress: Progress
    """Position of the run: completed iterations, consumed samples and related counts."""
    say: Callable[[str], None]
    """Function that prints a line on one rank."""
    stop_reason: str | None = None

    def stop(self, why: str) -> None:
        """Request the end of the run. It suffices if one rank requests the end. At the current or next log line or
        evaluation, all ranks then save and stop."""
        self.stop_reason = str(why or "a callback requests it")


@dataclass(frozen=True)
class StepView:
    """Results of a step that has updated the weights, for computing metrics."""

    run: RunView
    batches: Sequence[Batch]
    """This rank's micro-batches, on its device."""
    loss_and_tokens: Tensor
    """Tensor [loss sum, number of valid tokens] in float64 on the device; zeros on ranks without the last stage."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluation in progress."""

    split: str
    """"valid" or "test"."""
    name: str
    """Name of the validation set, or an empty string if the set has no name."""
    dataset: Dataset
    """Data set on which the model is evaluated. `Batch.sample_index` contains indices of samples in this data set."""


@dataclass(frozen=True)
class StepFinding:
    """Result of searching a non-finite step for its cause."""

    text: str
    advice: str = ""
    """Remedy that the error message suggests first if the step ends the run."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of a training step."""

    step: Step
    result: StepResult
    nan: bool
    """True if the loss or gradient was not finite for any reason other than an fp16 loss scale that is too large."""

    refused: bool
    """True if the step failed a check. A step that failed a check is skipped, or ends the run."""

    ends_run: bool
    """True if the run has skipped more iterations than --max-skipped-iterations allows."""

    def __str__(self) -> str:
        total, tokens = self.result.sums
        values = f"loss {total / max(tokens, 1.0):.6g}, gradient norm {self.result.grad_norm:.6g}"
        how = "not finite" if self.nan else "far above the mean of earlier steps"
        return f"iteration {self.step.iteration} is {how} ({values})"


class Judge(Protocol):
    """Detector of steps with an unusual loss or gradient, on the device."""

    state: Tensor
    """State of the judge as a flat float64 tensor, which checkpoints contain."""

    def __call__(self, norm: Tensor, overflow: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return (skip, spike) as float64 scalars on the device: `skip` is 1 if the update must be skipped, and `spike`
        is 1 if the loss or gradient is unusually large. `norm` is the gradient norm. `overflow` is 1 if a value is not
        finite. `sums` is [loss sum, number of tokens] over all ranks."""


class Log(Protocol):
    """Log of a run, written on one rank."""

    def write(self, record: Record) -> None:
        """Write a record to every sink."""

    def say(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""

    def go_back(self, iteration: int) -> None:
        """Discard the records after an iteration, as if the run had resumed at that iteration."""


class Exporter(Protocol):
    """Background job that processes complete checkpoints while training continues. For example, it exports the
    checkpoints. All methods except `poll` and `abandon` run on one rank."""

    doing: str
    """Description of the current work, for reports about hangs."""

    def add(self, iteration: int, checkpoint: PurePath) -> None:
        """Register a complete checkpoint, which is not deleted while `held` of `Callback.exporter` contains it."""

    def poll(self, wait: bool = False) -> list[str]:
        """Continue the current export or, if `wait` is True, complete all exports. Return lines to print."""

    def abandon(self) -> list[str]:
        """Abandon unfinished exports because the process must exit. Return lines to print."""


class Meter:
    """Base class of meters, which count during the passes of steps and report at log lines. The calls for each step are
    `begin_step`, `gradients_ready` after the passes, `end_step` with the weight update (or `discard_step` instead), and
    `after_update`. For each log line, every rank calls `take`, and `report` gets the sum over all ranks."""

    def begin_step(self, step: Step) -> None:
        """Called before the passes of a step, and again before repeated passes."""

    def with_scales(self, batches: list[Batch], scale: Tensor) -> list[Batch]:
        """Return the micro-batches for the passes, with `scale` as the factor for auxiliary losses. An auxiliary loss
        that is a mean over the tokens of the global batch must be multiplied by `scale` before its backward pass."""
        return batches

    def gradients_ready(self, factor: Tensor) -> None:
        """Called after the last backward pass. The reduced gradients are not yet multiplied by `factor`."""

    def end_step(self, skip: Tensor) -> None:
        """Called when the weights are updated. Do not wait for the device, and do not count the step if `skip` is 1."""

    def step_state(self) -> list[Tensor]:
        """Return the tensors that `end_step` changes. If the update is rolled back, these tensors are restored."""
        return []

    def discard_step(self) -> None:
        """Discard the counts of a step for which `end_step` will not be called."""

    def after_update(self, step: StepView, result: StepResult) -> None:
        """Called after the weight update. `result.skip` is 1 if the update was skipped. Only read `result.skip` if
        `reads_result` returns True."""

    def reads_result(self, iteration: int) -> bool:
        """Return True if the meter reads the parameters or this step's result before the next step begins."""
        return False

    def take(self) -> Tensor | None:
        """Return this rank's counts since the last call as a flat float64 tensor, or None. The run sums the counts."""
        return None

    def report(self, summed: Tensor, interval: Interval) -> Mapping[str, object]:
        """Return values to log. On every rank, `summed` is the sum of the results of `take` over all ranks."""
        return {}

    def write(self, log: Log) -> None:
        """Write additional records. Called before the record of the interval is written."""

    def lines(self, record: Record) -> list[str]:
        """Return console lines to print below the record's line."""
        return []

    def evaluating(self, evaluation: Evaluation) -> AbstractContextManager[Tensor | None]:
        """Return a context for an evaluation. The context yields a tensor of this rank's counts, or None. The counts
        are complete when the context exits, and are then summed over all ranks."""
        return nullcontext()

    def report_evaluation(self, summed: Tensor, split: str) -> Mapping[str, object]:
        """Return values to log. `summed` contains the counts of `evaluating`, summed over all ranks."""
        return {}


@dataclass(frozen=True)
class Task:
    """Periodic task of a run."""

    name: str
    interval: int | None
    """Number of iterations between runs of the task. If it is None or 0, the task has no interval."""
    run: Callable[[], object]
    at_end: bool = False
    """True if the task also runs after the last iteration."""
    also: Callable[[], bool] | None = None
    """Function that returns True if the task is due now, independently of the interval."""
    counts: bool = False
    """True if the task's time counts as step time."""
    reads_result: bool = True
    """True if the task reads the step's result or the parameters. The next step must then wait for the task."""
    may_stop: bool = False
    """True if a callback may request the end of the run during the task."""
    evaluates: bool = False
    """True if the task evaluates the model. A run with --skip-train performs the task once."""
    before_step: bool = False
    """True if the task runs before each step, not after it. If `counts` is True, its time counts as step time."""
    ends_interval: bool = False
    """True to write a log line before the task, so that no log line averages over steps before and after the task."""
    at_finish: bool = False
    """True if the task runs once, after all iterations are trained and saved."""

    def at(self, iteration: int, last: bool) -> bool:
        """Return True if the task is due according to its interval."""
        return (last and self.at_end) or bool(self.interval and self.interval > 0 and iteration % self.interval == 0)

    def is_due(self, iteration: int, last: bool) -> bool:
        """Return True if the task is due because of its interval or because its function `also` returns True."""
        return self.at(iteration, last) or (self.also is not None and self.also())


Measure = Callable[[StepView], tuple["Tensor | float", "Tensor | float"]]
"""Metric: a function that returns (sum, count) of this rank for a step that has updated the weights. The metric is the
total sum divided by the total count, over the steps of a log interval and all ranks. Tensors stay on the device, so
that the host does not wait."""


class Callback:
    """Base class of callbacks. Methods are called on every rank with equal records, so that all ranks decide alike."""

    name = ""
    """Name of the callback's state in checkpoints: the registered name if there is one, otherwise the class name."""

    states: Sequence[OptimizerPiece] = ()
    """States declared by `register(..., states=("name",))`, available from `on_start` onwards. Each element `piece` is
    a part of one state: `piece.key` is the name of the state, and `piece.meta` describes the parameter. `piece.data`
    [n] is a flat view of the elements [start, stop) of this rank's shard. To change a state, write to `piece.data` in
    place. `megatron.core.optimizer.owned_tensors.with_main_weights` pairs the states with the weights that the
    optimizer updates."""

    start_order = 0
    """Sort key of this callback. The `start` methods of callbacks are called in increasing order of this key, until one
    of them returns the position at which the run starts."""

    to_continue = ""
    """Advice on how to continue the training. A completed run prints this advice if no flag can extend the run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def __init_subclass__(cls) -> None:
        """Raise ValueError for a misspelt or unknown on_... method, because it would never be called."""
        super().__init_subclass__()
        events = [name for name in dir(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and not any(hasattr(base, name) for base in cls.__mro__[1:]):
                near = get_close_matches(name, events, n=1)
                remedy = f"nearest: {near[0]}" if near else f"events: {', '.join(events)}"
                raise ValueError(f"callback {cls.__name__}: {name} is no event; {remedy}")
            others = [other for other in vars(Callback) if other[0] != "_"]
            if (
                name[0] != "_"
                and not hasattr(Callback, name)
                and (near := get_close_matches(name, others, n=1, cutoff=0.9))
            ):
                raise ValueError(f"callback {cls.__name__}: {name} is never called; nearest: {near[0]}")

    def watches(self, watchdog: Watchdog) -> Sequence[Watch]:
        """Return additional conditions (`Watch`) for this rank's watchdog to check. Called as soon as ranks can notice
        each other's failures, before rendezvous."""
        return ()

    def hang_analysis(self, status: RankStatus) -> HangAnalysis | None:
        """Return an analysis that finds the ranks that block the others. Called before process groups are built. If
        several callbacks return an analysis, the last one is used."""
        return None

    def on_failure(self, error: BaseException, launch: Launch, run: Any | None) -> None:
        """Add notes to `error` with `error.add_note`. Called on a rank that ends with `error`, before all ranks end.
        `run` is None if the run is not built yet. Other ranks wait until this method returns."""

    def on_setup(self, runtime: Runtime) -> None:
        """Read input files. Called after rendezvous, before the model is built. A ValueError ends the run."""

    def choose(self, config: RunConfig, parallel: ModelParallelConfig, runtime: Runtime) -> ModelParallelConfig:
        """Return the settings for building the model: `parallel`, or an equivalent copy, for example with another
        kernel. `config` is the configuration of the longest phase. Collective."""
        return parallel

    def on_model(self, config: RunConfig, stages: Mapping[int, GPTModel], runtime: Runtime) -> None:
        """Called when this rank's stages are built, before gradients and states are allocated. Collective."""

    def start(self, begun: BegunRun, say: Callable[[str], None], data: Callable[[int], str | None]) -> Progress | None:
        """Load initial weights in place of --load, and return the start position. Return None to use --load. `data`
        maps a number of consumed samples to a data fingerprint. A ValueError ends the run. Collective."""
        return None

    def metrics(self) -> Mapping[str, Measure]:
        """Return metrics, keyed by their names in records. The run averages metrics over log intervals."""
        return {}

    def flops_per_token(self, model: TransformerConfig) -> float | None:
        """Return model FLOPs per token, forward and backward, for TFLOP/s and MFU in records, or None if unknown.
        Called on the first rank."""
        return None

    def judge(self, device: torch.device, means: tuple[float, ...]) -> Judge | None:
        """Return a detector of spikes, or None if the callback has no judge. `means` contains the `Judge.state` in the
        checkpoint, and is empty for a new run. If several callbacks return a judge, the first judge is used."""
        return None

    def on_verdict(self, verdict: Verdict) -> None:
        """Called with the outcome of a step, at the latest during the next step and before anything depends on the
        outcome. It may raise `StepsTakenBackError` if `on_step_end` requested the outcome before the next step."""

    def search(self, verdict: Verdict) -> StepFinding | None:
        """Search for the cause of a step whose loss or gradient was not finite. Called on every rank before the next
        weight update. To repeat the step, use the run that `meters` received."""
        return None

    def meters(self, run: Any) -> Sequence[Meter]:
        """Return the callback's meters. Called when `run` is built and has loaded its checkpoint. Collective."""
        return ()

    def tasks(self, run: Any, log: Log) -> Sequence[Task]:
        """Return the periodic tasks that the callback adds to a run."""
        return ()

    def state(self) -> object:
        """Return the state to store in checkpoints, in JSON types and equal on all ranks, or None for no state."""
        return None

    def load_state(self, state: object) -> None:
        """Restore the state that `state` returned when the checkpoint was saved. Called before `meters`."""

    def exporter(self, held: list[PurePath]) -> Exporter | None:
        """Return the exporter that processes complete checkpoints while training continues. Checkpoints in `held` are
        not deleted."""
        return None

    def clean_checkpoints(self, root: PurePath, newest: int, held: Collection[PurePath]) -> None:
        """Delete old checkpoints in `root`, but no checkpoint in `held`. Called on one rank, on the thread that writes
        checkpoints, when the checkpoint of iteration `newest` is complete. May raise OSError."""

    def on_start(self, run: RunView) -> None:
        """Called before the first step, after the checkpoint, if there is one, has been loaded."""

    def on_step_end(self, run: RunView) -> None:
        """Called after each step. The device may still be computing the step."""

    def on_log(self, run: RunView, record: Record) -> None:
        """Called after each log line, with the line's record."""

    def evaluation_weights(self, run: RunView) -> Iterable[OptimizerPiece] | None:
        """Return weights for evaluation, such as averages, or None for the model's own weights. The weights must be a
        state of the callback or the optimizer (`run.optimizer.sharded_state()`). Every rank returns the elements that
        it updates. If several callbacks return weights, the last callback's weights are used. Collective."""
        return None

    def on_evaluation(self, run: RunView, split: str, record: Record) -> None:
        """Called after an evaluation. `split` is "valid", "test" or "tasks". `record` contains `valid_loss`,
        `test_loss`, or task scores as `eval/TASK/METRIC`."""

    def on_checkpoint(self, run: RunView) -> None:
        """Called after a save has started."""

    def on_end(self, run: RunView) -> None:
        """Called after the last step and the last save. An exception is reported, and the other callbacks are still
        called. The run then ends with exit code 3 (`CALLBACK_FAILED`), or with 75 if it is to be resumed."""


@dataclass(frozen=True)
class Parts:
    """Callbacks and metrics that a program adds to a run: `pretrain(config, launch, Parts(callbacks=[...]))`."""

    callbacks: Sequence[Callback] = ()
    metrics: Mapping[str, Measure] = field(default_factory=dict)

    def with_registered(self, config: RunConfig) -> Parts:
        """Return a copy that also contains the registered callbacks and the metrics that all callbacks define."""
        callbacks = (*(registered(name, config) for name in CALLBACKS.wanted(config)), *self.callbacks)
        metrics = {name: measure for callback in callbacks for name, measure in callback.metrics().items()}
        return Parts(callbacks, metrics | dict(self.metrics))


def registered(name: str, config: RunConfig) -> Callback:
    """Build the callback that is registered as `name`."""
    callback = CALLBACKS[name](config)
    assert isinstance(callback, Callback), f"callback {name} must be derived from Callback"
    callback.name = name
    return callback


def states_of(callback: Callback) -> tuple[str, ...]:
    """Return the names of the states declared in the callback's registration."""
    return CALLBACKS.facts(callback.name).states_in(callback.config) if callback.name in CALLBACKS else ()


def storage_of(callback: Callback) -> Stored:
    """Return the number format and the device that are registered for the callback's states."""
    return CALLBACKS.facts(callback.name).stored(callback.config) if callback.name in CALLBACKS else Stored()


def add_watches(callbacks: Sequence[Callback], watchdog: Watchdog) -> None:
    """Add the callbacks' watches and hang analysis to a connected watchdog."""
    for callback in callbacks:
        watchdog.watches += callback.watches(watchdog)
        watchdog.status.analysis = callback.hang_analysis(watchdog.status) or watchdog.status.analysis


def tell_of_failure(
    error: BaseException, callbacks: Sequence[Callback], launch: Launch, run: Any | None = None
) -> None:
    """Call each callback's `on_failure`. An exception from `on_failure` is added to `error` as a note, so that the user
    still sees `error`."""
    for callback in callbacks:
        try:
            callback.on_failure(error, launch, run)
        except Exception as failure:
            error.add_note(f"no {callback.name}: {type(failure).__name__}: {failure}")
