"""Evaluation of the tasks in --eval-tasks during training. The training model is evaluated in place, and the scores are
logged."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from lm_eval.utils import handle_non_serializable, make_table

from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.observe.evaluation.continuation import CachedGeneration, continue_requests, next_tokens
from megatron.extensions.observe.evaluation.flags import EvalTasksConfig
from megatron.extensions.observe.evaluation.harness import ParallelLM, Suite, record_of
from megatron.extensions.observe.evaluation.scoring import Scorer, Stopped, lengths_of_batches, scores_by
from megatron.training.evaluation import weights_to_evaluate
from megatron.training.hooks import Callback, Log, Task
from megatron.training.initialize import Runtime
from megatron.training.metrics.progress_bar import bars, no_bar
from megatron.training.metrics.sinks import Record
from megatron.training.reliability.lossy_output import told_if_unwritten
from megatron.training.run import TrainingRun


class EvalTasks(Callback):
    """Callback that evaluates the tasks in --eval-tasks on the training model every --eval-tasks-interval
    iterations."""

    def on_setup(self, runtime: Runtime) -> None:
        """Read the tasks. Raises ValueError with a list of all problems in the task files."""
        options, model = self.config.options(EvalTasksConfig), self.config.model
        tokenizer = build_tokenizer(self.config.tokenizer, model.vocab_size)
        if not runtime.is_main:
            logging.getLogger("lm_eval").setLevel(logging.ERROR)
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
    """Evaluate all tasks and log their scores. The evaluation is aborted if the run is requested to stop. Collective.

    Dropout is disabled. The evaluation does not change gradients or training state.
    """
    config = run.config
    runtime = run.runtime
    iteration = run.progress.iteration
    runtime.watchdog.doing(f"evaluation tasks at iteration {iteration}")
    start = time.perf_counter()
    try:
        with run.pipeline.evaluation_mode(), weights_to_evaluate(run):
            results = suite.evaluate(model_of(run))
    except Stopped:
        return
    record: Record = {"iteration": iteration, "consumed_samples": run.progress.consumed_samples}
    record |= record_of(results) | {"eval_tasks_seconds": round(time.perf_counter() - start, 3)}
    table = "\n".join(make_table(results, each) for each in ("results", "groups") if each in results)
    runtime.say(f" tasks after iteration {iteration} ({record['eval_tasks_seconds']:.1f} s)\n{table}")
    samples = config.options(EvalTasksConfig).eval_tasks_samples
    if runtime.is_main and samples:
        with told_if_unwritten(f"evaluation samples of iteration {iteration}"):
            _write_samples(Path(samples), iteration, results["samples"])
    log.write(record)
    for callback in run.callbacks:
        callback.on_evaluation(run, "tasks", record)


def model_of(run: TrainingRun) -> ParallelLM:
    """Return an adapter through which the harness calls the model of a run. The model keeps the parallel layout of the
    run. The model continues texts with a key/value cache. The cache does not support context parallelism. Under context
    parallelism, the model instead runs one pass over the whole text for each token.
    """
    config = run.config
    runtime = run.runtime
    pipeline = run.pipeline
    state = run.runtime.state
    tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size)
    budget = config.options(EvalTasksConfig).eval_tasks_batch_tokens
    scorer = Scorer(
        forward=scores_by(pipeline.executor, config.parallel, state),
        lengths=lengths_of_batches(config.model.seq_length, config.parallel),
        budget=budget or config.training.micro_batch_size * config.model.seq_length,
        state=state,
        device=runtime.device,
        go_on=partial(runtime.watchdog.requests.tick, save_later=True),
        progress=bars("scoring tasks", "batch", runtime.say) if runtime.is_main else no_bar,
    )
    if state.cp.size > 1:
        by_passes = partial(continue_requests, tokenizer=tokenizer, next_tokens=partial(next_tokens, scorer))
        return ParallelLM(tokenizer, scorer, by_passes)
    together = state.axis("ep").size > 1 or config.ddp.shards_parameters
    generate = CachedGeneration(run.stages, state, pipeline.layout, tokenizer, scorer.budget, together)
    return ParallelLM(tokenizer, scorer, generate)


def _write_samples(folder: Path, iteration: int, samples: Mapping[str, Sequence[Mapping[str, object]]]) -> None:
    """Write one line of JSON for each document of each task and filter."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps({"task": task, **sample}, ensure_ascii=False, default=handle_non_serializable) + "\n"
        for task, of_task in samples.items()
        for sample in of_task
    )
    (folder / f"iteration_{iteration:07d}.jsonl").write_text("".join(lines), encoding="utf-8")
