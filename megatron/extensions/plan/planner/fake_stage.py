"""Run one pipeline stage on fake tensors, which have shapes, storages and an autograd graph but no values.

The saved activations, allocations and matrix products of a layer are recorded while the stage runs, so the code
contains no formulas for layers.

Process groups are fake: collectives complete at once and move no data, so shapes and memory are those of a real rank.
torch's "fake" backend would need the default process group, which the caller may already use for real ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.batch import Batch
from megatron.core.config.layers import Rotation, Span
from megatron.core.config.model import TransformerConfig
from megatron.core.config.model_fields import RecomputeConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.pipeline_parallel.layout import Stage
from megatron.core.pipeline_parallel.schedules import splits_backward
from megatron.core.pipeline_parallel.stage_parameters import built_layers
from megatron.core.tensor_parallel.layers import Hardware
from megatron.core.tensor_parallel.linear_formats import linear_format
from megatron.core.tensor_parallel.linear_gemms import WeightCasts
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue, rounding_sum
from megatron.core.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    fake_work,
    grouped_mm_overload,
    known_groups,
    local_scalar_overload,
)
from megatron.core.transformer.activation_store import build_store
from megatron.core.transformer.pass_context import PassContext
from megatron.core.transformer.recompute import Segment, recompute_segments
from megatron.extensions.plan.planner.as_on_gpus import (
    PlannedFunctions,
    PlannedGPU,
    PlannedHardware,
    PlannedRegions,
    plans_fused_dropout,
)
from megatron.extensions.plan.planner.micro_batch import MicroBatch, in_a_layer
from megatron.extensions.plan.planner.time.events import BufferCounts, Collective, PassEvents, StageMemory, Wait
from megatron.extensions.plan.planner.time.recorder import Recorder, done
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.extensions.speed.fusions.flags import Fusions
from megatron.training.config.flags import with_named
from megatron.training.config.run_config import RunConfig


class FakeGroup(dist.ProcessGroup):
    """Fake process group of `size` ranks, in which this process is rank 0."""

    axis = ""
    """Name of the mesh axis."""


@contextmanager
def fake_state(parallel: ModelParallelConfig, exchanges_sums: bool = True) -> Iterator[ParallelState]:
    """Yield the parallel state of a layout's first model-parallel rank, as needed to build and run a stage.
    `exchanges_sums` is passed to each `Axis`."""
    groups: list[FakeGroup] = []
    known = known_groups()

    def axis(name: str, size: int) -> Axis:
        if size == 1:
            return Axis()
        group = FakeGroup(0, size)  # type: ignore[call-arg]
        group.axis = name
        groups.append(group)
        # torch looks up the global ranks of point-to-point messages in this mapping.
        known.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        known.pg_map[group] = ("fake", None)  # type: ignore[assignment]
        return Axis(group, 0, size, tuple(range(size)), exchanges_sums)

    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    ep, expt_tp = parallel.expert_model_parallel_size, parallel.expert_tp
    sizes = {"tp": tp, "cp": cp, "ep": ep, "expt_tp": expt_tp, "expt_tp_ep": expt_tp * ep, "tp_cp": tp * cp}
    if parallel.nests_context:
        sizes |= {"cp_inner": parallel.ranks_by_heads, "cp_outer": parallel.ranks_by_queries}
    axes = {name: axis(name, size) for name, size in sizes.items()}
    if parallel.nests_context:
        axes["cp"] = replace(axes["cp"], levels=(axes["cp_inner"], axes["cp_outer"]))
    try:
        yield ParallelState(ParallelDims(tp=tp, cp=cp), 0, axes)
    finally:
        for group in groups:
            del known.pg_group_ranks[group], known.pg_map[group]


T = TypeVar("T")


ANSWERS: dict[object, Callable[..., object]] = {
    local_scalar_overload: lambda x: 0.0 if x.is_floating_point() else 0,
    grouped_mm_overload: lambda x, y, *more, **options: x.new_empty(x.shape[0], y.shape[-1]),
    torch.ops.aten.addmm.dtype_out: lambda *args, out, **options: out,
    torch.ops.prim.device.default: lambda x: x.fake_device,
}
"""Substitutes for operators that torch does not support on fake tensors. Numbers read from tensors are 0, and the
results of products have the right shape and dtype. torch supports the device query, but the substitute is faster."""


class NoValues(TorchDispatchMode):
    """Dispatch mode that runs the substitutes in `ANSWERS` for operators, and completes collectives immediately."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no code is compiled here, and checking for compilation at every operation is slow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            return done(func, args, fake_work())
        return ANSWERS.get(func, func)(*args, **(kwargs or {}))


WITHOUT_GROUPS = {"tp_comm_overlap_method": None}
"""Configuration fields that are reset because process groups are fake. The symmetric-memory method saves the same
tensors for backward as the default method, a ring."""


class Unit(NamedTuple):
    """Unit of recomputation: layers that are recomputed together, or a single layer that is not recomputed."""

    layers: tuple[int, ...]
    recompute: bool = False
    offload: bool = False


class Part(NamedTuple):
    """Part of a stage that is run separately: units of layers, the embedding if `first`, and the head if `last`."""

    units: tuple[Unit, ...] = ()
    first: bool = False
    last: bool = False


class FakeStages:
    """Stages of one configuration, built on fake tensors. Use `FakeStages` only within `fake_stages`."""

    def __init__(
        self, batch: MicroBatch, state: ParallelState, device: str, recorder: Recorder, hardware: Hardware
    ) -> None:
        self.recorder, self.hardware = recorder, hardware
        run = RunConfig(parallel=batch.parallel, extension_options=batch.parallel.extension_options)
        run = with_named(run, WITHOUT_GROUPS)
        self.batch = batch
        self.state = state
        self.device = device
        self.parallel = parallel = replace(run.parallel, compile=batch.parallel.compiles(batch.device))
        self.queue, self.casts = WeightGradQueue(), WeightCasts()
        self.offload = build_store(parallel, self.device)
        self.on_host = list[int]()
        """Sizes in bytes of the buffers in host memory."""

        model = batch.model
        rows = model.seq_length // parallel.context_parallel_size
        rows //= parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        self.hidden_shape = rows, batch.samples, model.residual_size
        self.dtype: torch.dtype = getattr(torch, parallel.params_dtype)
        self.loss_dtype = torch.promote_types(self.dtype, torch.float32)
        tokens = torch.zeros(batch.samples, model.seq_length, dtype=torch.int64)
        whole = replace(
            Batch.of_tokens(tokens),
            position_ids=torch.zeros_like(tokens) if batch.own_positions else None,
            aux_scale=torch.ones((), dtype=torch.float64),
        )
        self.micro_batch = whole.with_future(model.mtp_depths).local_to(state.cp)

    def build(self, part: Part) -> GPTModel:
        """Build a part of a stage in training mode. Each parameter has a `main_grad`, as under data parallelism."""
        stage = GPTModel(
            self.batch.model,
            self.parallel,
            self.state,
            Stage([number for unit in part.units for number in unit.layers], part.first, part.last),
            passes=PassContext(self.queue, self.casts, offload=self.offload),
            weights=WeightSetup(self.device, initialize=False),
            hardware=self.hardware,
        ).train()
        ends = list(accumulate(len(unit.layers) for unit in part.units))
        stage.decoder.segments = [
            Segment(range(end - len(unit.layers), end), unit.recompute, unit.offload)
            for unit, end in zip(part.units, ends, strict=True)
        ]
        # GPUs add a 16-bit product to an fp32 gradient in one kernel; CPUs compute the product first.
        main = self.dtype if self.batch.device == "cuda" else getattr(torch, self.parallel.main_dtype)
        main = torch.bfloat16 if self.batch.bf16_sums else main
        round_into = rounding_sum(bool(self.parallel.compile)) if self.batch.bf16_sums else None
        for parameter in stage.parameters():
            if parameter.requires_grad:
                parameter.main_grad = torch.empty(parameter.shape, dtype=main)  # type: ignore[attr-defined]
                parameter.main_grad_rounding = round_into  # type: ignore[attr-defined]
                parameter.register_post_accumulate_grad_hook(_drop_grad)
        return stage

    def record(self, part: Part) -> PassEvents:
        """Record the forward and backward events and the memory of one micro-batch in a part of a stage."""
        stage = self.build(part)
        with self.casts.kept():
            first = found = self._recorded(stage)
            if linear_format(self.parallel) is not None:  # the first micro-batch also creates the weight copies
                found = self._recorded(stage)
            memory = replace(found.memory, weight_copies=self.casts.nbytes)
        usual = {*found.forward} | {event for event in first.forward if isinstance(event, Collective | Wait)}
        once = () if found is first else tuple(event for event in first.forward if event not in usual)
        return replace(found, once=once, memory=memory)

    def _recorded(self, stage: GPTModel) -> PassEvents:
        """Run the forward and backward pass of one micro-batch through a stage in the same way as the executor."""
        live = self.recorder
        peak = dict[str, int]()
        held = dict[str, int]()
        events = {}

        def end(part: str) -> None:
            peak[part] = live.peak
            held[part] = live.now
            events[part] = live.take()
            live.restart_peak()

        live.begin()
        if self.offload is not None:
            self.on_host = live.count_apart(self.offload.reset())
        with live:
            hidden = None if stage.first else torch.empty(self.hidden_shape, dtype=self.dtype).requires_grad_()
            output = stage(hidden, self.micro_batch)
            offloaded = self.offload.sent if self.offload is not None else 0
            end("forward")
            edge, last = get_gradient_edge(output), output.ndim == 0
            del output  # the values of this tensor have been sent, but its autograd node is still needed
            end("sent")
            grad = torch.ones((), dtype=self.loss_dtype) if last else torch.empty(self.hidden_shape, dtype=self.dtype)
            end("received")
            if split := splits_backward(self.parallel.schedule):
                self.queue.begin(0)
            torch.autograd.backward([edge], [grad])
            end("backward")
            del hidden, edge, grad
            end("done")
            if split:
                self.queue.end()
                self.queue.run(0)
            end("weight")
        peaks, host = (peak["forward"], peak["backward"], peak["weight"]), BufferCounts(Counter(self.on_host))
        memory = StageMemory(held["sent"], held["done"], *peaks, offloaded=offloaded, host=host)
        return PassEvents(events["forward"], events["backward"], events["weight"], memory=memory)


class LayersKey(NamedTuple):
    """Cache key of a configuration's layers. Configurations with identical layers have equal keys in all layouts."""

    model: TransformerConfig
    number_formats: Hashable


def numbered_kinds(batch: MicroBatch, known: dict[LayersKey, tuple[int, ...]]) -> tuple[int, ...]:
    """For each layer, return the number of the first layer with the same modules, shapes and settings. `known` caches
    results for layouts with the same layers."""
    plain = replace(
        batch.parallel,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        sequence_parallel=False,
        compile=False,  # no compiled code runs here, and loading the compiler takes a second
    )
    own, model = plain.options(Fp8Flags), batch.model
    key = LayersKey(model, (own.fp8_format, own.fp8_recipe, own.layers(model.num_layers)))
    if key not in known:
        first: dict[Hashable, int] = {}
        layers = _layers_of(model, plain)
        known[key] = tuple(first.setdefault(_kind_of(layer), number) for number, layer in enumerate(layers))
    return known[key]


def _layers_of(model: TransformerConfig, parallel: ModelParallelConfig) -> Iterable[nn.Module]:
    """Return a model's layers on the meta device, where building a layer is ten times as fast as with fake tensors."""
    if not parallel.extension_options:  # extension options may make layers differ from each other
        return built_layers(model, False)
    layers = Stage(range(model.num_layers), first=False, last=False)
    with fake_state(parallel) as state:
        stage = GPTModel(model, parallel, state, layers, weights=WeightSetup("meta", initialize=False))
    return stage.decoder.layers


@dataclass
class PlannerCache:
    """Cache for recordings of stage parts, shared by configurations whose layers do the same work."""

    kinds: dict[LayersKey, tuple[int, ...]] = field(default_factory=dict)
    """Layer kinds of each model: for each layer, the number of the first layer that is identical to it."""

    known: dict[MicroBatch, dict[Part, PassEvents]] = field(default_factory=dict)
    """Recordings of stage parts, keyed first by micro-batch and then by part."""

    def kinds_of(self, model: TransformerConfig) -> tuple[int, ...] | None:
        """Return each layer's kind, which identical layers share. Return None for a model without a plan."""
        return next((kinds for key, kinds in self.kinds.items() if key.model == model), None)

    def parts_of(self, batch: MicroBatch, stages: Sequence[Stage]) -> list[list[PassEvents]]:
        """Return the recordings of each stage's parts in order: the embedding, single layers, and the head."""
        parts = StageParts(batch, self)
        return [parts.of(list(parts.single(stage))) for stage in stages]


class StageParts:
    """Recordings of parts of pipeline stages, such as single layers. Parts that do the same work are run only once."""

    def __init__(
        self, batch: MicroBatch, cache: PlannerCache | None = None, kinds: tuple[int, ...] | None = None
    ) -> None:
        """Prepare recordings, which are made on first use. `cache` keeps recordings of other configurations. `kinds`
        contains the kind of each layer; by default, all layers are built to find out which layers are identical."""
        self.batch, cache = batch, cache or PlannerCache()
        self._alike = numbered_kinds(batch, cache.kinds) if kinds is None else kinds
        kept = replace(batch, parallel=batch.parallel.with_offloaded_layers(0))
        # The work of a part without offloading does not depend on other layers' offloading. The work of the embedding
        # and the head does not depend on recomputation in layers. Without the head, the loss chunk size has no effect.
        inner = replace(kept, parallel=replace(kept.parallel, loss_chunk_tokens=None))
        same = {"offloaded": batch, "kept": kept, "inner": inner, "ends": _nothing_recomputed(kept)}
        self._of_kind = {kind: (each, cache.known.setdefault(in_a_layer(each), {})) for kind, each in same.items()}

    def units(self, stage: Stage) -> list[Unit]:
        """Return the units of a stage: groups of layers that are recomputed together, and single layers."""
        segments = recompute_segments(self.batch.model, len(stage.layers), self.batch.parallel.offloaded_layers)
        return [Unit(tuple(stage.layers[i] for i in each.layers), each.recompute, each.offload) for each in segments]

    def single(self, stage: Stage) -> Iterator[Part]:
        """Yield each layer and, if the stage contains them, the embedding and the head as separate parts."""
        if stage.first:
            yield Part(first=True)
        yield from (Part((unit._replace(layers=(number,)),)) for unit in self.units(stage) for number in unit.layers)
        if stage.last:
            yield Part(last=True)

    def kinds(self, unit: Unit) -> tuple[int, ...]:
        """Return, for each layer of a unit, the number of the first layer that is identical to it."""
        return tuple(self._alike[number] for number in unit.layers)

    def of(self, parts: Sequence[Part]) -> list[PassEvents]:
        """Return the recordings of `parts`. Parts without a recording are run first; all parts of one kind run under
        the same fake mode."""
        keys = [
            part._replace(units=tuple(unit._replace(layers=self.kinds(unit)) for unit in part.units)) for part in parts
        ]
        found: dict[Part, PassEvents] = {}
        for kind, (batch, known) in self._of_kind.items():
            own = {key: part for key, part in zip(keys, parts, strict=True) if _kind_of_part(part) == kind}
            if missing := {key: part for key, part in own.items() if key not in known}:
                known |= zip(missing, _recorded(batch, list(missing.values())), strict=True)
            found |= {key: known[key] for key in own}
        return [found[key] for key in keys]


def _kind_of_part(part: Part) -> str:
    if not part.units:
        return "ends"
    if any(unit.offload for unit in part.units):
        return "offloaded"
    return "kept" if part.last else "inner"


def _nothing_recomputed(batch: MicroBatch) -> MicroBatch:
    """Return the cache key of the embedding and the head. Recomputation affects them only with multi-token
    prediction."""
    if batch.model.mtp_depths:
        return batch
    none: dict[str, Any] = dict.fromkeys(each.name for each in fields(RecomputeConfig))
    return replace(batch, model=replace(batch.model, **none))


IDENTITY = ("number", "layer", "key", "training")
"""Names of module attributes that are ignored when layers are compared."""

SETTINGS = bool | int | float | str | Span | Rotation
"""Types of the module attributes that are compared to decide whether two layers are identical."""


def _kind_of(layer: nn.Module) -> Hashable:
    found: list[object] = []
    for name, part in layer.named_modules():
        settings = ((key, value) for key, value in vars(part).items() if isinstance(value, SETTINGS))
        found += [name, type(part), *((key, value) for key, value in settings if key not in IDENTITY)]
    found += [(name, parameter.shape, parameter.dtype) for name, parameter in layer.named_parameters()]
    return tuple(found)


def _drop_grad(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def fake_stages(batch: MicroBatch, meta: bool = False) -> Iterator[FakeStages]:
    """Build the stages of a layout's first rank on fake or meta tensors. Existing process groups are not affected."""
    on_gpus, backend = batch.device == "cuda", batch.parallel.attention_backend
    of_others = "auto" if backend == "triton" or backend.startswith("fp8") else backend
    live = Recorder(on_gpus and not batch.bf16_sums, of_others, not batch.deterministic)
    hardware: Hardware = PlannedHardware(launches=live)
    functions: list[AbstractContextManager[object]] = [torch.device("meta")] if meta else []
    if on_gpus:
        dropout = plans_fused_dropout(batch.model, batch.parallel)
        hardware = PlannedGPU(launches=live, fused_dropout=dropout, packs=batch.packs)
        fused = batch.packs and batch.model.options(Fusions).fusions
        functions = [PlannedFunctions(live, live, "meta" if meta else None, fused)]
    elif batch.parallel.compiles(batch.device):
        functions.append(PlannedRegions(live))
    tensors = nullcontext() if meta else FakeTensorMode()
    # The recorder recognizes attention by torch's flash kernel, which a GPU run may have disabled: enable it here.
    seen = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    with fake_state(batch.parallel, not on_gpus) as state, tensors, NoValues(), ExitStack() as stack, seen:
        for mode in functions:
            stack.enter_context(mode)
        yield FakeStages(batch, state, "meta" if meta else "cpu", live, hardware)


def _recorded(batch: MicroBatch, parts: Sequence[Part]) -> list[PassEvents]:
    def recorded(meta: bool) -> list[PassEvents]:
        with fake_stages(batch, meta) as fakes:
            return [fakes.record(part) for part in parts]

    return planned(batch, recorded)


def planned(batch: MicroBatch, work: Callable[[bool], T]) -> T:
    """Return `work(meta)`, which runs stages on meta tensors if `meta` is True, and on fake tensors otherwise.

    Plans for GPUs use meta tensors, which are several times as fast as fake tensors. A plan falls back to fake tensors
    if a part does not run on meta tensors because it creates tensors on the host or reads several numbers at once."""
    if batch.device == "cuda":
        with suppress(Exception):  # the run on fake tensors reports the error
            return work(True)
    return work(False)
