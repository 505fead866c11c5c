"""Evaluates the tasks of --eval-tasks on the training model, in place, and logs their scores."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.core.collectives import gather_objects
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.extensions.evaluation.flags import EvalTasksConfig
from megatron.extensions.evaluation.scoring import (
    Scorer,
    Stopped,
    continue_requests,
    lengths_of_batches,
    next_tokens,
    scores_by,
    until_stop,
)
from megatron.extensions.evaluation.suite import ContinueRequests, Results, Suite, record_of, table
from megatron.extensions.inference.generation import Engine, Request, StageRunner
from megatron.training.hooks import Callback, Log, Task
from megatron.training.initialize import Runtime
from megatron.training.metrics.sinks import Record
from megatron.training.run import TrainingRun


class EvalTasks(Callback):
    """--eval-tasks: evaluates tasks on the training model every --eval-tasks-interval iterations."""

    def on_setup(self, runtime: Runtime) -> None:
        """Reads the tasks. Raises ValueError with every problem of their files."""
        options, model = self.config.options(EvalTasksConfig), self.config.model
        tokenizer = build_tokenizer(self.config.tokenizer, model.vocab_size)
        limit, num_fewshot = options.eval_tasks_limit, options.eval_tasks_num_fewshot
        self.suite = Suite.load(options.eval_tasks or (), tokenizer, model.seq_length, limit, num_fewshot)
        for line in self.suite.notes:
            runtime.say(f" {line}")

    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        own = self.config.options(EvalTasksConfig).eval_tasks_interval
        of_validation = self.config.training.eval_interval
        return (
            Task(
                "evaluation tasks",
                of_validation if own is None else own,
                lambda: evaluate_tasks(run, self.suite, log),
                at_end=True,
                may_stop=True,
                evaluates=True,
            ),
        )


def evaluate_tasks(run: TrainingRun, suite: Suite, log: Log) -> None:
    """Evaluates all tasks and logs their scores, unless the run is asked to stop meanwhile. Dropout is off, and neither
    gradients nor any state of the training changes. Collective."""
    config, runtime, iteration = run.config, run.runtime, run.progress.iteration
    runtime.watchdog.doing(f"evaluation tasks at iteration {iteration}")
    start = time.perf_counter()
    try:
        with run.pipeline.evaluation_mode():
            results = suite.evaluate(scorer_of(run), generation_of(run, suite.tokenizer))
    except Stopped:
        return
    record: Record = {"iteration": iteration, "consumed_samples": run.progress.consumed_samples}
    record |= record_of(results.scores) | {"eval_tasks_seconds": round(time.perf_counter() - start, 3)}
    runtime.say(f" tasks after iteration {iteration} ({record['eval_tasks_seconds']:.1f} s)\n{table(results.scores)}")
    samples = config.options(EvalTasksConfig).eval_tasks_samples
    if runtime.is_main and samples:
        _write_samples(Path(samples), iteration, results)
    log.write(record)
    for callback in run.callbacks:
        callback.on_evaluation(run, "tasks", record)


def scorer_of(run: TrainingRun) -> Scorer:
    """Scores rows on a run's model, at its layout."""
    config, runtime = run.config, run.runtime
    budget = config.options(EvalTasksConfig).eval_tasks_batch_tokens
    return Scorer(
        forward=scores_by(run.pipeline.executor, config.parallel, runtime.state),
        lengths=lengths_of_batches(config.model.seq_length, config.parallel),
        budget=budget or config.training.micro_batch_size * config.model.seq_length,
        state=runtime.state,
        device=runtime.device,
        go_on=partial(runtime.watchdog.requests.tick, save_later=True),
    )


def generation_of(run: TrainingRun, tokenizer: Tokenizer) -> ContinueRequests:
    """Continues prompts on a run's model, at its layout: with cached keys and values, or under context parallelism,
    which has no such cache, by passes over whole texts."""
    config, state, pipeline = run.config, run.runtime.state, run.pipeline
    scorer = scorer_of(run)
    if state.cp.size > 1:
        return partial(continue_requests, tokenizer=tokenizer, next_tokens=partial(next_tokens, scorer))
    together = state.axis("ep").size > 1 or config.ddp.shards_parameters
    return CachedGeneration(run.stages, state, pipeline.layout, tokenizer, scorer.budget, together)


def _write_samples(folder: Path, iteration: int, results: Results) -> None:
    """One line of JSON for each document of each task."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in results.samples)
    (folder / f"iteration_{iteration:07d}.jsonl").write_text("".join(lines), encoding="utf-8")


ROWS = 64
"""Texts that grow at once."""


@dataclass(frozen=True)
class CachedGeneration:
    """Continues prompts at a layout without context parallelism."""

    stages: Mapping[int, GPTModel]
    state: ParallelState
    layout: PipelineLayout
    tokenizer: Tokenizer
    prefill_tokens: int
    """Tokens of prompts in one forward pass."""

    together: bool = False
    """Whether replicas of the model must run the same passes, because experts or parameters are spread over them. Else
    they share the prompts."""

    def __call__(self, requests: Sequence[Request]) -> list[str]:
        """The most likely continuation of each prompt, on every rank. Collective."""
        control = self.state.world if self.together else self.state.axis("mp")
        first, step = (0, 1) if self.together else (self.state.dp.rank, self.state.dp.size)
        runner = StageRunner(self.stages, self.state, self.layout, control)
        found: dict[int, str] = {}
        if runner.leads:
            engine, numbers = Engine(runner, self.tokenizer.detokenize, ROWS, self.prefill_tokens), range(len(requests))
            for number, each in zip(numbers[first::step], engine.run(requests[first::step]), strict=True):
                found[number] = until_stop(self.tokenizer.detokenize(each.tokens), each.request)
            engine.stop()
        else:
            runner.follow()
        texts = {number: text for part in gather_objects(found, self.state.world) for number, text in part.items()}
        return [texts[number] for number in range(len(requests))]
