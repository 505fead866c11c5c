"""Expert load and auxiliary losses, computed for each step and for the log.

Routers count tokens on the device. Load balancing needs the sums of these counts, so each step runs one small reduction
over the ranks of a pipeline stage. For the log, these sums are added up over a log interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.moe.layer import MoELayer
from megatron.core.moe.load_balancing import EXTRA_COLUMNS, Balance, end_step
from megatron.core.parallel_state import ParallelState
from megatron.training.hooks import Meter
from megatron.training.progress import Interval


class ExpertLoad(Meter):
    """Meter of the token counts and auxiliary losses in this rank's MoE layers since the last log record."""

    def __init__(
        self, config: TransformerConfig, state: ParallelState, stages: Mapping[int, GPTModel], device: torch.device
    ) -> None:
        self.config = config
        self.stage = state.axis("stage")
        self.seq_length = config.seq_length
        kinds = (*config.layers, *config.mtp_layers)
        self.numbers = [number for number, kind in enumerate(kinds) if kind.experts]
        """Numbers of the layers with experts. The numbers of multi-token prediction modules follow those of the
        layers."""
        rows = {number: row for row, number in enumerate(self.numbers)}
        found: dict[int, Balance] = {}
        for model in stages.values():
            for layer in model.named_layers().values():
                for module in layer.modules():
                    if isinstance(module, MoELayer):
                        found[rows[layer.number]] = module.router.balance  # type: ignore[index]
        self.rows, self.balances = torch.tensor(list(found), dtype=torch.int64, device=device), list(found.values())
        columns = config.moe_choices + EXTRA_COLUMNS
        self.totals = torch.zeros(len(rows), columns, dtype=torch.float64, device=device)
        """Sums over the log interval, one row for each MoE layer on this rank. The sums are zero on all ranks except
        the first of each pipeline stage, so that a sum over all ranks counts every token once."""

    def with_scales(self, batches: list[Batch], scale: Tensor) -> list[Batch]:
        """Return the micro-batches. Each micro-batch gets its number (`Batch.number`) and the factor for auxiliary
        gradients (`Batch.aux_scale`)."""
        if not self.totals.shape[0]:
            return batches
        for balance in self.balances:
            balance.begin_step()
        return [replace(batch, aux_scale=scale, number=number) for number, batch in enumerate(batches)]

    def end_step(self, skip: Tensor) -> None:
        """Update expert biases, unless `skip` is 1. Collective over the pipeline stage."""
        if self.balances:
            sums = end_step(self.balances, self.stage, skip)
            if self.stage.first:
                # The sums of a skipped step may not be finite.
                self.totals[self.rows] += torch.where(torch.isfinite(sums), sums, 0.0)

    def step_state(self) -> list[Tensor]:
        biases = [balance.expert_bias for balance in self.balances if balance.expert_bias is not None]
        return [self.totals, *biases, *(balance.tally for balance in self.balances)]

    def discard_step(self) -> None:
        for balance in self.balances:
            balance.tally.zero_()

    def take(self) -> Tensor:
        """Return the totals as a flat tensor, and reset them to zero."""
        totals = self.totals.flatten().clone()
        self.totals.zero_()
        return totals

    def report(self, summed: Tensor, interval: Interval) -> dict[str, object]:
        """Return expert loads and auxiliary losses for the record. A load of 1 is an even share of the tokens.
        Auxiliary losses are means per token and layer, not multiplied by their coefficients."""
        table, tokens = summed.view(self.totals.shape), interval.samples * self.seq_length
        if not table.shape[0] or not interval.results:
            return {}
        counts = table[:, :-EXTRA_COLUMNS]
        load = counts / counts.mean(dim=1, keepdim=True)
        balancing, z, dropped = (table[:, -EXTRA_COLUMNS:].sum(0) / (tokens * table.shape[0])).tolist()
        record = {
            "moe_aux_loss": balancing,
            "moe_z_loss": z,
            "moe_load_max": load.max().item(),
            "moe_load_min": load.min().item(),
            "moe_dropped": dropped / self.config.moe_router_topk,
            "moe_load": _rounded(load.mean(0)),
        }
        if self.config.moe_per_layer_logging:
            layers = zip(self.numbers, load, strict=True)
            record["moe_load_of_layer"] = {number: _rounded(row) for number, row in layers}
        return record


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
