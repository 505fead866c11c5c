"""Evaluation: mean loss and perplexity on validation sets or the test split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from megatron.core.collectives import all_reduce_
from megatron.core.config.losses import Loss
from megatron.core.datasets.samplers import DataIterator
from megatron.core.optimizer.owned_tensors import other_weights
from megatron.training.data import put_on_device
from megatron.training.forward_backward import count_tokens, loss_and_tokens
from megatron.training.hooks import Evaluation, Log
from megatron.training.metrics.console import perplexity
from megatron.training.metrics.progress_bar import ProgressBar
from megatron.training.metrics.sinks import Record
from megatron.training.progress import EVALUATION
from megatron.training.run import TrainingRun


def evaluate(run: TrainingRun, split: str, log: Log) -> None:
    """Evaluate the "valid" or "test" data sets of the current phase, and log the loss of each set. The log also
    contains the perplexity if the loss is a plain cross-entropy. Collective.

    The evaluation stops early if the run is asked to stop. If every data set has a name, the log also contains an
    unnamed loss, which is the mean over the tokens of all data sets. A validation continues with the sample after the
    last sample of the previous validation.
    """
    training = run.config.training
    runtime = run.runtime
    iteration = run.progress.iteration
    number = max(0, iteration - 1) // training.eval_interval if split == "valid" else 0
    runtime.watchdog.doing(f"evaluation ({split}) at iteration {iteration}")
    sums: dict[str, tuple[float, float]] = {}
    of_meters: Record = {}
    with weights_to_evaluate(run):
        for name, iterator in run.data.evaluated(split).items():
            whole = training.full_validation and split == "valid"
            steps = len(iterator.dataset) // training.eval_batch_size if whole else training.eval_iters
            first_sample = 0 if whole else number * steps * training.eval_batch_size
            found = summed_loss(run, iterator, first_sample, steps, split, name)
            if found is None:
                return
            sums[name] = found[:2]
            if not name:
                of_meters = found[2]
    if "" not in sums:
        sums[""] = sum(loss for loss, _ in sums.values()), sum(tokens for _, tokens in sums.values())
    means = {name: loss / count if count else 0.0 for name, (loss, count) in sums.items()}
    record: Record = {"iteration": iteration, "consumed_samples": run.progress.consumed_samples}
    for name in sorted(means):
        key = f"{split}_{name}" if name else split
        record[f"{key}_loss"] = means[name]
        if (value := perplexity(means[name], run.config.model)) is not None:
            record[f"{key}_perplexity"] = value
        run.measured[f"{key}_loss"] = means[name]
        for line in run.lines.evaluation(iteration, split, name, means[name]):
            runtime.say(line)
    record |= of_meters
    log.write(record)
    for callback in run.callbacks:
        callback.on_evaluation(run, split, record)


def weights_to_evaluate(run: TrainingRun) -> AbstractContextManager[None]:
    """Return a context in which the model uses the weights that a callback provides for evaluation. If no callback
    provides weights, the model keeps its own weights. Collective."""
    offers = (callback.evaluation_weights(run) for callback in reversed(run.callbacks))
    offered = next((weights for weights in offers if weights is not None), None)
    return nullcontext() if offered is None else other_weights(run.optimizer, offered)


@contextmanager
def _in_place_of_loss(run: TrainingRun, metric: Loss | None) -> Iterator[None]:
    """Context in which the last pipeline stage computes `metric` instead of the loss. The functions in `loss_watchers`
    are not called. If `metric` is None, the loss is computed as usual."""
    last = [stage for stage in run.stages.values() if stage.last and metric is not None]
    before = [(stage, stage.loss, stage.loss_watchers) for stage in last]
    for stage in last:
        stage.loss, stage.loss_watchers = metric, []
    try:
        yield
    finally:
        for stage, loss, watchers in before:
            stage.loss, stage.loss_watchers = loss, watchers


@torch.no_grad()
def summed_loss(
    run: TrainingRun,
    iterator: DataIterator,
    first_sample: int,
    steps: int,
    split: str,
    name: str = "",
    metric: Loss | None = None,
) -> tuple[float, float, Record] | None:
    """Evaluate `steps` batches without dropout. Collective.

    Return (loss sum, number of tokens, values that the meters report), equal on every rank. The sum covers the tokens
    that the loss mask selects. Return None if the run is asked to stop before the evaluation ends.

    Args:
        run: The run.
        iterator: Iterator over the data set.
        first_sample: Number of the first sample.
        steps: Number of batches.
        split: "valid" or "test".
        name: Name of the validation set.
        metric: Function whose values are summed instead of the loss. The function is called like a loss
            (`megatron.core.models.gpt.loss.TokenLoss`): logits [s, b, V/tp], labels [s, b] -> values [s, b], equal on
            all tensor-parallel ranks. If `metric` is given, the meters ignore the evaluation.
    """
    training, runtime = run.config.training, run.runtime
    total = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    meters = run.meters if metric is None else ()
    with ExitStack() as counting:
        evaluation = Evaluation(split, name, iterator.dataset)
        counted = [(meter, counting.enter_context(meter.evaluating(evaluation))) for meter in meters]
        counting.enter_context(_in_place_of_loss(run, metric))
        counting.enter_context(run.pipeline.evaluation_mode())
        bar = ProgressBar(f"evaluation ({split})", steps, "batch", runtime.say) if runtime.is_main else None
        if bar is not None:
            counting.callback(bar.close)
        for step in range(steps):
            if not runtime.watchdog.requests.tick(save_later=True):
                break
            first = first_sample + step * training.eval_batch_size
            taken = iterator.next_step(first, training.eval_batch_size)
            batches = put_on_device(taken, run.config.model, runtime)
            with run.timers(EVALUATION):
                losses = run.pipeline.evaluate(batches)
            total += loss_and_tokens(losses, count_tokens(batches), runtime)
            if bar is not None:
                bar.update(step + 1)
    own = [(meter, counts.flatten()) for meter, counts in counted if counts is not None]
    summed = all_reduce_(torch.cat((total, *(counts for _, counts in own))), runtime.state.world)
    if runtime.watchdog.requests.stopping:
        return None
    loss, tokens = summed[:2].tolist()
    record: Record = {}
    for (meter, _), counts in zip(own, summed[2:].split([counts.numel() for _, counts in own]), strict=True):
        record |= meter.report_evaluation(counts, split)
    return loss, tokens, record
