"""Log-likelihoods of token rows, computed by a model that is distributed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.attention.tiles import sequence_divisor
from megatron.core.batch import Batch
from megatron.core.collectives import all_gather, all_reduce_
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import local_rows
from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS, linear_format
from megatron.extensions.observe.evaluation.rows import Round, Row, Score, batch_lengths, plan_rounds


class Stopped(Exception):
    """Raised on every rank if the run is asked to stop before all rows are scored."""


def lengths_of_batches(longest: int, parallel: ModelParallelConfig) -> tuple[int, ...]:
    """Return the permitted row lengths of batches under a parallel layout. The largest permitted length is
    `longest`."""
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    divisor = sequence_divisor(cp, tp, parallel.sequence_parallel)
    name = linear_format(parallel)
    return batch_lengths(longest, divisor * (1 if name is None else LINEAR_FORMATS.facts(name).tokens))


@dataclass(frozen=True)
class Scorer:
    """Callable that computes the scores of token rows by running batches of rows through a model.

    `forward` accepts a list of micro-batches of the same shape. Under context parallelism, each micro-batch contains
    only this rank's part of the sequence. On ranks of the last pipeline stage, `forward` returns the `token_scores` of
    each micro-batch. On ranks of other stages, `forward` returns an empty list.
    """

    forward: Callable[[list[Batch]], list[Tensor]]
    lengths: tuple[int, ...]
    """Permitted row lengths of batches in ascending order. The last length is the maximum row length."""

    budget: int
    """Maximum number of tokens per batch."""

    state: ParallelState
    device: torch.device
    go_on: Callable[[], bool] = lambda: True
    """Function that is called before each `Round`, on all ranks. Scoring stops if this function returns False."""

    progress: Callable[[int, int], None] = lambda done, rounds: None
    """Function that is called with the number of finished rounds and the total number of rounds, before the first round
    and after each round."""

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    @torch.no_grad()
    def __call__(self, rows: Sequence[Row]) -> list[Score]:
        """Return the scores of all rows on every rank. This method is a collective. All ranks must pass the same rows.
        Raises Stopped if the run is asked to stop before all rows are scored."""
        table = torch.zeros(len(rows), 3, dtype=torch.float64, device=self.device)
        plan = list(plan_rounds([row.length for row in rows], self.lengths, self.budget, self.state.dp.size))
        self.progress(0, len(plan))
        for done, each in enumerate(plan, 1):
            if not self.go_on():
                raise Stopped
            self._run(each, rows, table)
            self.progress(done, len(plan))
        all_reduce_(table, self.state.world)
        return [Score(log, wrong == 0, int(token)) for log, wrong, token in table.tolist()]

    def _run(self, each: Round, rows: Sequence[Row], table: Tensor) -> None:
        """Add the scores of one round to `table` [rows, 3]. The columns are the summed log-likelihood, the number of
        scored tokens that greedy decoding would not produce, and the most likely token after the row.

        If several ranks hold the same tokens, only one of these ranks adds the scores to its table.
        """
        mine = each.microbatches[self.state.dp.rank]
        wholes = [_batch([rows[number] for number in numbers], each) for numbers in mine]
        batches = [whole.local_to(self.state.cp).to(self.device) for whole in wholes]
        # only the last stage returns results
        for numbers, batch, (logs, tokens) in zip(mine, batches, self.forward(batches), strict=False):
            if not self.state.tp.first or not numbers:
                continue
            mask = batch.loss_mask.double()
            ends = [rows[number].length - 1 for number in numbers] + [0] * (each.size - len(numbers))
            last = torch.tensor(ends, device=self.device)[:, None] == _places(batch)
            sums = [(logs * mask).sum(1), ((tokens != batch.labels) * mask).sum(1), (tokens * last).sum(1)]
            table[list(numbers)] += torch.stack(sums, 1)[: len(numbers)]


def _places(batch: Batch) -> Tensor:
    """Return a tensor [s] with the position of each of this rank's tokens in the whole row."""
    if batch.places is not None:
        return batch.places
    return torch.arange(batch.tokens.shape[1], device=batch.tokens.device)


def _batch(rows: Sequence[Row], shape: Round) -> Batch:
    """Create a batch of rows, padded with zeros. The loss mask is 1 for scored labels."""
    tokens = torch.zeros(shape.size, shape.length + 1, dtype=torch.int64)
    mask = torch.zeros(shape.size, shape.length)
    for number, row in enumerate(rows):
        tokens[number, : row.length + 1] = torch.tensor(row.tokens)
        mask[number, row.length - row.scored : row.length] = 1
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, torch.arange(shape.size))


def scores_by(
    executor: PipelineExecutor[GPTModel, Batch], parallel: ModelParallelConfig, state: ParallelState
) -> Callable[[list[Batch]], list[Tensor]]:
    """Create a function for `Scorer.forward` that runs micro-batches through a pipeline executor. Micro-batches may
    have any shape that the parallel layout supports."""
    shards = state.tp.size if parallel.sequence_parallel else 1
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage

    def forward(batches: list[Batch]) -> list[Tensor]:
        b, s = batches[0].tokens.shape
        lists = pipeline_lists(parallel.schedule, state.pp.size, len(batches), executor.layout.chunks, True, group)
        with executor.p2p.shaped((s // shards, b, executor.p2p.shape[-1])):
            return executor.run(lists[state.pp.rank], batches, last_forward=token_scores)

    return forward


@torch.no_grad()
def token_scores(model: GPTModel, hidden: Tensor | None, batch: Batch) -> Tensor:
    """Return the log-likelihood of each label and the most likely token at each position, stacked into one fp64 tensor
    [2, b, s]. This function runs on the last pipeline stage. The result is equal on all tensor-parallel ranks. Logits
    are not gathered over tensor-parallel ranks.
    """
    size = model.config.vocab_size
    assert size is not None
    logits = model.local_logits(hidden, batch)
    greedy = most_likely(logits, model.tp, size)
    loss = vocab_parallel_cross_entropy(logits, batch.labels.t(), model.tp, size, model.compiled)
    return torch.stack((-loss.double(), greedy.double())).transpose(1, 2)


@torch.no_grad()
def most_likely(logits: Tensor, tp: Axis, vocab_size: int) -> Tensor:
    """Return the id of the most likely token at each position. logits: [s, b, V/t]. Return int64 ids [s, b].

    If several tokens have the same logit, the lowest id is returned. The logits are not gathered: the ranks exchange
    only two numbers per position. Columns from `vocab_size` on are padding.
    """
    start, stop = local_rows(logits.shape[-1] * tp.size, tp)
    columns = max(0, min(vocab_size, stop) - start)
    best = torch.full((2, *logits.shape[:-1]), -torch.inf, dtype=torch.float64, device=logits.device)
    if columns:
        values, ids = logits[..., :columns].max(-1)
        best[0], best[1] = values, ids + start
    values, ids = all_gather(best[None], tp).unbind(1)  # values and ids are [tp, s, b]
    return ids.masked_fill(values < values.amax(0), torch.inf).amin(0).long()
