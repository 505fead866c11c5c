"""Triton kernels for expert weight gradients. The main kernel is persistent: its programs share one list of the tiles
of all experts' gradient matrices.

With few tokens per expert, the memory traffic of the fp32 sums limits the speed of a weight gradient. For a matrix of
3,584 x 4,096 and 1,024 tokens, reading and writing the sums takes as long as the multiplication. Programs therefore do
not wait until the sums are read and written. Each program sends its tile to the L2 cache. The cache performs the
addition while the program loads operands of the next tile. One program runs on each multiprocessor, with tiles of 128 x
256. With smaller tiles of 128 x 128, programs would read operands faster than the cache can deliver them.

Experts are listed in ascending order of their numbers of rows, so that adjacent tiles take about the same time. If the
last tiles would leave many multiprocessors idle, these tiles are split along tokens into equal parts. The first part of
a split tile is added directly to the result. The other parts are written to separate memory, and a second kernel adds
them to the result in a fixed order. The order of additions is therefore independent of the timing of programs.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.extensions.speed.fusions.kernel_choice import multiprocessors

FIRST, WHOLE, TAIL, PARTS, HEAD = (tl.constexpr(place) for place in range(5))
"""Positions in a schedule tensor. The first four entries are the number of experts without rows, the number of whole
tiles, the number of split tiles, and the number of parts per split tile. Three lists start at HEAD: the indices of the
experts, the first row of each expert, and the end of each expert's rows. In all three lists, experts are sorted by
their number of rows in ascending order."""

MOST_PARTS = tl.constexpr(4)
"""Maximum number of parts into which a tile is split along tokens."""

ENOUGH_ROUNDS = tl.constexpr(16)
"""Threshold for splitting tiles. If the longest tile takes at most 1 / ENOUGH_ROUNDS of the average number of loop
steps per program, no tile is split."""

LEAST_STEPS = tl.constexpr(8)
"""Minimum number of loop steps per part if a tile is split along the token dimension."""


@dataclass(frozen=True)
class Tiling:
    """Compilation settings of `add_grouped_kernel` and `add_grouped_fp8_kernel`."""

    outputs: int
    inputs: int
    rows: int
    """Tokens per step."""

    warps: int
    stages: int
    of_multiprocessor: int = 1
    """Programs per multiprocessor."""

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_O": self.outputs, "BLOCK_I": self.inputs, "BLOCK_N": self.rows}


TILINGS = {
    "wide": Tiling(128, 256, 64, warps=8, stages=4),
    "tall": Tiling(256, 128, 64, warps=8, stages=4),
    "small": Tiling(128, 128, 64, warps=4, stages=3, of_multiprocessor=2),
}
"""Tilings by name. The tiling "small" suits Hopper, where each multiprocessor can run two of its programs at a time."""


@triton.jit
def schedule_kernel(schedule, ends, experts, tiles, programs, slots, EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute the order in which the programs of `add_grouped_kernel` process tiles, and write it to `schedule`. The
    kernel is launched with a single program. EXPERTS is a power of two."""
    e = tl.arange(0, EXPERTS)
    stop = tl.load(ends + e, mask=e < experts, other=0)
    start = tl.load(ends + e - 1, mask=(e > 0) & (e < experts), other=0)
    steps = tl.where(e < experts, tl.cdiv(stop - start, BLOCK_N), 0)
    last = tl.max(steps)
    # Sort experts by their number of steps, and then by index. A single sort key combines steps and index. Experts that
    # exist only as padding come last.
    key = tl.where(e < experts, steps, last + 1).to(tl.int64) * EXPERTS + e
    order = (tl.sort(key) % EXPERTS).to(tl.int32)
    used = e < experts
    first = tl.sum((used & (steps == 0)).to(tl.int32))
    total = (experts - first) * tiles
    # Only tiles of the expert with the most rows may be split.
    tail = tl.minimum(total % programs, tiles)
    parts = 1
    best = tl.cdiv(tail, programs) * 12
    for number in tl.static_range(2, MOST_PARTS + 1):
        time = tl.cdiv(tail * number, programs) * (12 // number)
        fits = ((number - 1) * tail <= slots) & (last >= number * LEAST_STEPS)
        better = fits & (time < best)
        parts = tl.where(better, number, parts)
        best = tl.where(better, time, best)
    many = tl.sum(steps.to(tl.int64)) * tiles >= last.to(tl.int64) * programs * ENOUGH_ROUNDS
    parts = tl.where(many, 1, parts)
    tail = tl.where(parts == 1, 0, tail)
    tl.store(schedule + FIRST, first)
    tl.store(schedule + WHOLE, total - tail)
    tl.store(schedule + TAIL, tail)
    tl.store(schedule + PARTS, parts)
    tl.store(schedule + HEAD + e, order, mask=used)
    of_start = tl.load(ends + order - 1, mask=used & (order > 0) & (order < experts), other=0)
    of_stop = tl.load(ends + order, mask=used & (order < experts), other=0)
    tl.store(schedule + HEAD + experts + e, of_start, mask=used)
    tl.store(schedule + HEAD + 2 * experts + e, of_stop, mask=used)


@triton.jit
def list_item(schedule, item, experts, tiles, BLOCK_N: tl.constexpr):
    """Look up an item of the tile list, which is a whole tile or a part of a tile. Returns the position of the item's
    expert in the schedule, the index of the tile, the index of the part, and the start and the end of the range of rows
    to sum."""
    whole = tl.load(schedule + WHOLE)
    tail = tl.load(schedule + TAIL)
    split = item >= whole
    part = tl.where(split, (item - whole) // tl.maximum(tail, 1), 0)
    place = tl.where(split, whole + (item - whole) % tl.maximum(tail, 1), item)
    parts = tl.where(split, tl.load(schedule + PARTS), 1)
    rank = tl.load(schedule + FIRST) + place // tiles
    start = tl.load(schedule + HEAD + experts + rank)
    stop = tl.load(schedule + HEAD + 2 * experts + rank)
    steps = tl.cdiv(stop - start, BLOCK_N)
    begin = start + part * steps // parts * BLOCK_N
    end = tl.minimum(start + (part + 1) * steps // parts * BLOCK_N, stop)
    return rank, place % tiles, part, begin, end


@triton.jit
def list_steps(schedule, experts, tiles, program, programs, EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the number of loop steps that a program needs for all of its items. A program processes every
    `programs`-th item of the list."""
    first, whole = tl.load(schedule + FIRST), tl.load(schedule + WHOLE)
    items = whole + tl.load(schedule + TAIL) * tl.load(schedule + PARTS)
    r = tl.arange(0, EXPERTS)
    used = (r >= first) & (r < experts)
    start = tl.load(schedule + HEAD + experts + r, mask=used, other=0)
    stop = tl.load(schedule + HEAD + 2 * experts + r, mask=used, other=0)
    low = tl.minimum((r - first) * tiles, whole)
    high = tl.minimum(low + tiles, whole)
    count = tl.cdiv(tl.maximum(high - program, 0), programs) - tl.cdiv(tl.maximum(low - program, 0), programs)
    total = tl.sum(tl.where(used, count * tl.cdiv(stop - start, BLOCK_N), 0))
    for item in range(program + tl.cdiv(tl.maximum(whole - program, 0), programs) * programs, items, programs):
        _, _, _, begin, end = list_item(schedule, item, experts, tiles, BLOCK_N)
        total += tl.cdiv(end - begin, BLOCK_N)
    return total


@triton.jit
def tile_corner(tile, outputs, inputs, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    """Return the indices of the first output and the first input in a tile. Tiles are numbered column by column within
    groups of eight rows of tiles, so that consecutive tiles share operands in the cache."""
    down, across = tl.cdiv(outputs, BLOCK_O), tl.cdiv(inputs, BLOCK_I)
    group, place = tile // (8 * across), tile % (8 * across)
    height = tl.minimum(down - group * 8, 8)
    return (group * 8 + place % height) * BLOCK_O, (place // height) * BLOCK_I


@triton.jit
def add_grouped_kernel(
    out,
    parts,
    dy,
    x,
    schedule,
    outputs,
    inputs,
    experts,
    tiles,
    programs,
    EXPERTS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute out[e] += dy_eᵀ x_e, [outputs, inputs], for each expert e. `parts` [slots, BLOCK_O, BLOCK_I] receives the
    partial sums of split tiles, except the first partial sum of each tile. A program processes all steps of all its
    tiles in one loop. Programs can therefore load operands of the next tile while the previous tile is being added to
    `out`."""
    item = tl.program_id(0) - programs
    row, end = 0, 0
    corner_o, corner_i = 0, 0
    total = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    for _ in range(list_steps(schedule, experts, tiles, tl.program_id(0), programs, EXPERTS, BLOCK_N)):
        if row + BLOCK_N >= end:
            item += programs
            _rank, tile, _part, row, end = list_item(schedule, item, experts, tiles, BLOCK_N)
            corner_o, corner_i = tile_corner(tile, outputs, inputs, BLOCK_O, BLOCK_I)
        else:
            row += BLOCK_N
        n = row + tl.arange(0, BLOCK_N)
        o, i = corner_o + tl.arange(0, BLOCK_O), corner_i + tl.arange(0, BLOCK_I)
        at, used = n[:, None].to(tl.int64), n[:, None] < end
        of_dy = tl.load(dy + at * outputs + o[None, :], mask=used & (o[None, :] < outputs), other=0.0)
        of_x = tl.load(x + at * inputs + i[None, :], mask=used & (i[None, :] < inputs), other=0.0)
        total = tl.dot(tl.trans(of_dy), of_x, total, input_precision="ieee")
        if row + BLOCK_N >= end:
            # Read the tile position again, because Triton does not prefetch loads if the loop carries the position from
            # one step to the next.
            rank, _tile, part, _row, _end = list_item(schedule, item, experts, tiles, BLOCK_N)
            expert = tl.load(schedule + HEAD + rank).to(tl.int64)
            slot = (item - tl.load(schedule + WHOLE) - tl.load(schedule + TAIL)).to(tl.int64)
            matrix, apart = out + expert * outputs * inputs, parts + slot * (BLOCK_O * BLOCK_I)
            send_tile(matrix, apart, part, total, corner_o, corner_i, outputs, inputs, BLOCK_O, BLOCK_I)
            total = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)


@triton.jit
def send_tile(
    matrix, apart, part, total, corner_o, corner_i, outputs, inputs, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr
):
    """Store the sums of one tile. A whole tile, or the first part of a split tile, is added to the matrix. Any other
    part is written to separate memory.

    No other program of this kernel adds to the same tile. The tile is sent in four parts. Before a part is sent, its
    values are rearranged in shared memory so that each thread holds adjacent values. A quarter of a tile needs less
    shared memory for this than a whole tile.
    """
    left, right = _halves(total, BLOCK_O, BLOCK_I)
    for half in tl.static_range(2):
        two = _halves(left if half == 0 else right, BLOCK_O, BLOCK_I // 2)
        for quarter in tl.static_range(2):
            column = (2 * half + quarter) * (BLOCK_I // 4) + tl.arange(0, BLOCK_I // 4)[None, :]
            o, i = corner_o + tl.arange(0, BLOCK_O)[:, None], corner_i + column
            if part == 0:
                to = matrix + o.to(tl.int64) * inputs + i
                tl.atomic_add(to, two[quarter], mask=(o < outputs) & (i < inputs), sem="relaxed")
            else:
                tl.store(apart + tl.arange(0, BLOCK_O)[:, None] * BLOCK_I + column, two[quarter])


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the left and right halves of a matrix's columns."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def add_parts_kernel(
    out,
    parts,
    schedule,
    outputs,
    inputs,
    experts,
    tiles,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add `parts` to `out` in a fixed order. `parts` contains the partial sums of split tiles that `add_grouped_kernel`
    stored. Each program adds ROWS rows of a tile."""
    place, tail = tl.program_id(0), tl.load(schedule + TAIL)
    if place >= tail:
        return
    rank, tile, _part, _row, _end = list_item(schedule, tl.load(schedule + WHOLE) + place, experts, tiles, BLOCK_N)
    corner_o, corner_i = tile_corner(tile, outputs, inputs, BLOCK_O, BLOCK_I)
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_I)[None, :]
    o, i = corner_o + row, corner_i + column
    inside = (o < outputs) & (i < inputs)
    expert = tl.load(schedule + HEAD + rank).to(tl.int64)
    to = out + (expert * outputs + o) * inputs + i
    total = tl.load(to, mask=inside, other=0.0)
    for part in range(1, tl.load(schedule + PARTS)):
        slot = ((part - 1) * tail + place).to(tl.int64)
        total += tl.load(parts + slot * (BLOCK_O * BLOCK_I) + row * BLOCK_I + column)
    tl.store(to, total, mask=inside)


ROWS = 16
"""Number of tile rows that each program of `add_parts_kernel` adds."""


def add_grouped_in_list_(out: Tensor, dy: Tensor, x: Tensor, ends: Tensor, tiling: str) -> None:
    """Launch the kernels that add the weight gradients of experts to `out` (see `grouped_choice`)."""
    experts, outputs, inputs = out.shape
    assert out.is_contiguous() and dy.is_contiguous() and x.is_contiguous() and ends.dtype == torch.int32
    assert dy.shape == (x.shape[0], outputs) and x.shape[1] == inputs and ends.shape == (experts,)
    assert out.dtype == torch.float32
    chosen = TILINGS[tiling]
    tiles = triton.cdiv(outputs, chosen.outputs) * triton.cdiv(inputs, chosen.inputs)
    programs = multiprocessors(out.device) * chosen.of_multiprocessor
    schedule = torch.empty(HEAD.value + 3 * experts, dtype=torch.int32, device=out.device)
    parts = out.new_empty(programs, chosen.outputs, chosen.inputs)
    padded = max(16, triton.next_power_of_2(experts))
    schedule_kernel[(1,)](schedule, ends, experts, tiles, programs, programs, padded, chosen.rows)
    shape = outputs, inputs, experts, tiles
    compiled = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    constants = chosen.constants
    add_grouped_kernel[(programs,)](out, parts, dy, x, schedule, *shape, programs, padded, **constants, **compiled)
    add_parts_kernel[(programs, chosen.outputs // ROWS)](out, parts, schedule, *shape, **constants, ROWS=ROWS)
