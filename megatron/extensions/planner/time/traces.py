"""Traces of a stage's parts: what one layer of each kind, and the two ends of the model, do with a micro-batch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron.core import compiled_regions
from megatron.core.attention import core_attention
from megatron.core.config.layers import RecomputeConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.moe import experts
from megatron.core.moe.experts import Segments
from megatron.core.parts import linear_format
from megatron.core.pipeline_parallel.schedules import splits_backward
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.transformer.recompute import Segment, recompute_segments
from megatron.extensions.fp8 import casts
from megatron.extensions.fp8.casts import Scaled
from megatron.extensions.planner.as_on_gpus import plans_fused_dropout, replaced
from megatron.extensions.planner.fake_stage import (
    FakeGroup,
    FakeStages,
    MicroBatch,
    fake_stages,
    in_a_layer,
    nothing_offloaded,
    numbered_kinds,
    planned,
)
from megatron.extensions.planner.time.recorder import RecordedDropoutKernel, RecordedKernel, Recorder
from megatron.extensions.planner.time.replay import PassEvents, Product


@dataclass(frozen=True)
class _Part:
    """A layer, or with `layer` None an end of the model."""

    layer: int | None
    recompute: bool = False
    offload: bool = False
    first: bool = False
    last: bool = False


@dataclass
class TraceCache:
    """Traces by what determines them, shared by predictions of many layouts."""

    kinds: dict[Hashable, list[int]] = field(default_factory=dict)
    """Model -> for each layer the first layer that is like it."""

    events: dict[Hashable, dict[_Part, PassEvents]] = field(default_factory=dict)
    """Micro-batch in a layer -> part -> what it does."""

    def parts_of(self, batch: MicroBatch, stages: Sequence[Stage]) -> list[list[PassEvents]]:
        """By stage, the parts that it runs in order. Traces those that are not known yet, all in one fake step."""
        alike = self.alike(batch)
        wanted = [list(_parts(batch, stage, alike)) for stage in stages]
        events = self._events_of(batch, list(dict.fromkeys(part for parts in wanted for part in parts)))
        return [[events[part] for part in parts] for parts in wanted]

    def _events_of(self, batch: MicroBatch, parts: Sequence[_Part]) -> dict[_Part, PassEvents]:
        if batch.parallel.offloaded_layers:
            found = self._events_of(nothing_offloaded(batch), [part for part in parts if not part.offload])
            return found | self._known_or_traced(batch, [part for part in parts if part.offload])
        return self._known_or_traced(batch, parts)

    def _known_or_traced(self, batch: MicroBatch, parts: Sequence[_Part]) -> dict[_Part, PassEvents]:
        of_layers = self.events.setdefault(in_a_layer(batch), {})
        of_ends = self.events.setdefault(in_a_layer(_nothing_recomputed(batch)), {})
        known = {False: of_layers, True: of_ends}  # by whether a part is an end of the model
        missing = [part for part in parts if part not in known[part.layer is None]]
        if missing:
            for part, events in _traced(batch, missing).items():
                known[part.layer is None][part] = events
        return {part: known[part.layer is None][part] for part in parts}

    def alike(self, batch: MicroBatch) -> list[int]:
        """For each layer the first one that is like it."""
        return numbered_kinds(batch, self.kinds)


def _traced(batch: MicroBatch, parts: Sequence[_Part]) -> dict[_Part, PassEvents]:
    def trace(meta: bool) -> dict[_Part, PassEvents]:
        with recorded_stages(batch, meta) as (fakes, recorder):
            return {part: _trace(fakes, recorder, part) for part in parts}

    return planned(batch, trace)


def _nothing_recomputed(batch: MicroBatch) -> MicroBatch:
    """Equal for micro-batches that do the same at the ends of the model, where layers stand with multi-token prediction
    alone."""
    if batch.model.mtp_depths:
        return batch
    none: dict[str, Any] = dict.fromkeys(field.name for field in fields(RecomputeConfig))
    return replace(batch, model=replace(batch.model, **none))


def _parts(batch: MicroBatch, stage: Stage, alike: Sequence[int]) -> Iterator[_Part]:
    if stage.first:
        yield _Part(None, first=True)
    for segment in recompute_segments(batch.model, len(stage.layers), batch.parallel.offloaded_layers):
        for place in segment.layers:
            yield _Part(alike[stage.layers[place]], segment.recompute, segment.offload)
    if stage.last:
        yield _Part(None, last=True)


@contextmanager
def recorded_stages(batch: MicroBatch, meta: bool = False) -> Iterator[tuple[FakeStages, Recorder]]:
    """`fake_stages` whose kernels and collectives are recorded, on GPUs those that GPUs have."""
    on_gpu = batch.device == "cuda"
    asked = batch.parallel.attention_backend
    recorder = Recorder(on_gpu and not batch.bf16_sums, "auto" if asked == "triton" else asked)
    kernel = RecordedKernel(recorder)
    stand_ins: list[tuple[Any, str, Any]] = [
        (FakeGroup, "observer", staticmethod(recorder.collective)),
        (compiled_regions, "_compiled", lambda function, static: recorder.region(function)),
    ]
    if on_gpu:
        stand_ins += [
            (casts, "add_fp8_product_", _recorded_weight_grad(recorder)),
            (experts, "add_each_product_", _recorded_expert_grads(recorder)),
            (casts, "dequantized_mm", _recorded_scaled_mm(recorder)),
            (casts, "multiplies_in_fp8", lambda x: False),
        ]
    if on_gpu and asked != "unfused":
        stand_ins.append((core_attention, "kernels_of", lambda *args: (kernel, kernel)))
    if on_gpu and plans_fused_dropout(batch.model, batch.parallel):
        dropout = lambda backend, scale, masks: RecordedDropoutKernel(recorder, scale, masks)  # noqa: E731
        stand_ins.append((core_attention, "dropout_kernel", dropout))
    with fake_stages(batch, meta) as fakes, ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            stack.enter_context(replaced(owner, name, stand_in))
        stack.enter_context(recorder)
        yield fakes, recorder


def _recorded_weight_grad(recorder: Recorder) -> Any:
    def add_product_(out: Tensor, dy: Scaled, x: Scaled, overwrite: bool) -> None:
        """out [o, i] += dy [o, n] x [i, n]^T"""
        recorder.product("fp8_", dy.values, x.values.t(), out, {"beta": not overwrite})

    return add_product_


def _recorded_expert_grads(recorder: Recorder) -> Any:
    def add_each_product_(out: Tensor, dy: Tensor, x: Tensor, segments: Segments) -> None:
        """out [experts, o, i] += dy_e [n_e, o]^T x_e [n_e, i] for each expert: one product for each number of rows is
        looked at."""

        def product_of(rows: int) -> Product:
            return recorder.product_of("addmm_", dy[:rows].t(), x[:rows], out[0], {})

        sizes = [rows for rows in segments.sizes_of(x) if rows]
        each = {rows: product_of(rows) for rows in dict.fromkeys(sizes)}
        for rows in sizes:
            recorder.add(each[rows])

    return add_each_product_


def _recorded_scaled_mm(recorder: Recorder) -> Any:
    def scaled_mm(a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """a [n, k], b [m, k] -> [n, m]"""
        out = torch.empty(a.values.shape[0], b.values.shape[0], dtype=out_dtype)
        recorder.product("fp8", a.values, b.values.t(), out, {})
        return out

    return scaled_mm


def _trace(fakes: FakeStages, recorder: Recorder, part: _Part) -> PassEvents:
    layers = [] if part.layer is None else [part.layer]
    segments = [Segment(range(1), part.recompute, part.offload)] if layers else []
    with recorder.one_kernel():
        stage = fakes.build(layers, part.first, part.last, segments)
    with fakes.casts.kept():
        passes = _run(fakes, recorder, stage)
        if linear_format(fakes.parallel) is None:
            return passes
        again = _run(fakes, recorder, stage)
    extra = [event for event in passes.forward if event not in set(again.forward)]
    return replace(again, once=tuple(extra))


def _run(fakes: FakeStages, recorder: Recorder, stage: GPTModel) -> PassEvents:
    """One micro-batch through a part and back, as the executor runs it."""
    if fakes.offload is not None:
        fakes.offload.pool, fakes.offload.sent = fakes.offload.new_pool(), 0
    recorder.take()
    _, output = fakes.forward(stage)
    forward = recorder.take()
    edge = get_gradient_edge(output)
    with recorder.one_kernel():
        grad = torch.ones((), dtype=fakes.loss_dtype) if output.ndim == 0 else fakes.hidden()
    split = splits_backward(fakes.parallel.schedule)
    if split:
        fakes.queue.begin(0)
    torch.autograd.backward([edge], [grad])
    backward = recorder.take()
    if split:
        fakes.queue.end()
        fakes.queue.run(0)
    offloaded = fakes.offload.sent if fakes.offload is not None else 0
    return PassEvents(forward, backward, recorder.take(), (), offloaded)
