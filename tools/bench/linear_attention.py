"""Time of the gated delta rule in chunks, beside token by token and beside causal attention of the same widths: forward
and backward, ratios of medians, in turns.

    python tools/bench/linear_attention.py                                  # on one process, fp32
    python tools/bench/linear_attention.py --lengths 4096 --heads 8 --width 128 --threads 2

Contestants are processes of their own which take turns. All have one sample, and as many heads of queries and keys as
of values, all of one width.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.side_by_side import Contestant, Round, Spread, interleaved, machine, positive, say_machine, write_json

HOWS = ("chunks", "token by token", "attention")


def measured(how: str, length: int, heads: int, width: int) -> Round:
    """Forward and backward passes per second."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from megatron.extensions.linear_attention.gated_delta_rule import gated_delta_chunks, gated_delta_steps

    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(length, 1, heads, width, generator=generator) for _ in range(3))
    g, beta = -torch.rand(length, 1, heads, generator=generator), torch.rand(length, 1, heads, generator=generator)
    operands = [x.requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta)]

    def attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor]:
        return (F.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True),)

    rules: dict[str, Callable[..., tuple[Tensor, ...]]] = dict(
        zip(HOWS, (gated_delta_chunks, gated_delta_steps, attention), strict=True)
    )

    def one_round() -> float:
        began = time.perf_counter()
        out = rules[how](*operands)[0]
        torch.autograd.grad(out, operands, torch.ones_like(out), allow_unused=True)
        return 1 / (time.perf_counter() - began)

    return one_round


@dataclass(frozen=True)
class Row:
    length: int
    how: str
    milliseconds: Spread
    ratio: float
    """Of the median to that of chunks."""


def rows_of(found: dict[str, list[float] | str], lengths: Sequence[int]) -> list[Row]:
    """Raises ValueError if a contestant failed."""
    rows: list[Row] = []
    for length in lengths:
        first = None
        for how in HOWS:
            values = found[f"{how}, {length} tokens"]
            if isinstance(values, str):
                raise ValueError(f"{how}: {values}")
            spread = Spread.of([1e3 / value for value in values])
            first = first or spread.median
            rows.append(Row(length, how, spread, spread.median / first))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=positive, default=[512, 2048], help="tokens of the sample")
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=64, help="channels of a head")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1, help="of each process")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    facts = machine() | {"threads": args.threads, "heads": args.heads, "width": args.width}
    say_machine(facts)
    contestants = [
        Contestant(f"{how}, {length} tokens", measured, (how, length, args.heads, args.width), args.threads)
        for length in args.lengths
        for how in HOWS
    ]
    rows = rows_of(interleaved(contestants, args.rounds), args.lengths)
    for row in rows:
        print(f"{row.length:6} tokens  {row.how:<15} {row.milliseconds:9.1f} ms   {row.ratio:7.2f} x chunks")
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
