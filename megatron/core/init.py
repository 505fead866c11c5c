"""Weight initialization that is bit-identical under every layout.

Each value depends only on (seed, parameter name, position in the global tensor), so runs with different layouts can be
compared number by number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from math import log

import torch
from torch import Tensor

from megatron.core.boxes import boxes_of_flat_range, overlap
from megatron.core.host_to_device import has_values
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.torch_private import in_dispatch_mode, resize_storage

DRAWN = ("normal", "uniform", "log_of_uniform", "inverse_softplus")
"""Values of `Init.kind` for which the initial values are drawn block by block from a random distribution."""

BLOCK = 2**20
"""Number of consecutive elements of a global tensor that one generator draws."""

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Block:
    """Consecutive elements of a global tensor whose initial values one random generator draws. The block also records
    where its elements are stored in this rank's shard."""

    local: Tensor
    meta: ParamMeta
    index: int
    length: int
    copies: list[tuple[slice, tuple[int, ...], Index, Index]]
    """The block is divided into rectangular parts. Each part has an entry (elements, shape, in_part, in_shard).
    `elements` is the slice of the block that fills the part, and `shape` is the shape of the part. `in_part` and
    `in_shard` are the slices of the part and of the shard that select the elements common to both."""


def alloc_storage(tensor: Tensor) -> None:
    """Reallocate memory for a tensor whose storage was freed. Existing views of the tensor become valid again. The
    values of the tensor are undefined."""
    resize_storage(tensor, tensor.numel() * tensor.itemsize)


def free_storage(tensor: Tensor) -> None:
    """Free the memory of a tensor. Only views of the tensor may share its storage. These views remain valid objects,
    but have no values until `alloc_storage` is called."""
    resize_storage(tensor, 0)


def has_storage(tensor: Tensor) -> bool:
    """Return whether memory is allocated for a tensor, which is not the case after `free_storage`."""
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


@torch.no_grad()
def initialize_parameters_(
    params: Iterable[Tensor], seed: int, coords: Mapping[str, tuple[int, int]], threads: int = 1
) -> None:
    """Initialize each parameter as its `meta.init` defines.

    The result is bit-identical under every layout, device type and number of threads. The function needs temporary
    memory for one block if there is one thread, and for two blocks per thread otherwise.

    Args:
        params: Parameters to initialize.
        seed: Seed of the run.
        coords: Mapping from each axis to (rank, size), like `ParallelState.coords`.
        threads: Number of threads.
    """
    drawn: list[Iterator[Block]] = []
    for param in params:
        meta: ParamMeta = param.meta  # type: ignore[attr-defined]
        init = init_of(meta)
        offset, shape = meta.box(coords)
        assert tuple(param.shape) == shape, f"{meta.name} is {tuple(param.shape)} and should be {shape}"
        if init.kind in DRAWN:
            if has_values(param):
                drawn.append(_blocks(param, meta, offset))
        elif init.kind in ("zeros", "ones"):
            param.fill_(float(init.kind == "ones"))
        elif init.kind == "constant":
            values = torch.tensor(init.value, dtype=torch.float64)
            param.view(-1, values.numel()).copy_(values)
        elif init.kind == "choices":
            generator = torch.Generator().manual_seed(site_key(seed, meta.name))
            numbers = torch.rand(len(param), int(init.high), generator=generator)
            param.copy_(numbers.topk(param.shape[1]).indices)
        else:
            known = ", ".join((*DRAWN, "zeros", "ones", "constant", "choices"))
            raise ValueError(f"{meta.name}: Init kind {init.kind!r} is none of {known}")

    def draw(block: Block) -> Tensor:
        return _block_values(seed, block.meta.name, block.index, block.length, init_of(block.meta))

    for block, values in _in_threads(draw, (block for blocks in drawn for block in blocks), threads):
        for elements, shape, in_box, in_local in block.copies:
            block.local[in_local].copy_(values[elements].view(shape)[in_box])


def init_of(meta: ParamMeta) -> Init:
    """Return the initial values of a parameter created by `make_parameter`."""
    assert meta.init is not None, f"{meta.name} has no initial values: `make_parameter` completes its meta"
    return meta.init


def _blocks(local: Tensor, meta: ParamMeta, offset: tuple[int, ...]) -> Iterator[Block]:
    """Yield the blocks of the global tensor that overlap this rank's shard. The shard `local` starts at `offset` in the
    global tensor."""
    origin = (0,) * len(meta.global_shape)
    for start in range(0, meta.numel, BLOCK):
        stop, copies = min(start + BLOCK, meta.numel), []
        for box in boxes_of_flat_range(origin, meta.global_shape, start, stop):
            common = overlap(box.offset, box.shape, offset, local.shape)
            if common is not None:
                copies.append((slice(box.start - start, box.stop - start), box.shape, *common))
        if copies:
            yield Block(local, meta, start // BLOCK, stop - start, copies)


def _in_threads(
    draw: Callable[[Block], Tensor], blocks: Iterator[Block], threads: int
) -> Iterator[tuple[Block, Tensor]]:
    """Draw the values of all blocks in threads, and yield pairs (block, values) in the order of `blocks`. Each thread
    draws at most two blocks ahead of the caller.

    torch releases the interpreter lock while it draws. Under a dispatch mode, for example with fake tensors, the
    calling thread draws all blocks, because modes apply only to the thread that entered them.
    """
    if threads == 1 or in_dispatch_mode():
        yield from ((block, draw(block)) for block in blocks)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="initial weights") as pool:
        ahead: deque[tuple[Block, Future[Tensor]]] = deque()
        for block in blocks:
            ahead.append((block, pool.submit(draw, block)))
            if len(ahead) == 2 * threads:
                first, values = ahead.popleft()
                yield first, values.result()
        for first, values in ahead:
            yield first, values.result()


def _block_values(seed: int, name: str, index: int, length: int, init: Init) -> Tensor:
    generator = torch.Generator().manual_seed(site_key(seed, f"{name}/{index}"))
    values = torch.empty(length, dtype=torch.float32)
    if init.kind == "normal":
        return values.normal_(0.0, init.std, generator=generator)
    if init.kind == "inverse_softplus":
        return values.uniform_(log(init.low), log(init.high), generator=generator).exp_().expm1_().log_()
    values.uniform_(init.low, init.high, generator=generator)
    return values.log_() if init.kind == "log_of_uniform" else values


def site_key(seed: int, name: str) -> int:
    """Derive a seed in [0, 2**63) from the seed of the run and the name of a random operation, such as the dropout of a
    layer."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
