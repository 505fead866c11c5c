"""What ranks write of a checkpoint: the boxes of all of them must cover each tensor once. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod

from megatron.core.boxes import overlap
from megatron.extensions.planner.rehearsal.record import Box, RankRecord

PROBLEMS_SHOWN = 4


def written_bytes(boxes: Sequence[Box]) -> int:
    """Bytes of the boxes of a rank."""
    return sum(prod(box.shape) * box.itemsize for box in boxes)


def coverage_problems(records: Sequence[RankRecord], every_rank: bool) -> list[str]:
    """Elements that two ranks write, and with `every_rank`, whose records these are, elements that none does. A rank
    that failed writes nothing, and then nothing is judged."""
    if any(record.failure is not None for record in records):
        return []
    by_key: dict[str, list[tuple[RankRecord, Box]]] = defaultdict(list)
    for record in records:
        for box in record.boxes:
            by_key[box.key].append((record, box))
    found: list[str] = []
    for key, written in by_key.items():
        shapes = {box.global_shape for _, box in written}
        if len(shapes) > 1:
            found.append(f"{key} has the shapes {' and '.join(map(str, sorted(shapes)))} on different ranks")
            continue
        if (twice := _overlap(written)) is not None:
            found.append(f"{key}: {twice[0].name()} and {twice[1].name()} both write elements of it")
        elif every_rank and sum(prod(box.shape) for _, box in written) < prod(written[0][1].global_shape):
            found.append(f"{key} {written[0][1].global_shape}: no rank writes all of its elements")
    more = len(found) - PROBLEMS_SHOWN
    return [*found[:PROBLEMS_SHOWN], f"and {more} more tensors"] if more > 0 else found


def _overlap(written: Sequence[tuple[RankRecord, Box]]) -> tuple[RankRecord, RankRecord] | None:
    """The first two ranks whose boxes have an element in common."""
    ordered = sorted(written, key=lambda each: each[1].offset)
    for number, (record, box) in enumerate(ordered):
        end = box.offset[0] + box.shape[0] if box.shape else 1
        for other, later in ordered[number + 1 :]:
            if later.shape and later.offset[0] >= end:
                break
            if overlap(box.offset, box.shape, later.offset, later.shape) is not None:
                return record, other
    return None
