"""Traces of a stage's parts: what one layer of each kind, and the two ends of the model, do with a micro-batch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron.core import compiled_regions
from megatron.core.attention import core_attention
from megatron.core.config.layers import RecomputeConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.moe import experts
from megatron.core.parts import linear_format
from megatron.core.pipeline_parallel.stages import Stage
from megatron.core.transformer.recompute import Segment, recompute_segments
from megatron.extensions.fp8 import casts
from megatron.extensions.planner.as_on_gpus import plans_fused_dropout, replaced
from megatron.extensions.planner.fake_stage import (
    FakeStages,
    MicroBatch,
    fake_stages,
    in_a_layer,
    nothing_offloaded,
    numbered_kinds,
    planned,
)
from megatron.extensions.planner.time.recorder import RecordedDropoutKernel, RecordedKernel, Recorder
from megatron.extensions.planner.time.replay import PassEvents


@dataclass(frozen=True)
class _Part:
    """A layer, or with `layer` None an end of the model."""

    layer: int | None
    recompute: bool = False
    offload: bool = False
    first: bool = False
    last: bool = False


@dataclass
class PlannerCache:
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
        (compiled_regions, "_compiled", lambda function, static: recorder.region(function)),
    ]
    if on_gpu:
        stand_ins += [
            (casts, "add_fp8_product_", recorder.add_fp8_product_),
            (experts, "add_each_product_", recorder.add_each_product_),
            (casts, "dequantized_mm", recorder.dequantized_mm),
            (casts, "multiplies_in_fp8", lambda x: False),
        ]
    if on_gpu and asked != "unfused":
        stand_ins.append((core_attention, "kernels_of", lambda *args: (kernel, kernel)))
    if on_gpu and plans_fused_dropout(batch.model, batch.parallel):
        dropout = lambda backend, scale, masks: RecordedDropoutKernel(recorder, scale, masks)  # noqa: E731
        stand_ins.append((core_attention, "dropout_kernel", dropout))
    with fake_stages(batch, meta) as fakes, replaced(*stand_ins), recorder:
        yield fakes, recorder


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
    """One micro-batch through a part and back."""
    recorder.take()
    events = {part: recorder.take() for part in fakes.passes(stage)}
    return PassEvents(events["forward"], events["backward"], events["weight"], (), fakes.offloaded)
