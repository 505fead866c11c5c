"""Evaluation: mean loss and perplexity on a validation or test split."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megatron.core.datasets.samplers import DataIterator
from megatron.training.config.run_config import RunConfig
from megatron.training.data import put_on_device
from megatron.training.forward_backward import count_tokens, loss_and_tokens
from megatron.training.initialize import Runtime
from megatron.training.metrics import megatron_format
from megatron.training.metrics.sinks import Record
from megatron.training.pipeline import Pipeline


@torch.no_grad()
def evaluate(
    iterator: DataIterator, first_sample: int, config: RunConfig, runtime: Runtime, pipeline: Pipeline
) -> float | None:
    """Mean loss per token over `eval_iters` global batches, without dropout. Collective; equal on every rank.

    None if the run is asked to stop before the evaluation ends."""
    training = config.training
    total = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    with pipeline.evaluation_mode():
        for step in range(training.eval_iters):
            if not runtime.watchdog.requests.tick(save_later=True):
                break
            first = first_sample + step * training.eval_batch_size
            taken = iterator.next_step(first, training.eval_batch_size)
            batches = put_on_device(taken, config.model, runtime)
            total += loss_and_tokens(pipeline.evaluate(batches), count_tokens(batches), runtime)
    if runtime.launch.world_size > 1:
        dist.all_reduce(total)
    if runtime.watchdog.requests.stopping:
        return None
    loss, tokens = total.tolist()
    return loss / tokens if tokens else 0.0


def evaluate_split(
    split: str,
    iterator: DataIterator,
    iteration: int,
    config: RunConfig,
    runtime: Runtime,
    pipeline: Pipeline,
) -> Record | None:
    """Evaluates `valid` or `test` after an iteration and prints the loss. Each validation reads the next samples.

    Returns a record with `valid_loss` or `test_loss` and its perplexity; None if the run is asked to stop."""
    training = config.training
    number = (iteration - 1) // training.eval_interval if split == "valid" else 0
    first_sample = number * training.eval_iters * training.eval_batch_size
    runtime.watchdog.begin(f"evaluation ({split}) at iteration {iteration}")
    loss = evaluate(iterator, first_sample, config, runtime, pipeline)
    if loss is None:
        return None
    perplexity = math.exp(loss) if loss < 700 else math.inf
    if config.logging.log_format == "megatron":
        runtime.say(megatron_format.evaluation_lines(split, iteration, loss))
    else:
        runtime.say(f" {split} after iteration {iteration} | loss: {loss:.6E} | perplexity: {perplexity:.6E}")
    return {"iteration": iteration, f"{split}_loss": loss, f"{split}_perplexity": perplexity}
