"""Execution of steps that begin before the previous step ends. This module contains the training step and the pipeline.
If passes of the next step have already run, the pipeline keeps their state until the next step begins."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.core.pipeline_parallel.actions import COMPUTE, Action, Kind
from megatron.core.pipeline_parallel.executor import Held, PipelineExecutor
from megatron.extensions.pipeline.pipedream_2bw.lists import lists_of_step
from megatron.extensions.pipeline.pipedream_2bw.two_versions import LateOptimizer
from megatron.training.forward_backward import Pipeline, StepInput, Sums
from megatron.training.progress import Step
from megatron.training.run import TrainingRun
from megatron.training.step_parts import StepParts
from megatron.training.train_step import TrainStep, is_read


class ContinuingExecutor(PipelineExecutor[GPTModel, Batch]):
    """Executor that runs some passes of the next step during the current step. The executor keeps the messages and
    autograd graphs of these passes until the next step, and selects the weight version for each pass."""

    optimizer: LateOptimizer
    """Optimizer that owns both versions of the weights."""

    _microbatches = 0
    """Number of micro-batches in the current step. Micro-batches with this number and larger numbers belong to the next
    step."""

    def run_step(
        self, actions: Sequence[Action], batches: Sequence[Batch], following: Sequence[Batch], seed: float
    ) -> list[Tensor]:
        """Run one step. `actions` may also contain passes of `following`, the micro-batches of the next step. The next
        call of `run_step` runs the remaining passes of `following`. Return the loss sums of the micro-batches in
        `batches`, in the same form as `run`."""
        self._begin([*batches, *following], seed, training=True)
        self._microbatches = len(batches)
        self.run_actions(actions)
        if not following:
            return self.end()
        self._number_from(self._microbatches)
        return self.losses()

    def handle(self, action: Action) -> None:
        if action.kind is Kind.VALIDATE:
            self.optimizer.end_update()
            return
        if self.training and action.kind in COMPUTE:
            self.optimizer.use_for(of_next_step=action.microbatch >= self._microbatches)
        super().handle(action)

    def _number_from(self, first: int) -> None:
        """Renumber the messages and autograd graphs that are kept for the next step, so that micro-batch `first`
        becomes micro-batch 0."""
        later = lambda action: action._replace(microbatch=action.microbatch - first)  # noqa: E731
        self.held = Held(
            outbox={later(send): tensor for send, tensor in self.held.outbox.items()},
            arriving={later(receive): message for receive, message in self.held.arriving.items()},
            saved={(stage, microbatch - first): kept for (stage, microbatch), kept in self.held.saved.items()},
        )


class ContinuingPipeline(Pipeline):
    """Pipeline that runs the action lists of consecutive steps without a flush."""

    executor_type = ContinuingExecutor
    executor: ContinuingExecutor

    following: Sequence[Batch] = ()
    """Micro-batches of the step after the next call of `train`. This call may already run some passes of these
    micro-batches."""

    _begun = 0
    """Number of micro-batches in the last step, if passes of the next step have already run; otherwise 0."""

    @property
    def counting_rank(self) -> int | None:
        # No rank can count the tokens of this step in advance, because the rank that computes the loss may still
        # process the previous step.
        return None

    def train(self, batches: Sequence[Batch], seed: float) -> list[Tensor]:
        following, self.following = self.following, ()
        return self._train(batches, following, seed)

    def train_plainly(self, batches: Sequence[Batch], seed: float) -> list[Tensor]:
        return self._train(batches, (), seed)

    def _train(self, batches: Sequence[Batch], following: Sequence[Batch], seed: float) -> list[Tensor]:
        before, self._begun = self._begun, len(batches) if following else 0
        lists = lists_of_step(self.schedule, self.pp.size, before, len(batches), len(following))
        return self.executor.run_step(lists[self.pp.rank], batches, following, seed)

    def evaluate(self, batches: Sequence[Batch]) -> list[Tensor]:
        self.drop_begun()
        return super().evaluate(batches)

    def drop_begun(self) -> None:
        """Discard the passes of the next step that have already run. The next call of `train` then runs these passes
        again."""
        if self._begun:
            self.executor.drop()
            self._begun = 0


class ContinuedStep(TrainStep):
    """Training step whose passes may begin during the previous step."""

    begun: StepInput | None = None
    """Inputs of the next step, if some passes of the next step run during the current step; otherwise None."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        assert isinstance(run.optimizer, LateOptimizer) and isinstance(run.pipeline, ContinuingPipeline)
        self.optimizer, self.pipeline = run.optimizer, run.pipeline
        self.pipeline.executor.optimizer = self.optimizer
        if not self.optimizer.start() and run.progress.loaded_from:
            run.say(" weights before the last update are not loaded: both versions start from the newest weights")

    def inputs(self, step: Step) -> StepInput:
        """Return the inputs of this step, and read the inputs of the next step. If the inputs of this step were already
        read during the previous step, return these inputs."""
        given = self._read(step)
        self.begun = None if is_read(self.run, step) else self._following(step)
        return given

    def gradients(self, given: StepInput) -> Sums:
        self.pipeline.following = self.begun.scaled if self.begun is not None else ()
        return super().gradients(given)

    def _read(self, step: Step) -> StepInput:
        return self.begun if self.begun is not None and self.begun.step == step else super().inputs(step)

    def _following(self, step: Step) -> StepInput | None:
        """Read the inputs of the next step; return None if the next step cannot begin early. The next step cannot begin
        early if it belongs to a different training phase, or if the run skips its samples. It also cannot begin early
        if one of `run.meters` needs its result before the step after it begins."""
        run = self.run
        number, sample = step.iteration + 1, step.first_sample + step.samples
        if number in run.passed_over:
            return None
        if run.plan.at(sample) is not run.plan.at(step.first_sample):
            return None
        if any(meter.reads_result(number) for meter in run.meters):
            return None
        return self._read(Step(number, sample, run.batch_sizes.at(sample)))

    def update(self, step: Step, sums: Sums, factor: Tensor) -> StepResult:
        self.optimizer.is_read = is_read(self.run, step)
        return super().update(step, sums, factor)

    def finish(self) -> None:
        super().finish()
        self.pipeline.drop_begun()


PARTS = StepParts(step=ContinuedStep, pipeline=ContinuingPipeline, optimizer=LateOptimizer)
