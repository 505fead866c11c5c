"""Measurement of the squared gradient norms of a small and a large batch in each step, without an extra pass.

The small batch is the first micro-batch of each replica. After the first backward pass of a step, `main_grad` contains
the gradient of the small batch. The large batch is the global batch. Between the gradient reduction and the update, the
reduced gradient buffers contain the gradient of the large batch. Squared norms are summed over shards and averaged over
replicas in the collective that reduces logged values.

Only matrices that are sharded by tensor or expert parallelism are counted, because their gradients are complete on each
rank. Vectors (biases and norm weights) are not counted, because their gradients are partial sums under sequence
parallelism. Tied embeddings are not counted, because their gradients are partial sums under pipeline parallelism.
Because of these rules, the noise scale covers the same parameters under every parallel layout. An expert processes the
tokens of all ranks in its expert-parallel group. Therefore, the small batch of an expert consists of one micro-batch
from each rank in this group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.core.config.model import TransformerConfig
from megatron.core.optimizer.grad_norm import sum_of_squares
from megatron.core.param_meta import ParamMeta
from megatron.core.torch_private import foreach_norm
from megatron.extensions.observe.noise_scale.estimate import Coefficients, Window
from megatron.extensions.observe.noise_scale.flags import NoiseScaleFlags
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Meter
from megatron.training.metrics.sinks import Record
from megatron.training.progress import Interval, Step
from megatron.training.run import TrainingRun

CUTS = ("tp", "expt_tp", "ep")


def counts(meta: ParamMeta, model: TransformerConfig) -> bool:
    """Return True if the noise scale counts a parameter. The gradient of a counted parameter is complete on each rank
    that holds the parameter, under every parallel layout."""
    copied = meta.role == "embedding" and bool(model.tied_embeddings or model.mtp_depths)
    return meta.matrix and len(meta.global_shape) > 1 and not copied and any(axis in meta.sharded for axis in CUTS)


@dataclass
class Parameters:
    """Group of matrices on this rank: either all dense matrices or all expert matrices. The small batch has the same
    size for all matrices of a group."""

    replicas: int
    """Number of replicas of the matrices. The small batch of each replica contains different samples."""

    shards: list[Tensor] = field(default_factory=list)
    """Shards of the reduced gradients that this rank counts."""

    small: list[Tensor] = field(default_factory=list)
    """Gradient norms of the matrices after the first micro-batch of the step."""


@dataclass
class Watched:
    """Parameter whose gradient is measured after the first micro-batch of a step."""

    param: nn.Parameter
    into: Parameters
    before: Callable[[], object] | None
    """Original `on_main_grad` hook of the parameter, which is called after each gradient contribution. This hook may
    start the gradient reduction."""

    reports: int = 0
    """Number of gradient contributions that the parameter has received in the current step."""

    of_microbatch: int = 0
    """Number of gradient contributions that the parameter receives per micro-batch. This number is determined in the
    first step; until then, it is 0."""

    def added(self) -> None:
        """Count a gradient contribution. After the first micro-batch, store the gradient norm."""
        self.reports += 1
        if self.reports == self.of_microbatch:
            self.into.small.append(_norm(self.param.main_grad))  # type: ignore[attr-defined]
        if self.before is not None:
            self.before()


@torch.no_grad()
def _norm(grad: Tensor) -> Tensor:
    flat = grad.view(-1)
    return foreach_norm([flat], 2, torch.float64)[0] if flat.is_cuda else sum_of_squares(flat).sqrt()


class NoiseScale(Callback, Meter):
    """Callback that logs the gradient noise scale (--log-noise-scale)."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.window = Window(config.options(NoiseScaleFlags).noise_scale_window)

    def state(self) -> object:
        return [list(row) for row in self.window.rows]

    def load_state(self, state: object) -> None:
        self.window.rows.clear()
        self.window.add(state if isinstance(state, list) else ())

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        self._device = run.runtime.device
        self._step: Step | None = None
        self._now: Tensor | None = None
        self._rows: list[Tensor] = []
        state = run.runtime.state
        data, experts = state.axis("dp_cp").size, state.axis("expt_dp").size
        self._dense, self._experts = Parameters(data), Parameters(experts)
        self._replicas = data
        self._watched: list[Watched] = []
        self._learned = False
        for param in run.ddp.params:
            if (into := self._kind(param.meta)) is not None:  # type: ignore[attr-defined]
                self._watched.append(watched := Watched(param, into, getattr(param, "on_main_grad", None)))
                param.on_main_grad = watched.added  # type: ignore[attr-defined]
        for bucket in run.ddp.buckets:
            for piece in bucket.layout.pieces(*bucket.shard_range) if bucket.copies.first else ():
                if (into := self._kind(piece.meta)) is not None and piece.meta.is_first_replica(state.coords):
                    start = piece.offset - bucket.shard_range[0]
                    into.shards.append(bucket.grad_shard[start : start + piece.stop - piece.start])
        return (self,)

    def _kind(self, meta: ParamMeta) -> Parameters | None:
        """Return the group of matrices (dense or expert) that a parameter belongs to; None if the parameter is not
        counted."""
        if not counts(meta, self.config.model):
            return None
        if meta.expert:
            return self._experts if self._replicas % self._experts.replicas == 0 else None
        return self._dense

    def begin_step(self, step: Step) -> None:
        self._step = step
        for kind in (self._dense, self._experts):
            kind.small.clear()
        for watched in self._watched:
            watched.reports = 0

    @torch.no_grad()
    def gradients_ready(self, factor: Tensor) -> None:
        assert self._step is not None
        micro, large = self.config.training.micro_batch_size, self._step.samples
        assert micro is not None
        self._now = torch.zeros(2, dtype=torch.float64, device=self._device)
        if not self._learned:
            for watched in self._watched:
                watched.of_microbatch = watched.reports // (large // micro // self._replicas)
            self._learned = True
            return
        for kind in (self._dense, self._experts):
            small = micro * self._replicas // kind.replicas
            if small >= large:
                continue  # the small batch of the experts is already the whole global batch
            first = self._squares(kind.small) * (large / small) ** 2 / kind.replicas
            whole = self._squares([sum_of_squares(shard).sqrt() for shard in kind.shards])
            wanted = (Coefficients.of_noise(small, large), Coefficients.of_signal(small, large))
            self._now += (
                torch.stack([each.small * first + each.large * whole for each in wanted]) * factor.double() ** 2
            )

    def _squares(self, norms: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squared norms as a float64 scalar."""
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack(list(norms)).double().square().sum()

    def end_step(self, skip: Tensor) -> None:
        if self._now is not None:
            self._rows.append(torch.where(skip > 0, 0.0, self._now))
        self._now = None

    def discard_step(self) -> None:
        self._now = None

    def take(self) -> Tensor:
        """Return what this rank contributes to tr(S) and |G|^2, the two terms of the noise scale, in each step since
        the last call. The result is a flat tensor [steps * 2]."""
        rows, self._rows = self._rows, []
        return torch.cat([torch.zeros(0, dtype=torch.float64, device=self._device), *rows])

    def report(self, summed: Tensor, interval: Interval) -> Mapping[str, object]:
        self.window.add(summed.view(-1, 2).tolist())
        found = self.window.estimate()
        if found is None:
            return {"noise_scale": None}
        return {"noise_scale": found.scale, "noise_scale_low": found.low, "noise_scale_high": found.high}

    def lines(self, record: Record) -> list[str]:
        if record.get("noise_scale") is None:
            return ["     noise scale: not yet known"] if "noise_scale" in record else []
        scale, low, high = (record[f"noise_scale{end}"] for end in ("", "_low", "_high"))
        return [f"     noise scale {scale:.4g} samples, 95% interval {low:.4g} to {high:.4g}"]
