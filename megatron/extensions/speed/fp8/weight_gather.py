"""All-gather of weights over the data-parallel ranks in fp8: one byte per element instead of two.

With the distributed optimizer, each rank updates a part of every weight. Before the cast, the ranks reduce the amax of
each weight or of each of its blocks. The gathered values therefore equal the values that a cast of the whole weight in
one process would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.collectives import all_reduce_
from megatron.core.compiled_regions import region
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.linear_gemms import matrix_of
from megatron.extensions.speed.fp8.blockwise import BlockwiseGemms, amax_of_blocks, in_blocks
from megatron.extensions.speed.fp8.casts import E4M3, TILE, amax_of, by_block, round_scaled
from megatron.extensions.speed.fp8.recipes import Fp8Gemms, GatheredWeight, TensorwiseGemms


def gemms_of_weights(modules: Sequence[nn.Module]) -> dict[int, Fp8Gemms]:
    """Return a mapping from weights, identified by `id(weight)`, to their layers' fp8 GEMMs. The mapping contains all
    weights that can be gathered in fp8."""
    layers = (layer for module in modules for layer in module.modules())
    found = ((getattr(layer, "weight", None), getattr(layer, "gemms", None)) for layer in layers)
    return {id(weight): gemms for weight, gemms in found if isinstance(gemms, Fp8Gemms) and gemms.gathers_weights}


@dataclass(frozen=True)
class Part:
    """The part of a weight that this rank updates: elements [start, start + len(values)) of the flattened weight."""

    weight: GatheredWeight
    gemms: Fp8Gemms
    start: int
    values: Tensor
    sent: Tensor
    """Bytes to send, as a uint8 tensor with the length of `values`."""

    def amax(self) -> tuple[int, Tensor]:
        """Return (row, amax). `amax` [rows, columns] contains the amax of each block in this part. `row` is the index
        of the first row of `amax` within the amax of the whole weight."""
        if not isinstance(self.gemms, BlockwiseGemms):
            return 0, region(amax_of, self.gemms.compiled)(self.values).view(1, 1)
        first, before, matrix_shape = self._blocks()
        behind = matrix_shape[0] * matrix_shape[1] - before - len(self.values)
        return first, amax_of_blocks(in_blocks(F.pad(self.values, (before, behind)).view(matrix_shape), TILE))

    def cast_(self) -> None:
        """Cast this rank's part of the weight, and store the result in `sent`. The scale is computed from the amax of
        the whole weight."""
        multiplier = self.gemms.weight_multiplier(self.weight.amax)
        if isinstance(self.gemms, BlockwiseGemms):
            first, before, shape = self._blocks()
            multiplier = by_block(multiplier[first : first + -(-shape[0] // TILE)], torch.Size(shape))
            multiplier = multiplier.expand(shape).flatten()[before : before + len(self.values)]
            values = round_scaled(self.values, multiplier, E4M3)
        else:
            values = region(round_scaled, self.gemms.compiled)(self.values, multiplier.view(()), E4M3)
        self.sent.copy_(values.view(torch.uint8))

    def _blocks(self) -> tuple[int, int, tuple[int, int]]:
        """Locate this part among the blocks of its weight. Returns (row, offset, shape). `row` is the index of the
        first block row that overlaps this part. `offset` is the number of elements between the start of this block row
        and the start of the part. `shape` is the shape of a matrix that begins with this block row and ends with the
        part's last row."""
        columns = self.weight.values.shape[1]
        first, before = divmod(self.start, TILE * columns)
        return first, before, (-(-(before + len(self.values)) // columns), columns)


class WeightGather:
    """All-gather of the fp8 casts of `weights` over the ranks of `axis`. Each rank casts only `parts`, the parts of the
    weights that it updates. The order of the weights is the same on all ranks of the axis."""

    def __init__(self, weights: Sequence[tuple[GatheredWeight, Fp8Gemms]], parts: Sequence[Part], axis: Axis) -> None:
        self.weights = weights
        self.parts = parts
        self.axis = axis
        gemms = weights[0][1]
        self.tp = gemms.tp if isinstance(gemms, TensorwiseGemms) else Axis()
        """Axis of the tensor-parallel ranks that use the same scale for a weight."""
        shapes = [amax_shape(weight, gemms) for weight, gemms in weights]
        self.amax = torch.zeros(sum(rows * columns for rows, columns in shapes), device=weights[0][0].values.device)
        found = self.amax.split([rows * columns for rows, columns in shapes])
        for (weight, _), shape, amax in zip(weights, shapes, found, strict=True):
            weight.amax = amax.view(shape)

    @torch.no_grad()
    def cast_(self) -> None:
        """Cast the current values of the weight parts that this rank owns. Collective over the data-parallel and the
        tensor-parallel ranks."""
        self.amax.zero_()
        for part in self.parts:
            first, amax = part.amax()
            known = part.weight.amax[first : first + len(amax)]
            torch.maximum(known, amax, out=known)
        all_reduce_(self.amax, self.axis, dist.ReduceOp.MAX)
        all_reduce_(self.amax, self.tp, dist.ReduceOp.MAX)
        for part in self.parts:
            part.cast_()
        for weight, _ in self.weights:
            weight.valid = True


def build_gather(ddp: DistributedDataParallel) -> WeightGather | None:
    """Prepare the fp8 gather of each bucket that contains only weights of fp8 layers. Return None if every bucket
    contains other weights."""
    gemms, axis = gemms_of_weights(ddp.modules), ddp.state.shard_axis("dp_cp")
    weights: dict[int, tuple[GatheredWeight, Fp8Gemms]] = {}
    parts: list[Part] = []
    for bucket in ddp.buckets if ddp.use_distributed_optimizer and axis.size > 1 else ():
        params = {place.index: ddp.params[place.index] for place in bucket.layout.params}
        if any(id(param) not in gemms for param in params.values()):
            continue
        whole, shard = bucket.gather_bytes()
        for place in bucket.layout.params:
            param, first = params[place.index], bucket.layout.start
            values = whole[place.start - first : place.stop - first].view(E4M3).view(matrix_of(param).shape)
            weight = GatheredWeight(values, torch.empty(0))
            weights[place.index] = weight, gemms[id(param)]
            param.gathered_in_fp8 = weight  # type: ignore[attr-defined]
        for piece in bucket.owned_pieces:
            span = slice(
                piece.offset - bucket.owned_range[0],
                piece.offset - bucket.owned_range[0] + piece.stop - piece.start,
            )
            parts.append(Part(*weights[piece.index], piece.start, bucket.owned_params[span], shard[span]))
    return WeightGather(list(weights.values()), parts, axis) if weights else None


def amax_shape(weight: GatheredWeight, gemms: Fp8Gemms) -> tuple[int, int]:
    """Return the shape of a weight's amax: one number, or one for each block."""
    if not isinstance(gemms, BlockwiseGemms):
        return 1, 1
    rows, columns = weight.values.shape
    return -(-rows // TILE), -(-columns // TILE)
