"""Per-layer statistics: norms of weights, gradients and updates, and statistics of activations, attention logits and
routers.

In a measured step, the callback stores one flat tensor of sums and one flat tensor of maxima on the device, so that no
step waits for the measurements. The tensors are reduced over all ranks when a log interval ends: the sums in the same
collective as other logged values, and the maxima in a second collective. The resulting tables of statistics are the
same on every rank. Rows are identified by the layer number and the parameter name in the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.collectives import all_reduce_, gather_objects
from megatron.core.init import init_of
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.core.parallel_state import ParallelState
from megatron.extensions.observe.diagnosis.flags import DiagnosisConfig
from megatron.extensions.observe.diagnosis.layer_stats.activation_taps import (
    ENTROPY,
    KEYS,
    LOAD,
    LOGITS,
    LOOKED_UP,
    LOOKUPS,
    QUERIES,
    ActivationTaps,
    Key,
)
from megatron.extensions.observe.diagnosis.layer_stats.alarms import LayerAlarms, LayerRecord, Parameter
from megatron.extensions.observe.diagnosis.layer_stats.parameter_norms import QUANTITIES, ParameterSquares
from megatron.training.hooks import Callback, Log, Meter, StepView
from megatron.training.progress import Interval, Step
from megatron.training.run import TrainingRun

BOUND, EMBEDDING = "attention_logit_bound", "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class _Rows:
    """Row labels of the statistics tables. The labels are the same on all ranks."""

    parameters: dict[str, Parameter]
    sums: tuple[Key, ...]
    maxima: tuple[Key, ...]
    routers: tuple[int, ...]

    @classmethod
    def of(cls, taps: ActivationTaps, stages: Mapping[int, GPTModel], state: ParallelState) -> _Rows:
        """Build the row labels. This method is a collective over the world."""
        own = _parameters(stages), set(taps.sums), set(taps.maxima), set(taps.balances)
        of_ranks: list[tuple[dict[str, Parameter], set[Key], set[Key], set[int]]] = gather_objects(own, state.world)
        parameters = {name: parameter for found, *_ in of_ranks for name, parameter in found.items()}
        ordered = {name: parameters[name] for name in sorted(parameters, key=_natural)}
        sums = tuple(sorted(set[Key]().union(*(of_rank[1] for of_rank in of_ranks))))
        maxima = tuple(sorted(set[Key]().union(*(of_rank[2] for of_rank in of_ranks))))
        routers = tuple(sorted(set[int]().union(*(of_rank[3] for of_rank in of_ranks))))
        return cls(ordered, sums, maxima, routers)


class LayerStatistics(Callback, Meter):
    """Callback that measures per-layer statistics of one rank's part of the model (--log-layer-stats)."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        options = self.config.options(DiagnosisConfig)
        config = self.config
        state = run.runtime.state
        self.interval = options.log_layer_stats
        self.world = state.world
        self.device = run.runtime.device
        self.num_experts = config.model.moe_choices
        self._measured: list[tuple[int, Tensor, Tensor]] = []
        self._iteration: int | None = None
        """Iteration number of the current step if the step is measured; otherwise None."""
        self.found: list[LayerRecord] = []
        """Records of the last log interval."""

        self._alarms = LayerAlarms(options.layer_growth_threshold)
        compiled = config.parallel.compiles(self.device.type)
        self.taps = ActivationTaps(run.stages, self.device, compiled)
        self.rows = _Rows.of(self.taps, run.stages, state)
        places = {name: row for row, name in enumerate(self.rows.parameters)}
        self.squares = ParameterSquares(run.optimizer, state, places)
        self._sum_rows = [self.rows.sums.index(key) for key in self.taps.sums]
        self._maximum_rows = [self.rows.maxima.index(key) for key in self.taps.maxima]
        self._routers = [self.rows.routers.index(number) for number in self.taps.balances]
        if (notice := self.notice()) is not None:
            run.say(f" {notice}")
        return (self,)

    def reads_result(self, iteration: int) -> bool:
        return bool(self.interval) and iteration % self.interval == 0

    def begin_step(self, step: Step) -> None:
        self._iteration = step.iteration if self.reads_result(step.iteration) else None
        self.taps.begin(self._iteration is not None)

    def gradients_ready(self, factor: Tensor) -> None:
        if self._iteration is None:
            return
        self.taps.end()
        self.squares.before_update(factor)
        self._activations = self._table()

    def after_update(self, step: StepView, result: StepResult) -> None:
        if self._iteration is None:
            return
        sums = torch.cat([self.squares.after_update(), self._activations])
        self._measured.append((self._iteration, sums, self._maxima()))
        self._iteration = None

    def _table(self) -> Tensor:
        """Return the sums and counts of activations and the expert loads in one flat tensor."""
        table = torch.zeros(len(self.rows.sums), 2, dtype=torch.float64, device=self.device)
        for row, (key, value) in zip(self._sum_rows, self.taps.sums.items(), strict=True):
            table[row, 0] = value
            table[row, 1].fill_(self.taps.counts[key])
        loads = torch.zeros(len(self.rows.routers), self.num_experts, dtype=torch.float64, device=self.device)
        for row, load in zip(self._routers, self.taps.loads().values(), strict=True):
            loads[row] = load
        return torch.cat([table.flatten(), loads.flatten()])

    def _maxima(self) -> Tensor:
        maxima = torch.full((len(self.rows.maxima),), float("-inf"), dtype=torch.float64, device=self.device)
        for row, value in zip(self._maximum_rows, self.taps.maxima.values(), strict=True):
            maxima[row] = value
        return maxima

    def take(self) -> Tensor:
        """Return the sums of all steps that were measured since the last call of `records`, concatenated into one flat
        tensor."""
        return torch.cat([torch.zeros(0, dtype=torch.float64, device=self.device), *(s for _, s, _ in self._measured)])

    def report(self, summed: Tensor, interval: Interval) -> dict[str, object]:
        """Create the records of the measured steps, which `write` writes one by one. The returned dict is empty,
        because the statistics are not part of the interval's own record. Collective."""
        self.found = self.records(summed)
        return {}

    def write(self, log: Log) -> None:
        """Write the layer records, and print a line for each outlier."""
        for record in self.found:
            lines = self._alarms.judge(record)
            log.write(record.as_json() | ({"layer_alarms": lines} if lines else {}))
            for line in lines:
                log.say(f" {line}")

    def records(self, summed: Tensor) -> list[LayerRecord]:
        """Return one record for each step that was measured since the last call of this method. `summed` is the sum
        over all ranks of the tensors that `take` returned. If steps were measured, this method waits for the device and
        is a collective over the world.
        """
        measured, self._measured = self._measured, []
        if not measured:
            return []
        maxima = all_reduce_(torch.stack([maxima for _, _, maxima in measured]), self.world, dist.ReduceOp.MAX)
        tables = zip(summed.view(len(measured), -1).cpu(), maxima.tolist(), strict=True)
        return [self._record(step[0], *table) for step, table in zip(measured, tables, strict=True)]

    def _record(self, iteration: int, sums: Tensor, maxima: list[float]) -> LayerRecord:
        rows, record = self.rows, LayerRecord(iteration)
        tp, parameters, quantities = self.squares.shape
        sizes = [tp * parameters * quantities, 2 * len(rows.sums), len(rows.routers) * self.num_experts]
        squares, totals, loads = sums.split(sizes)
        by_parameter = squares.view(tp, parameters, quantities).permute(1, 2, 0).tolist()
        for (name, parameter), of_parameter in zip(rows.parameters.items(), by_parameter, strict=True):
            for quantity, of_ranks in zip(QUANTITIES, of_parameter, strict=True):
                record.add_parameter(name, parameter, quantity, of_ranks)
        counted = dict(zip(rows.sums, totals.view(-1, 2).tolist(), strict=True))
        for (statistic, number), (total, count) in counted.items():
            if count:
                mean = total / count
                record.add_layer(statistic, number, mean if statistic == ENTROPY else mean**0.5)
        if (LOOKED_UP, 0) in counted and EMBEDDING in record.shards:
            ratios = [(counted[LOOKED_UP, rank][0], counted[LOOKUPS, rank][0]) for rank in range(tp)]
            record.shards[EMBEDDING]["output_norm"] = [
                (total / count) ** 0.5 if count else 0.0 for total, count in ratios
            ]
        record.add_gains()
        for number, load in zip(rows.routers, loads.view(len(rows.routers), self.num_experts).tolist(), strict=True):
            even = sum(load) / self.num_experts
            record.add_layer(LOAD, number, [each / even if even else 0.0 for each in load])
        found = dict(zip(rows.maxima, maxima, strict=True))
        for (statistic, number), value in found.items():
            if statistic == LOGITS:
                record.add_layer(LOGITS, number, value)
            elif statistic == QUERIES:
                record.add_layer(BOUND, number, value * found[KEYS, number])
        return record

    def notice(self) -> str | None:
        """Return a notice that names the layers whose attention kernels do not return their logits, and the bound that
        is logged instead; None if there are no such layers."""
        maxima = self.rows.maxima
        hidden = sorted(number for statistic, number in maxima if statistic == QUERIES)
        if not hidden:
            return None
        which = "all layers" if len(hidden) == len({number for _, number in maxima}) else f"layers {hidden}"
        return (
            f"--log-layer-stats: the attention kernels of {which} do not return their logits, so {BOUND} is logged: "
            "the scale times the largest query norm times the largest key norm, which no logit exceeds; "
            f"--attention-backend unfused logs {LOGITS}"
        )


def _parameters(stages: Mapping[int, GPTModel]) -> dict[str, Parameter]:
    """Return the trained parameters in a rank's pipeline stages by name."""
    found: dict[str, Parameter] = {}
    for model in stages.values():
        layer_of: dict[str, int] = {}
        for layer in model.named_layers().values():
            for parameter in layer.parameters():
                layer_of[parameter.meta.name] = int(layer.number)  # type: ignore[attr-defined, arg-type]
        for name, (parameter, meta) in model.named_metas().items():
            if parameter.requires_grad:
                found[name] = Parameter(layer_of.get(name), meta.expert, "tp" in meta.sharded, init_of(meta).kind)
    return found


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key for a name that sorts `layers.10` after `layers.9`."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
