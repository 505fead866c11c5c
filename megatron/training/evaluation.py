"""Evaluation: mean loss and perplexity on a validation or test split."""

from __future__ import annotations

import math

import torch

from megatron.core.collectives import all_reduce_
from megatron.core.datasets.samplers import DataIterator
from megatron.training.data import put_on_device
from megatron.training.forward_backward import count_tokens, loss_and_tokens
from megatron.training.metrics import megatron_format
from megatron.training.metrics.run_log import RunLog
from megatron.training.metrics.sinks import Record
from megatron.training.run import TrainingRun


def evaluate(run: TrainingRun, split: str, iterator: DataIterator, log: RunLog) -> None:
    """Evaluates `valid` or `test` and logs the loss and its perplexity, unless the run is asked to stop meanwhile.
    Each validation reads the next samples. Collective."""
    training, runtime, iteration = run.config.training, run.runtime, run.progress.iteration
    number = max(0, iteration - 1) // training.eval_interval if split == "valid" else 0
    runtime.watchdog.begin(f"evaluation ({split}) at iteration {iteration}")
    loss = mean_loss(run, iterator, number * training.eval_iters * training.eval_batch_size)
    if loss is None:
        return
    perplexity = math.exp(loss) if loss < 700 else math.inf
    if run.config.logging.log_format == "megatron":
        last = iteration == run.train_iters or training.skip_train
        due = iteration % training.eval_interval == 0 and not training.skip_train
        for named in [*([""] if due else []), *(["valid"] if last else [])] if split == "valid" else [split]:
            runtime.say(megatron_format.evaluation_lines(named, iteration, loss))
    else:
        runtime.say(f" {split} after iteration {iteration} | loss: {loss:.6E} | perplexity: {perplexity:.6E}")
    run.measured[f"{split}_loss"] = loss
    consumed = run.progress.consumed_samples
    record: Record = {"iteration": iteration, "consumed_samples": consumed}
    record |= {f"{split}_loss": loss, f"{split}_perplexity": perplexity}
    log.write(record)
    for callback in run.callbacks:
        callback.on_evaluation(run.view, split, record)


@torch.no_grad()
def mean_loss(run: TrainingRun, iterator: DataIterator, first_sample: int) -> float | None:
    """Mean loss per token over `eval_iters` global batches, without dropout. Collective; equal on every rank.
    None if the run is asked to stop before the evaluation ends."""
    training, runtime = run.config.training, run.runtime
    total = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    with run.pipeline.evaluation_mode():
        for step in range(training.eval_iters):
            if not runtime.watchdog.requests.tick(save_later=True):
                break
            first = first_sample + step * training.eval_batch_size
            taken = iterator.next_step(first, training.eval_batch_size)
            batches = put_on_device(taken, run.config.model, runtime)
            total += loss_and_tokens(run.pipeline.evaluate(batches), count_tokens(batches), runtime)
    all_reduce_(total, runtime.state.world)
    if runtime.watchdog.requests.stopping:
        return None
    loss, tokens = total.tolist()
    return loss / tokens if tokens else 0.0
