"""Every collective of `megatron.core.collectives` and its backward pass are compared with their definitions on each
backend.

Operands contain integers, so that a sum is bit-identical for any order of its terms.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import collectives
from megatron.core.parallel_state import Axis
from megatron.testing.local_world import run_world
from tests.gpu.shared_gpu import GLOO, NCCL, SHARED_GPU, Ranks, ranks_of

ROWS, WIDTH = 6, 40
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
ON_STREAMS = 20
"""Number of collectives that are in flight at the same time while GEMMs run on a different stream."""


def operand(rank: int, rows: int, dtype: torch.dtype = torch.float64, salt: int = 0) -> Tensor:
    """Return integers [rows, WIDTH] from -8 to 8, whose sums over eight ranks are exact in bf16."""
    generator = torch.Generator().manual_seed(97 * salt + rank)
    return torch.randint(-8, 9, (rows, WIDTH), generator=generator).to(dtype)


def counts(rank: int, size: int) -> list[int]:
    """Return how many rows a rank sends to each of the ranks. Some of these numbers are 0."""
    return [(3 * rank + 2 * other) % 4 for other in range(size)]


def differentiated(function: Callable[[Tensor, Axis], Tensor], x: Tensor, axis: Axis, salt: int) -> list[Tensor]:
    """Return [result of the function, gradient of x for a random gradient of the result]."""
    x = x.detach().requires_grad_()
    y = function(x, axis)
    generator = torch.Generator().manual_seed(1000 * salt + axis.rank)
    grad = torch.randint(-4, 5, y.shape, generator=generator).to(y)
    (back,) = torch.autograd.grad(y, x, grad)
    return [y.detach(), back]


def ring(x: Tensor, axis: Axis) -> Tensor:
    """Send x two steps around the ring, and return the tensor that arrives. The first ring step receives into a
    preallocated tensor."""
    into = torch.empty_like(x)
    first = collectives.RingExchange(x, axis, tag=3, into=into).wait()
    return collectives.RingExchange(first, axis, tag=4).wait()


def computed(rank: int, size: int, device: str) -> dict[str, Tensor]:
    """Run every collective, and return the results of this rank as CPU tensors, keyed by collective."""
    axis = Axis(dist.group.WORLD, rank, size, tuple(range(size)), dist.get_backend() != "nccl")
    found = dict[str, Tensor]()
    for dtype in DTYPES:
        whole, part = operand(rank, size * ROWS, dtype).to(device), operand(rank, ROWS, dtype, 1).to(device)
        found[f"all_reduce {dtype}"] = collectives.all_reduce_(part.clone(), axis)
        found[f"all_reduce in flight {dtype}"] = collectives.start_all_reduce_(part.clone(), axis).wait()
        found[f"maximum {dtype}"] = collectives.all_reduce_(part.clone(), axis, dist.ReduceOp.MAX)
        found[f"all_gather {dtype}"] = collectives.all_gather(part, axis)
        found[f"all_gather of columns {dtype}"] = collectives.all_gather(part, axis, 1)
        found[f"reduce_scatter {dtype}"] = collectives.reduce_scatter(whole, axis)
        within = whole.clone()
        out = collectives.local_slice(within, axis)
        collectives.start_reduce_scatter(within, axis, out).wait()
        found[f"reduce_scatter in place {dtype}"] = out
        outgoing, incoming = counts(rank, size), [counts(other, size)[rank] for other in range(size)]
        rows = operand(rank, sum(outgoing), dtype, 2).to(device)
        found[f"all_to_all {dtype}"] = collectives.start_all_to_all(rows, outgoing, incoming, axis).wait()
        found[f"ring {dtype}"] = ring(part, axis)
    whole, part = operand(rank, size * ROWS).to(device), operand(rank, ROWS, salt=1).to(device)
    pairs: dict[str, tuple[Callable[[Tensor, Axis], Tensor], Tensor]] = {
        "copy_to": (collectives.copy_to, operand(0, ROWS, salt=1).to(device)),
        "reduce_from": (collectives.reduce_from, part),
        "all_gather_sequence": (collectives.all_gather_sequence, part),
        "swap_blocks": (collectives.swap_blocks, whole.unflatten(0, (size, ROWS))),
        "features_to_sequence": (collectives.features_to_sequence, whole),
    }
    for salt, (name, (function, x)) in enumerate(pairs.items()):
        y, back = differentiated(function, x, axis, salt)
        found |= {name: y, f"{name} backward": back}
    found["in flight beside products"] = _in_flight(part, axis)
    assert collectives.gather_objects(f"rank {rank}", axis) == [f"rank {other}" for other in range(size)]
    return {name: value.cpu() for name, value in found.items()}


def _in_flight(part: Tensor, axis: Axis) -> Tensor:
    """Launch all-reduces one after another while GEMMs run, and wait for the all-reduces in a different order. On a
    GPU, the GEMMs run on a side stream."""
    square = torch.eye(512, dtype=part.dtype, device=part.device)
    side = torch.cuda.Stream() if part.is_cuda else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    pending = list[collectives.Pending]()
    for k in range(ON_STREAMS):
        with torch.cuda.stream(side):  # has no effect on a CPU, where `side` is None
            square = square @ square
        pending.append(collectives.start_all_reduce_(part * (k + 1), axis))
    sums = [each.wait() for each in reversed(pending)]
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
    return torch.stack(sums) * square[0, 0]


def expected(rank: int, size: int) -> dict[str, Tensor]:
    """Compute the expected results of a rank from the operands of all ranks, according to the definitions of the
    collectives."""
    found, ranks = dict[str, Tensor](), range(size)
    for dtype in DTYPES:
        wholes, parts = ([operand(r, size * ROWS, dtype) for r in ranks], [operand(r, ROWS, dtype, 1) for r in ranks])
        total, own = torch.stack(parts).sum(0, dtype=dtype), slice(rank * ROWS, (rank + 1) * ROWS)
        found |= {f"all_reduce {dtype}": total, f"all_reduce in flight {dtype}": total}
        found[f"maximum {dtype}"] = torch.stack(parts).amax(0)
        found |= {f"all_gather {dtype}": torch.cat(parts), f"all_gather of columns {dtype}": torch.cat(parts, 1)}
        scattered = torch.stack(wholes).sum(0, dtype=dtype)[own]
        found |= {f"reduce_scatter {dtype}": scattered, f"reduce_scatter in place {dtype}": scattered}
        sent = [operand(r, sum(counts(r, size)), dtype, 2).split(counts(r, size)) for r in ranks]
        found[f"all_to_all {dtype}"] = torch.cat([blocks[rank] for blocks in sent])
        found[f"ring {dtype}"] = parts[(rank - 2) % size]
    wholes, parts = [operand(r, size * ROWS) for r in ranks], [operand(r, ROWS, salt=1) for r in ranks]

    def drawn(salt: int, *shape: int) -> list[Tensor]:
        generators = [torch.Generator().manual_seed(1000 * salt + r) for r in ranks]
        return [torch.randint(-4, 5, shape, generator=generator).double() for generator in generators]

    found |= {"copy_to": parts[0], "copy_to backward": sum(drawn(0, ROWS, WIDTH), torch.zeros(()).double())}
    found |= {"reduce_from": torch.stack(parts).sum(0), "reduce_from backward": drawn(1, ROWS, WIDTH)[rank]}
    grads = torch.stack(drawn(2, size * ROWS, WIDTH)).sum(0)
    found |= {"all_gather_sequence": torch.cat(parts), "all_gather_sequence backward": grads.chunk(size)[rank]}
    blocks, back = [w.unflatten(0, (size, ROWS)) for w in wholes], drawn(3, size, ROWS, WIDTH)
    found["swap_blocks"] = torch.stack([each[rank] for each in blocks])
    found["swap_blocks backward"] = torch.stack([each[rank] for each in back])
    found["features_to_sequence"] = torch.cat([w.chunk(size)[rank] for w in wholes], -1)
    traded = torch.cat(drawn(4, ROWS, size * WIDTH))
    found["features_to_sequence backward"] = traded.unflatten(-1, (size, WIDTH))[:, rank]
    found["in flight beside products"] = torch.stack([k * torch.stack(parts).sum(0) for k in range(ON_STREAMS, 0, -1)])
    return found


@pytest.mark.parametrize("ranks", [GLOO, SHARED_GPU, NCCL], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_collectives_match_their_definitions(ranks: Ranks, size: int, request: pytest.FixtureRequest) -> None:
    """If a collective gives the same result on several ranks, the results are bit-identical."""
    here = ranks_of(request, ranks)
    results = run_world(size, computed, here.device, backend=here.backend)
    for rank, found in enumerate(results):
        wanted = expected(rank, size)
        assert found.keys() == wanted.keys()
        wrong = [name for name, value in wanted.items() if not found[name].equal(value)]
        assert not wrong, f"rank {rank}: {wrong}"
