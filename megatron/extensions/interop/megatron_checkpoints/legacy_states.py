"""Reader of the optimizer states in the Megatron-LM files of one rank. The files store the states in a fixed order,
without names.

Non-distributed optimizers store the states of a parameter under the parameter's number in `param_groups`, as
torch.optim does. The distributed optimizer stores flat fp32 tensors in `distrib_optim.pt`: for each parameter buffer,
one tensor per kind of state. Parameter groups and buffers have the order of the model's parameters, so the position of
a state determines the parameter to which it belongs. The number of states and their shapes are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Held = dict[str, Tensor]
"""Tensors of one rank, keyed by parameter name, in the order of the model's parameters."""

FROZEN = " (untrained parameters have no states)"
ALIGNMENT = 64
"""Alignment, in elements, of parameters in a buffer of the distributed optimizer."""

PLAIN_KINDS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
BUFFER_KINDS = {"param": "main_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Maps Megatron-LM's names for the kinds of distributed optimizer state to this program's names."""

DECOUPLED = ("embedding.word_embeddings.weight", "output_layer.weight")


def states_of(
    chunks: Sequence[Held], optimizer: object, buffers: object, args: Mapping[str, object]
) -> dict[str, Held]:
    """Return the optimizer states of a rank. The result maps each kind of state to a dict of tensors by parameter name.
    Each tensor has the shape of its parameter. Raises ValueError if the inputs contradict each other.

    Args:
        chunks: Parameters of the rank's model chunks.
        optimizer: Entry "optimizer" of the rank's file.
        buffers: Content of distrib_optim.pt, or None if the file does not exist.
        args: Megatron-LM's arguments.
    """
    experts = args.get("expert_model_parallel_size")
    apart = isinstance(experts, int) and experts > 1
    if buffers is not None:
        return _of_buffers(chunks, buffers, apart, args)
    if args.get("use_distributed_optimizer"):
        raise ValueError("distrib_optim.pt is missing")
    found: dict[str, Held] = {}
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        for kind, name, tensor in _of_groups(chunks, each, apart):
            found.setdefault(kind, {})[name] = tensor
    return found


def is_expert(name: str) -> bool:
    return ".experts." in name


# Plain optimizers.


def _of_groups(chunks: Sequence[Held], state: Any, apart: bool) -> Iterator[tuple[str, str, Tensor]]:
    """Yield a tuple (kind of state, parameter name, tensor) for each state of one optimizer. `apart` is True if EP is
    above 1."""
    try:
        inner = state.get("optimizer", state)
        groups, states = inner["param_groups"], inner["state"]
        mains = state.get("fp32_from_fp16_params", state.get("fp32_from_fp16"))
        decoupled = any(map(_decoupled, groups))
        for index, group in enumerate(groups):
            members = list(_members(chunks, group, apart, decoupled))
            numbers, copies = group["params"], iter(mains[index] if mains is not None else ())
            if len(numbers) != len(members):
                raise ValueError(f"a group has {len(numbers)} parameters, but the model has {len(members)}{FROZEN}")
            for number, (name, weight) in zip(numbers, members, strict=True):
                if mains is not None:
                    main = weight if weight.dtype == torch.float32 else next(copies)
                    yield "main_param", name, _fitting(main, name, weight)
                for kind in PLAIN_KINDS:
                    if states.get(number, {}).get(kind) is not None:
                        yield kind, name, _fitting(states[number][kind], name, weight)
    except (TypeError, LookupError, AttributeError, StopIteration) as error:
        raise ValueError(f"it is in an unknown format ({type(error).__name__})") from None


def _decoupled(group: Mapping[str, object]) -> bool:
    """Return True if an optimizer parameter group uses the separate learning rate for the embedding and output layers
    (--decoupled-lr)."""
    return bool(group.get("is_decoupled_lr")) or group.get("default_config") is False


def _members(
    chunks: Sequence[Held], group: Mapping[str, object], apart: bool, decoupled: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of the parameters in an optimizer parameter group. If `apart` is True, expert
    parameters are in separate groups. If `decoupled` is True, the embedding and output layers are in separate
    groups."""
    if group.get("lr_mult", 1.0) != 1.0:
        raise ValueError("a parameter group has a learning rate multiplier (lr_mult), which is not supported")
    decays = group.get("wd_mult", group.get("weight_decay")) != 0
    for chunk in chunks:
        for name, weight in chunk.items():
            same = decays == (weight.dim() > 1 and not name.endswith(".bias"))
            same &= not apart or bool(group.get("is_expert_parallel")) == is_expert(name)
            if same and (not decoupled or _decoupled(group) == (name in DECOUPLED)):
                yield name, weight


def _fitting(state: object, name: str, weight: Tensor) -> Tensor:
    if not isinstance(state, Tensor) or state.shape != weight.shape or not state.is_floating_point():
        what = f"a tensor {list(state.shape)}" if isinstance(state, Tensor) else f"a {type(state).__name__}"
        raise ValueError(f"{name} of shape {list(weight.shape)} has a state that is {what}{FROZEN}")
    return state


# Distributed optimizer.


def _of_buffers(chunks: Sequence[Held], content: object, apart: bool, args: Mapping[str, object]) -> dict[str, Held]:
    """Return the states in the buffers of a distributed optimizer. `content` is the content of distrib_optim.pt: the
    saved buffers of one optimizer, or a list with one entry per optimizer. If `apart` is True (EP is above 1), the last
    entry in the list contains the expert buffers. An entry is None if another rank saved the buffers of this
    optimizer."""
    parts = content if isinstance(content, list) else [content]
    several = apart and len(parts) > 1
    found: dict[str, Held] = {kind: {} for kind in BUFFER_KINDS.values()}
    for experts, entries in ((False, parts[: len(parts) - several]), (True, parts[-1:] if several else [])):
        stored = [tensors for part in entries if part is not None for tensors in _stored(part)]
        if all(part is None for part in entries):
            continue
        members = [buffer for chunk in chunks for buffer in _buffers(chunk, experts if apart else None)]
        if len(stored) != len(members):
            raise ValueError(f"it has {len(stored)} parameter buffers, but the model has {len(members)}{FROZEN}")
        for tensors, buffer in zip(stored, members, strict=True):
            places = _places(buffer, tensors, args)
            for theirs, ours in BUFFER_KINDS.items():
                for (name, weight), start in zip(buffer, places, strict=True):
                    found[ours][name] = tensors[theirs][start : start + weight.numel()].view(weight.shape)
    return found


def _stored(part: object) -> Iterator[Mapping[str, Tensor]]:
    """Yield the state tensors of each buffer of an optimizer."""
    if not isinstance(part, dict) or not part.get("buckets_coalesced"):
        raise ValueError("distrib_optim.pt stores each bucket separately, as Megatron core before 0.6 did")
    for number in sorted(key for key in part if isinstance(key, int)):
        for stored in part[number].values() if isinstance(part[number], dict) else [None]:
            tensors: Mapping[str, Tensor] = stored if isinstance(stored, dict) else {}
            flat = [tensors.get(kind) for kind in BUFFER_KINDS]
            shapes = {tuple(each.shape) if isinstance(each, Tensor) else () for each in flat}
            if len(shapes) != 1 or len(shapes.pop()) != 1:
                raise ValueError("distrib_optim.pt does not contain param, exp_avg and exp_avg_sq of each buffer")
            yield tensors


def _buffers(chunk: Held, experts: bool | None) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield one list for each buffer of a model chunk. The list contains the buffer's parameters, which all have the
    same dtype. If `experts` is True, only expert parameters are included. If `experts` is False, only dense parameters
    are included. If `experts` is None, all parameters are included."""
    found: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, weight in chunk.items():
        if experts is None or experts == is_expert(name):
            found.setdefault(weight.dtype, []).append((name, weight))
    yield from found.values()


def _places(
    buffer: Sequence[tuple[str, Tensor]], tensors: Mapping[str, Tensor], args: Mapping[str, object]
) -> list[int]:
    """Return the offset of each parameter of a buffer in the flat state tensors of the buffer. The size of these
    tensors shows whether the buffer is divided into buckets, and whether tied embeddings have a separate bucket."""
    total = tensors["param"].numel()
    replicas = args.get("data_parallel_size") or 1
    size = args.get("ddp_bucket_size")
    if not isinstance(size, int) or not size:
        size = max(40_000_000, 1_000_000 * (replicas if isinstance(replicas, int) else 1))
    for tied_apart in (False, True):
        for bucket in (None, size):
            places, end = layout_of([(name, weight.numel()) for name, weight in buffer], bucket, tied_apart)
            if end == total:
                return places
    raise ValueError(f"a buffer has {total} elements, but the model has {end}{FROZEN}")


def layout_of(
    parameters: Sequence[tuple[str, int]], bucket_size: int | None, tied_apart: bool
) -> tuple[list[int], int]:
    """Return the offset of each parameter in a buffer, and the length of the buffer.

    A buffer contains the parameters in reverse order, from the last to the first. Parameters are aligned within their
    bucket. A bucket ends once it has at least `bucket_size` elements. Buckets are not padded at the end. If
    `tied_apart` is True, the word embeddings and the output weight have separate buckets.
    """
    places = []
    base = 0
    at = 0
    for name, size in reversed(parameters):
        alone = tied_apart and name in DECOUPLED
        at = -(-at // ALIGNMENT) * ALIGNMENT
        if alone:
            base, at = base + at, 0
        places.append(base + at)
        at += size
        if alone or (bucket_size is not None and at >= bucket_size):
            base, at = base + at, 0
    return places[::-1], base + at
