"""Attention to selected keys with Triton kernels, which replace `attend_to_selected` and
`selected_attention_gradients`.

The kernels read one tensor that contains the keys of all key sets. Each query has one list with the indices of all keys
that the query attends to, over all key sets. A key in this list is called a listed key. The list also contains keys
that were not selected by an indexer, such as the keys of a window. An index of -1 marks an unused entry.

Key gradients are computed in one of two ways. Either the backward kernel accumulates the gradients in fp32 by atomic
additions, whose order is arbitrary, or a second pass sums the gradients in a fixed order. The second pass is used in
deterministic runs, and on GPUs without vectorized atomic additions (all except data center Hopper and Blackwell). The
second pass is also used if each query's list contains at least the fraction `DENSE` of all keys, because the second
pass is then faster than atomic additions. The second pass processes one block of keys at a time. For each block, the
second pass visits all queries between the first and the last query whose list contains a key of the block, and
multiplies each of these queries by all keys of the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import unwrap
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.tensor_parallel.layers import HARDWARE
from megatron.extensions.attention.sparse_attention.flags import SparseShape, sparse_shapes
from megatron.extensions.attention.sparse_attention.selected_attention import (
    Attended,
    Keys,
    Rows,
    attend_to_selected,
    attended_weights,
    selected_attention_gradients,
)
from megatron.extensions.attention.sparse_attention.selection import CHUNK, Queries, chunks_of, largest
from megatron.extensions.speed.fusions.kernel_choice import FusedKernel, RunShapes, gpu_operator, runs_triton

WIDEST_VALUES, WIDEST_REST = 512, 64
"""Largest numbers of channels that the kernels support: value channels per key, and other channels per key."""

DENSE = 0.16
"""If each query's list contains at least this fraction of all keys, key gradients are summed in a second pass instead
of by atomic additions. At this fraction, both methods take the same time according to the H200 rates in
`plan/planner/devices/h200.yaml`. These rates are assumptions, not measurements."""

_plain_attend, _plain_gradients = unwrap(attend_to_selected), unwrap(selected_attention_gradients)

SAMPLED = 1024
"""Largest number of queries in the test inputs with which the kernels are compared with plain PyTorch."""

TOLERANCE = 2.0**-6


def listed(queries: Queries, picked: Tensor | None, samples: int) -> Tensor:
    """Return the indices [n, b, count] of the keys that each query attends to, as int32 and padded with -1."""
    if picked is not None:
        return picked
    at = queries.first.unsqueeze(-1) + torch.arange(queries.most, device=queries.first.device)
    places = at.masked_fill(at > queries.last.unsqueeze(-1), -1).to(torch.int32)
    return places.expand(-1, samples, -1)


def joined_sets(seen: Sequence[Keys], k: Sequence[Tensor]) -> tuple[Tensor, Tensor, int]:
    """Concatenate the keys of all key sets. Return three values: all keys [s, b, w], the indices [n, b, count] of the
    keys that each query attends to, and the number of indices per query that belong to the first key set. The indices
    of the first key set come first."""
    samples = k[0].shape[1]
    places = list[Tensor]()
    before = first = 0
    for keys, each in zip(k, seen, strict=True):
        found = listed(each.queries, each.picked, samples)
        places.append(found if not before else torch.where(found < 0, found, found + before))
        before, first = before + len(keys), first or found.shape[-1]
    whole = k[0] if len(k) == 1 else torch.cat(tuple(k))
    return whole.contiguous(), places[0].contiguous() if len(places) == 1 else torch.cat(places, dim=-1), first


def adds_gradients(device: torch.device, keys: int, count: int) -> bool:
    """Return True if key gradients are accumulated by atomic additions instead of a second pass."""
    several = torch.cuda.get_device_capability(device)[0] in (9, 10)
    return several and not torch.are_deterministic_algorithms_enabled() and count < DENSE * keys


def fits(q: Tensor, width: int) -> bool:
    """Return True if the kernels support the dtype and shape of the queries q [n, b, h, w] and values with `width`
    channels."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    narrow = width <= WIDEST_VALUES and q.shape[-1] - width <= WIDEST_REST
    return half and narrow and not (width % 8 or q.shape[-1] % 8) and q.shape[0] > 0


def suits(q: Tensor, width: int) -> bool:
    """Return True if the kernels can run on the device of q, and if they support q and values with `width` channels."""
    return runs_triton(q) and fits(q, width)


def _dense(x: Tensor) -> Tensor:
    """Return a tensor whose channels are contiguous. Copy `x` only if its channels are not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attend(
    q: Tensor,
    sinks: Tensor | None,
    seen: tuple[Keys, ...],
    k: tuple[Tensor, ...],
    scale: float,
    width: int,
    notes: bool,
) -> Attended:
    """Triton implementation of `attend_to_selected`, with the same arguments and results."""
    keys, picked, first = joined_sets(seen, k)
    out, lse, of_first, highest = _attend(_dense(q), keys, picked, sinks, first, scale, width)
    return Attended(out, lse, lse if len(k) == 1 else of_first, highest.amax((0, 1)) if notes else None)


def gradients(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    seen: tuple[Keys, ...],
    k: tuple[Tensor, ...],
    scale: float,
    width: int,
) -> tuple[Tensor, ...]:
    """Triton implementation of `selected_attention_gradients`, with the same arguments and results."""
    keys, picked, _ = joined_sets(seen, k)
    adds = adds_gradients(q.device, len(keys), picked.shape[-1])
    dq, dk = _gradients(_dense(grad), _dense(q), keys, picked, out, lse, scale, adds)
    return dq, *dk.split([len(x) for x in k])


def weights(q: Tensor, rows: Rows, scale: float, beside: Tensor | None, lse: Tensor | None) -> Tensor:
    """Triton implementation of `attended_weights`, with the same arguments and results."""
    assert rows.picked is not None and lse is not None
    return listed_weights(q, rows.all_keys.contiguous(), rows.picked.to(torch.int32).contiguous(), lse, scale)


def listed_weights(q: Tensor, k: Tensor, places: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Return the attention weights [n, b, count] of the keys listed in `places`, summed over heads.

    Args:
        q: [n, b, h, w], queries.
        k: [s, b, w], keys.
        places: [n, b, count] int32, indices of keys; -1 for none.
        lse: [n, b, h], log-sum-exps of the scores of all attended keys and sinks.
        scale: Factor by which scores are multiplied.
    """
    # The kernel does not read values, so the number of value channels is arbitrary.
    return _weights(_dense(q), k, places, lse.contiguous(), scale, min(q.shape[-1], WIDEST_VALUES))


def weights_suit(q: Tensor, rows: Rows, scale: float, beside: Tensor | None, lse: Tensor | None) -> bool:
    """Return True if the kernel supports these arguments of `attended_weights`. The kernel requires that keys are
    selected and that `lse` is not None."""
    return rows.picked is not None and lse is not None and suits(q, min(q.shape[-1], WIDEST_VALUES))


def _fake_attend(
    q: Tensor, k: Tensor, picked: Tensor, sinks: Tensor | None, first: int, scale: float, values: int
) -> tuple[Tensor, ...]:
    rows = q.shape[:3]
    return q.new_empty(*rows, values), *(q.new_empty(rows, dtype=torch.float32) for _ in range(3))


def _fake_gradients(
    grad: Tensor, q: Tensor, k: Tensor, picked: Tensor, out: Tensor, lse: Tensor, scale: float, adds: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape, dtype=torch.float32)


_attend = gpu_operator(
    "attention_triton:attend_selected",
    "(Tensor q, Tensor k, Tensor picked, Tensor? sinks, int first, float scale, int values) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake_attend,
    __package__,
)
"""Operator that computes attention to the keys listed in `picked`. The operator returns the outputs [n, b, h, values]
and three tensors [n, b, h]: the log-sum-exps of the scores of all listed keys, the log-sum-exps of the scores of the
keys in the first key set, and the largest score of each query and head."""

_weights = gpu_operator(
    "attention_triton:weights_of_selected",
    "(Tensor q, Tensor k, Tensor picked, Tensor lse, float scale, int values) -> Tensor",
    lambda q, k, picked, lse, scale, values: lse.new_empty(picked.shape),
    __package__,
)
"""Operator that returns the attention weights [n, b, count] of the keys listed in `picked`, summed over heads."""

_gradients = gpu_operator(
    "attention_triton:selected_gradients",
    "(Tensor grad, Tensor q, Tensor k, Tensor picked, Tensor out, Tensor lse, float scale, bool adds) "
    "-> (Tensor, Tensor)",
    _fake_gradients,
    __package__,
)
"""Operator that returns the gradients of q and of k. The gradients of k are fp32. If `adds` is True, the gradients of k
are accumulated by atomic additions."""


BackwardOperands = tuple[Tensor, Tensor, Tensor, Tensor, tuple[Keys, ...], tuple[Tensor, ...], float, int]
"""Arguments of `selected_attention_gradients`."""


class Gathers(Protocol):
    """Part of the planner's interface `Launches`: the method that records kernels that gather keys."""

    any_order: bool
    """True if kernels may use atomic additions, whose order is arbitrary."""

    def gathered(self, flops: float, read: float, added: float = 0.0) -> None: ...


HEADS, PARTS = 32, 4
"""Block sizes that the planner assumes. HEADS is the number of heads per Triton program of the kernel that gathers
keys. PARTS is the number of Triton programs among which the second pass divides the queries of one block of keys."""

BLOCK_OF_KEYS, SLICE = 128, 192
"""Block sizes that the planner assumes: the number of keys and the number of channels per Triton program of the second
pass."""

MOST_BYTES = 2**28
"""Maximum size in bytes of the weights and score gradients that are stored for the second pass. Queries are processed
in chunks small enough for this limit."""


def pairs_of(seen: Sequence[Keys], samples: int) -> tuple[float, float]:
    """Return two numbers of query-key pairs: the pairs for which attention is computed, and the candidate pairs, from
    which the indexer selects."""
    some = every = 0.0
    for each in seen:
        for chunk in each.queries.chunks:
            rows = samples * (chunk.rows.stop - chunk.rows.start)
            most = each.queries.most if each.picked is None else each.picked.shape[-1]
            some += rows * min(most, chunk.keys)
            every += rows * (chunk.keys if each.picked is not None else min(most, chunk.keys))
    return some, every


def planned_attend(
    launches: Gathers,
    q: Tensor,
    sinks: Tensor | None,
    seen: tuple[Keys, ...],
    k: tuple[Tensor, ...],
    scale: float,
    width: int,
    notes: bool,
) -> Attended:
    """Simulate `attend` for the planner: allocate the same tensors, and record the kernels in `launches` instead of
    launching them. The arguments after `launches` are the arguments of `attend`."""
    if not fits(q, width):
        return _plain_attend(q, sinks, seen, k, scale, width, notes)
    joined_sets(seen, k)
    (some, _), heads = pairs_of(seen, q.shape[1]), q.shape[2]
    groups = -(-heads // HEADS)
    launches.gathered(2 * some * heads * (q.shape[-1] + width), some * groups * q.shape[-1] * q.element_size())
    out, lse, of_first, highest = _fake_attend(q, k[0], k[0], sinks, 0, scale, width)
    return Attended(out, lse, of_first, highest.amax((0, 1)) if notes else None)


def planned_gradients(launches: Gathers, *operands: *BackwardOperands) -> tuple[Tensor, ...]:
    """Simulate `gradients` for the planner: allocate the same tensors, and record the kernels in `launches` instead of
    launching them. The GPU is assumed to support vectorized atomic additions."""
    grad, q, out, lse, *_ = operands
    seen, k = operands[4:6]
    scale, width = operands[6:]
    if not fits(q, width):
        return _plain_gradients(*operands)
    keys, picked, _ = joined_sets(seen, k)
    (some, every), (heads, w) = pairs_of(seen, q.shape[1]), q.shape[2:]
    read = some * -(-heads // HEADS) * w
    delta = torch.empty_like(lse)
    dq, dk = _fake_gradients(grad, q, keys, picked, out, lse, scale, True)
    if launches.any_order and picked.shape[-1] < DENSE * len(keys):
        launches.gathered(2 * some * heads * (3 * w + 2 * width), read * q.element_size(), read * 4)
    else:
        _plan_second_pass(launches, q, picked, len(keys), some, every)
        launches.gathered(2 * some * heads * (2 * w + width), read * q.element_size() + 4 * some * heads)
        torch.empty(PARTS, *keys.shape, dtype=torch.float32, device=q.device).sum(0)
    del delta
    return dq, *dk.split([len(x) for x in k])


def _plan_second_pass(launches: Gathers, q: Tensor, picked: Tensor, keys: int, some: float, every: float) -> None:
    """Simulate the second pass for the planner: allocate the tensors that are stored for one chunk of queries, and
    record the kernels for all chunks. For each slice of channels, a Triton program searches the list of each query for
    the keys of the program's block. For each key that it finds, the program reads the stored attention weights and
    score gradients."""
    (n, b, heads, w), count = q.shape, picked.shape[-1]
    rows = min(n, max(1, MOST_BYTES // (2 * b * count * heads * q.element_size())))
    kept = q.new_empty(2, rows, b, count, heads)
    for _ in range(0, n, rows):
        torch.full((rows, b, keys), -1, dtype=torch.int32, device=q.device).amax(-1)
    del kept
    slices = -(-w // SLICE)
    read = every / BLOCK_OF_KEYS * heads * 2 * w * q.element_size()
    launches.gathered(4 * every * heads * w, read + slices * (4 * every + 4 * some * heads))


def planned_weights(
    launches: Gathers, q: Tensor, rows: Rows, scale: float, beside: Tensor | None, lse: Tensor | None
) -> Tensor:
    """Simulate `weights` for the planner: allocate the same tensors, and record the kernel in `launches` instead of
    launching it. The arguments after `launches` are the arguments of `weights`."""
    if rows.picked is None or lse is None or not fits(q, min(q.shape[-1], WIDEST_VALUES)):
        return unwrap(attended_weights)(q, rows, scale, beside, lse)
    return planned_listed_weights(launches, q, rows.picked, rows.picked.numel())


def planned_listed_weights(launches: Gathers, q: Tensor, places: Tensor, pairs: float) -> Tensor:
    """Simulate `listed_weights` for the planner: allocate the same tensors, and record the kernel instead of launching
    it.

    Args:
        launches: Recorder of kernel launches.
        q: [n, b, h, w], queries.
        places: [n, b, count], indices of keys.
        pairs: Number of query-key pairs to compute.
    """
    heads, width = q.shape[2:]
    launches.gathered(2.0 * pairs * heads * width, pairs * -(-heads // HEADS) * width * q.element_size())
    return torch.zeros(places.shape, dtype=torch.float32, device=q.device)


WeightsOperands = tuple[Tensor, Rows, float, Tensor | None, Tensor]


def weight_samples(shapes: RunShapes) -> Iterator[WeightsOperands]:
    """Yield test arguments for `attended_weights`. For each item of `samples` that has selected keys, the arguments
    belong to the first chunk of queries."""
    for q, sinks, seen, k, scale, width, notes in samples(shapes):
        found = _plain_attend(q, sinks, seen, k, scale, width, notes)
        chunk = seen[-1].queries.chunks[0]
        rows = Rows(q, k[-1], seen[-1].queries, chunk, seen[-1].picked)
        if rows.picked is not None:
            beside = None if len(seen) == 1 else found.of_first[chunk.rows]
            yield rows.q, rows, scale, beside, found.lse[chunk.rows]


Operands = tuple[Tensor, Tensor | None, tuple[Keys, ...], tuple[Tensor, ...], float, int, bool]
"""Arguments of `attend_to_selected`."""


def samples(shapes: RunShapes) -> Iterator[Operands]:
    """Yield test arguments for `attend_to_selected`, one set for each kind of layer in a run. The queries belong to the
    last tokens of a sequence."""
    if shapes.config is None:
        return
    for shape in sparse_shapes(shapes.config):
        yield sample_of(shape, shapes)


def sample_of(shape: SparseShape, shapes: RunShapes) -> Operands:
    """Return test arguments for `attend_to_selected`: random queries and keys, and random selections of keys."""
    n, b = min(SAMPLED, shapes.length), max(1, shapes.tokens // shapes.length)
    last = torch.arange(shape.length - n, shape.length, device=shapes.device)[:, None]
    longest = max(1, CHUNK // (b * shape.heads * max(shape.width, sum(each.most for each in shape.sets))))
    seen, keys = list[Keys](), list[Tensor]()
    for each in shape.sets:
        end = (last + 1) // each.tokens - 1
        first = torch.zeros_like(last) if each.window is None else (last - each.window + 1).clamp_(min=0)
        chunks = chunks_of((range(shape.length - n, shape.length),), 1, longest)
        chunks = tuple(
            chunk._replace(
                keys=chunk.keys // each.tokens,
                first=0 if each.window is None else max(0, chunk.keys - each.window - longest),
            )
            for chunk in chunks
        )
        queries = Queries(first, end, chunks, HARDWARE, each.most)
        count = shape.length // each.tokens
        picked = None
        if each.selects and count > each.most:
            scores = shapes.random(n, b, count, dtype=torch.float32)
            hidden = torch.arange(count, device=shapes.device) > end[..., None]
            picked = largest(scores.masked_fill_(hidden, -torch.inf), each.most)
        seen.append(Keys(queries, picked))
        keys.append(shapes.random(count, b, shape.width))
    sinks = shapes.random(shape.heads, dtype=torch.float32) if shape.sinks else None
    q = shapes.random(n, b, shape.heads, shape.width)
    return q, sinks, tuple(seen), tuple(keys), shape.width**-0.5, shape.values, False


def backward_samples(shapes: RunShapes) -> Iterator[BackwardOperands]:
    """Yield test arguments for `selected_attention_gradients`, computed from each item of `samples`."""
    for q, sinks, seen, k, scale, width, notes in samples(shapes):
        found = _plain_attend(q, sinks, seen, k, scale, width, notes)
        yield shapes.random(*found.out.shape), q, found.out, found.lse, seen, k, scale, width


WEIGHTS = FusedKernel(weights, attended_weights, weights_suit, weight_samples, TOLERANCE, planned_weights)
ATTEND = FusedKernel(
    attend, attend_to_selected, lambda q, *more: suits(q, more[-2]), samples, TOLERANCE, planned_attend
)
GRADIENTS = FusedKernel(
    gradients,
    selected_attention_gradients,
    lambda grad, q, *more: suits(q, more[-1]),
    backward_samples,
    TOLERANCE,
    planned_gradients,
)
