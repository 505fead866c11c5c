"""Records the kernels and collectives of a stage's parts as events: what one layer of each kind, and the two ends of
the model, do with a micro-batch.

Operations outside compiled regions are one kernel each: a tensor is read or written once, views are free. A compiled
region, and a cast that one kernel does on GPUs, counts its inputs and outputs only; its backward computes the forward
again from the inputs, as the compiler's does. Fake kernels stand for FlashAttention and cuDNN, whatever the tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from megatron.core import compiled_regions
from megatron.core.attention import core_attention
from megatron.core.attention.varlen import Lengths, Window
from megatron.core.config.layers import Span
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.moe import experts
from megatron.core.parts import linear_format
from megatron.core.pipeline_parallel.stages import Stage
from megatron.extensions.fp8 import casts
from megatron.extensions.planner import as_on_gpus
from megatron.extensions.planner.as_on_gpus import FakeKernel, PlannedFlash, replaced
from megatron.extensions.planner.fake_stage import (
    FakeStages,
    MicroBatch,
    Part,
    PartCache,
    StageParts,
    Unit,
    done,
    fake_stages,
    planned,
)
from megatron.extensions.planner.time.replay import Attention, Collective, Event, Move, PassEvents, Product, Wait

FREE = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided detach alias lift_fresh _local_scalar_dense set_ "
    "resize_ resize_storage_bytes_ record_stream is_same_size device".split()
)
"""Operations without a kernel."""

INDEXED = frozenset("embedding gather index index_select index_put_ index_add_ scatter_ take_along_dim".split())
"""Operations that touch only some elements of their first tensor."""

PRODUCTS: dict[str, int] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"), 0),
    **dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_"), 1),
}
"""Name -> the place of the first factor among the arguments."""

ATTENTION_OF_CPUS = "_scaled_dot_product_flash_attention_for_cpu"


def size_of(x: Tensor) -> int:
    """Bytes of the distinct elements of `x`."""
    return prod(n if s else 1 for n, s in zip(x.shape, x.stride(), strict=True)) * x.element_size()


def total_size(values: Any) -> int:
    """Bytes of the tensors among `values`, each once."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
    return sum(map(size_of, tensors.values()))


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


COLLECTIVES = {
    "allreduce_": ("all_reduce", 0, 1),
    "_allgather_base_": ("all_gather", 0, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "alltoall_base_": ("all_to_all", 1, 2),
    "send": ("send", 0, 1),
}
"""Operator -> its kind, and the places of the whole operand and of the group among the arguments. A `recv` moves what a
send does."""


class _Recorded(dist.Work):
    """A collective in flight."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        super().__init__()
        self.recorder, self.number = recorder, number

    def wait(self, *timeout: Any) -> bool:
        if self.recorder.works.pop(self.number, None) is not None:
            self.recorder.add(Wait(self.number))
        return True


class Recorder(TorchDispatchMode):
    """Appends the events of what runs to `events`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of `megatron.extensions.planner.fake_stage`'s mode

    def __init__(self, fp32_sums: bool, backend: str) -> None:
        """`fp32_sums`: gradients of 16-bit weights are summed in fp32. `backend`: of fused attention."""
        super().__init__()
        self.events: list[Event] = []
        self.fp32_sums, self.backend = fp32_sums, backend
        self._quiet = self._numbers = 0
        self.works: dict[int, _Recorded] = {}
        """Collectives in flight by number: torch alone does not keep their Python part."""

        self._changed: set[int] | None = None
        """Storages that the region which runs just now has written, made ones too."""

    def take(self) -> tuple[Event, ...]:
        """The events so far, which are forgotten."""
        events, self.events = tuple(self.events), []
        return events

    def add(self, event: Event) -> None:
        if not self._quiet:
            self.events.append(event)

    @contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Records nothing of what runs in here."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._quiet and func._overloadpacket.__name__ in COLLECTIVES:
            return done(func, args, self._collective(func._overloadpacket.__name__, args))
        out = func(*args, **kwargs)
        if not self._quiet:
            self._record(func, args, kwargs, out)
        elif self._changed is not None:
            self._changed.update(_storage(args[i]) for i in _written(func) if isinstance(args[i], Tensor))
        return out

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        name = func._overloadpacket.__name__
        if name in FREE or name.startswith("sym_"):
            return
        if name in PRODUCTS:
            first = PRODUCTS[name]
            self.product(name, args[first], args[first + 1], args[0] if name.endswith("_") else out, kwargs)
        elif name.startswith(ATTENTION_OF_CPUS):
            self._attention(args, name.endswith("_backward"))
        else:
            self._element_wise(name, func, args, kwargs, out)

    def product(self, name: str, a: Tensor, b: Tensor, out: Tensor, kwargs: dict[str, Any]) -> None:
        """A product of a [m, k] or [batches, m, k] and b [k, n]; grouped ones are even over their groups."""
        batches, (m, k), n = 1, a.shape[-2:], b.shape[-1]
        if "bmm" in name:
            batches = a.shape[0]
        elif "grouped" in name:
            batches = b.shape[0] if b.ndim == 3 else out.shape[0]
            m, k = (m // batches, k) if b.ndim == 3 and a.ndim == 2 else (m, k // batches) if a.ndim == 2 else (m, k)
        added = name.endswith("_") or kwargs.get("out") is not None
        whole = size_of(out) * (2 if self.fp32_sums and out.element_size() == 2 else 1)
        sums = 2 * whole if added and kwargs.get("beta", 1) else 0
        moved = size_of(a) + size_of(b) + (0 if sums else whole if added else size_of(out))
        self.add(Product(precision_of(a), int(m), int(n), int(k), int(batches), moved, sums, "grouped" in name))

    def add_fp8_product_(self, out: Tensor, dy: casts.Scaled, x: casts.Scaled, overwrite: bool) -> None:
        """out [o, i] += dy [o, n] x [i, n]^T"""
        self.product("fp8_", dy.values, x.values.t(), out, {"beta": not overwrite})

    def dequantized_mm(
        self, a: casts.Scaled, b: casts.Scaled, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """a [n, k], b [m, k] -> [n, m]"""
        out = torch.empty(a.values.shape[0], b.values.shape[0], dtype=out_dtype)
        self.product("fp8", a.values, b.values.t(), out, {})
        return out

    def add_each_product_(self, out: Tensor, dy: Tensor, x: Tensor, segments: experts.Segments) -> None:
        """out [experts, o, i] += dy_e [n_e, o]^T x_e [n_e, i] for each expert."""
        for rows in filter(None, segments.sizes_of(x)):
            self.product("addmm_", dy[:rows].t(), x[:rows], out[0], {})

    def _attention(self, args: Any, backward: bool) -> None:
        """Causal attention of q [b, heads, s, d] with k and v [b, groups, s, d]."""
        q, k, v = args[1:4] if backward else args[:3]
        batch, heads, length, width = q.shape
        self.attention(batch * heads * length * k.shape[2] / 2, width, v.shape[3], k.shape[2], backward)

    def attention(
        self, pairs: float, width: int, value_width: int, length: int, backward: bool, dropout: bool = False
    ) -> None:
        """A launch of a fused kernel for this number of query-key pairs, of all heads. With `dropout` both passes of
        the backward: each computes the scores and their gradients again, and hashes the masks."""
        passes = 1 + dropout
        of_pair = (2 + passes) * width + (1 + passes) * value_width if backward else width + value_width
        hashes = float(pairs * (passes if backward else 1) * dropout)
        backend, flops = "triton" if dropout else self.backend, 2 * pairs * of_pair
        self.add(Attention(backend, max(width, value_width), flops, length, backward, hashes))

    def _element_wise(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        given, made = _tensors((args, kwargs)), _tensors(out)
        written = _tensors([args[i] for i in _written(func) if i < len(args)])
        if not written and {_storage(x) for x in made} <= {_storage(x) for x in given}:
            return  # views, and operations without tensors
        if name in INDEXED:
            rows = sum(map(size_of, made)) if not written else max((size_of(x) for x in given[1:]), default=0)
            self.add(Move(2 * rows + sum(size_of(x) for x in given[1:]) * (not written)))
            return
        overwrites = name in ("copy_", "fill_", "zero_")
        read = sum(size_of(x) for x in given if not (overwrites and any(x is y for y in written)))
        self.add(Move(read + sum(map(size_of, written or made))))

    def _collective(self, name: str, args: Any) -> dist.Work:
        kind, operand, group = COLLECTIVES[name]
        self._numbers += 1
        axis: str = dist.ProcessGroup.unbox(args[group]).axis  # type: ignore[attr-defined]  # of a `FakeGroup`
        self.add(Collective(kind, total_size(args[operand]), axis, self._numbers))
        self.works[self._numbers] = _Recorded(self, self._numbers)
        return self.works[self._numbers]

    def region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as one kernel forward and one backward."""

        @wraps(function)
        def run(*args: Any) -> Any:
            leaves, tree = tree_flatten(args)
            if not (torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(leaves))):
                return self._without_graph(function, args, _tensors(leaves))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            outs: list[Any] = []

            def rebuilt(tensors: tuple[Tensor, ...]) -> Any:
                for place, tensor in zip(places, tensors, strict=True):
                    leaves[place] = tensor
                return function(*tree_unflatten(leaves, tree))

            tensors = _Region.apply(self, rebuilt, outs, *(leaves[i] for i in places))
            found, form = outs
            results = iter(tensors if isinstance(tensors, tuple) else (tensors,))
            return tree_unflatten([next(results) if isinstance(leaf, Tensor) else leaf for leaf in found], form)

        return run

    def _without_graph(self, function: Callable[..., Any], args: Any, given: list[Tensor]) -> Any:
        """A region whose backward nobody asks for; it may write its inputs."""
        outer, self._changed = self._changed, set()
        with self.one_kernel():
            out = function(*args)
        changed, self._changed = self._changed, outer
        known = {_storage(x) for x in given}
        made = [x for x in _tensors(out) if _storage(x) not in known]
        self.add(Move(total_size(given) + total_size(made) + total_size([x for x in given if _storage(x) in changed])))
        return out


class _Region(torch.autograd.Function):
    """A compiled region: one kernel in each direction."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, function: Callable[..., Any], outs: list[Any], *tensors: Tensor) -> Any:
        with recorder.one_kernel():
            leaves, form = tree_flatten(function(tensors))
        outs += [leaves, form]
        made = tuple(leaf.view_as(leaf) if any(leaf is x for x in tensors) else leaf for leaf in _tensors(leaves))
        recorder.add(Move(total_size(tensors) + total_size(made)))
        ctx.recorder, ctx.function = recorder, function
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(x for x in made if not x.is_floating_point()))
        return made if len(made) > 1 else made[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors, recorder = ctx.saved_tensors, ctx.recorder
        with recorder.one_kernel(), torch.enable_grad():
            needed = [need and x.is_floating_point() for need, x in zip(ctx.needs_input_grad[3:], tensors, strict=True)]
            given = tuple(x.detach().requires_grad_(need) for x, need in zip(tensors, needed, strict=True))
            outs = _tensors(ctx.function(given))
            pairs = [(y, grad) for y, grad in zip(outs, grads, strict=True) if y.requires_grad and grad is not None]
            wanted = [x for x, need in zip(given, needed, strict=True) if need]
            found = torch.autograd.grad([y for y, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)
        recorder.add(Move(total_size(grads) + total_size(tensors) + total_size(found)))
        results = iter(found)
        return None, None, None, *(next(results) if need else None for need in needed)


def precision_of(x: Tensor) -> str:
    """Name of the rate of products of such operands."""
    return {1: "fp8", 2: "bf16", 4: "fp32"}.get(x.element_size(), "fp64")


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _written(func: Any) -> list[int]:
    """Places of the arguments that an operation writes."""
    arguments = func._schema.arguments
    return [i for i, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write]


@dataclass(frozen=True)
class RecordedPackedKernel(PlannedFlash):
    """Whole samples, packed one after another."""

    recorder: Recorder

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, window: Window) -> tuple[Tensor, Tensor]:
        self._launch(q, v, lengths, window, False)
        return super().forward(q, k, v, lengths, window)

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, ...], lengths: Lengths, window: Window
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._launch(qkv[0], qkv[2], lengths, window, True)
        return super().backward(grad, qkv, kept, lengths, window)

    def _launch(self, q: Tensor, v: Tensor, lengths: Lengths, window: Window, backward: bool) -> None:
        (rows, heads, width), longest = q.shape, lengths[2]
        seen = Span(window[0] + 1 or None).mean(longest)
        self.recorder.attention(rows * heads * seen, width, v.shape[-1], longest, backward)


class PlannerCache(PartCache[PassEvents]):
    """What parts of stages do, shared by predictions of many layouts."""

    def parts_of(self, batch: MicroBatch, stages: Sequence[Stage]) -> list[list[PassEvents]]:
        """By stage, the parts that it runs in order: the embedding, single layers, the head."""
        parts = StageParts(batch, self, _traced)
        wanted = [list(_parts(stage, parts.units(stage))) for stage in stages]
        events = iter(parts.of([part for own in wanted for part in own]))
        return [[next(events) for _ in own] for own in wanted]


def _parts(stage: Stage, units: Sequence[Unit]) -> Iterator[Part]:
    if stage.first:
        yield Part(first=True)
    yield from (Part((unit._replace(layers=(number,)),)) for unit in units for number in unit.layers)
    if stage.last:
        yield Part(last=True)


def _traced(batch: MicroBatch, parts: Sequence[Part]) -> list[PassEvents]:
    def trace(meta: bool) -> list[PassEvents]:
        with recorded_stages(batch, meta) as (fakes, recorder):
            return [_trace(fakes, recorder, part) for part in parts]

    return planned(batch, trace)


@contextmanager
def recorded_stages(batch: MicroBatch, meta: bool = False) -> Iterator[tuple[FakeStages, Recorder]]:
    """`fake_stages` whose kernels and collectives are recorded, on GPUs those that GPUs have."""
    on_gpu = batch.device == "cuda"
    asked = batch.parallel.attention_backend
    recorder = Recorder(on_gpu and not batch.bf16_sums, "auto" if asked == "triton" else asked)
    kernel = FakeKernel(packed=RecordedPackedKernel(recorder))
    stand_ins: list[tuple[Any, str, Any]] = [
        (compiled_regions, "_compiled", lambda function, static: recorder.region(function)),
        (as_on_gpus, "launched", recorder.attention),
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
    with fake_stages(batch, meta) as fakes, replaced(*stand_ins), recorder:
        yield fakes, recorder


def _trace(fakes: FakeStages, recorder: Recorder, part: Part) -> PassEvents:
    with recorder.one_kernel():
        stage = fakes.build(part)
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
