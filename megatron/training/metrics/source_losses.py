"""Loss of each data set of a blend, in training and evaluation (--log-source-loss): means over its tokens.

The last pipeline stage adds the losses of a sample to its source's row. Totals stay on the device and travel with the
reduction of the log, or of the evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.training.metrics.tallies import Tallies, means


class SourceLosses(Tallies):
    """The losses by source on one rank. `names` are the sources; none if nothing is logged."""

    def __init__(
        self, names: Sequence[str], state: ParallelState, stages: Mapping[int, GPTModel], device: torch.device
    ) -> None:
        self.names, tallies = list(names), []
        for model in stages.values():
            if names and model.last:
                model.source_tally = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
                tallies.append(model.source_tally)
        super().__init__(tallies, len(names), state.tp.first, device)

    def record(self, summed: Tensor, prefix: str = "") -> dict[str, float | None]:
        """What is logged of `take` summed over the world; None where no token of a source counted."""
        return {f"{prefix}source_{name}_loss": mean for name, mean in zip(self.names, means(summed), strict=True)}

    @contextmanager
    def evaluating(self) -> Iterator[Tensor]:
        """What evaluations in this block add up on this rank, [sources, 2] float64, when it ends. A training step that
        is not settled yet keeps its tallies."""
        kept = [tally.clone() for tally in self.tallies]
        self.forget_step()
        found = torch.zeros_like(self.totals)
        yield found
        for tally, before in zip(self.tallies, kept, strict=True):
            if self.counts:
                found += tally
            tally.copy_(before)
