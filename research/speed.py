"""Compare the speed of this program with transformers, litgpt, torchtitan, megatron-core and PyTorch's own parallelism.

    python research/speed.py --only "llama float32 eager" --rounds 7
    python research/speed.py --only TP "ours ZeRO-3" "torch FSDP2 ZeRO-3" --ranks 4  # a cell, and two rows of another

The benchmark adds the other programs to the cells (groups of compared programs) of tools/bench/speed.py, and accepts
the same options. Each program needs its package: `pip install -r research/requirements.txt`, in a separate environment.

In single-process cells, the models of the other programs (research/peers.py) are trained with torch's fused AdamW and
with gradient clipping. In bf16 cells, the other programs store and update their parameters in bf16, which is their
fastest mode. In bf16 cells, this program uses fp32 main parameters and accumulates gradients in fp32. The TP, PP and DP
cells compare this program with research/torch_parallel.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # Remove this folder from the path, because its module names clash with those of other packages.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from research.peers import ONLY_LLAMA, PEERS, build_peer
from tools.bench import speed
from tools.bench.side_by_side import Contestant, Round, timed
from tools.bench.styles import STYLES, Style

TORCHS = {
    "ours TP": "torch DTensor TP",
    "ours TP+SP": "torch DTensor TP",
    "ours PP 1f1b": "torch PP 1F1B",
    "ours PP interleaved": "torch PP Interleaved1F1B",
    "ours PP zb-h1": "torch PP ZBV",
    "ours PP zb-v": "torch PP ZBV",
    "ours DP": "torch DDP",
    "ours ZeRO-1": "torch FSDP2",
    "ours ZeRO-2": "torch FSDP2 ZeRO-2",
    "ours ZeRO-3": "torch FSDP2 ZeRO-3",
}
"""For each row of this program, the row of PyTorch's built-in parallelism with which it is compared."""


def peer(name: str, style: Style, dtype: str, compiled: bool, steps: int) -> Round:
    """Train another program's model in a plain training loop."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    model, loss_of = build_peer(name, style, dtype)
    run: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=speed.LR, betas=speed.BETAS, eps=speed.EPS, weight_decay=speed.WEIGHT_DECAY, fused=True
    )
    batches = cycle(torch.randint(style.vocab, (16, style.micro_batch, style.seq + 1)))

    def step() -> None:
        batch = next(batches)
        loss_of(run, batch[:, :-1], batch[:, 1:].contiguous()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, steps, style.tokens)


def torchs(kind: str, tokens: int, steps: int) -> Round:
    """Return a round that trains with PyTorch's built-in parallelism of the given kind, such as "FSDP2"."""
    from research.torch_parallel import started

    return timed(started(kind, speed.LAYOUT_STYLE, speed.MICRO_BATCHES), steps, tokens)


def cells(threads: int = 1, ranks: int = 2, steps: int = 1) -> dict[str, speed.Cell]:
    """Return the cells of tools/bench/speed.py that can be compared with other programs. Each returned cell also
    contains a `Contestant` for each of these programs."""
    every = speed.cells(threads, ranks, steps)
    found = {}
    for name, dtype, mode in product(STYLES, speed.FORMATS, ("eager", "compiled")):
        style, compiled = STYLES[name], mode == "compiled"
        others = [other for other in PEERS if style.llama or other not in ONLY_LLAMA]
        members = [Contestant(o, peer, (o, style, dtype, compiled, steps), threads) for o in others]
        found[f"{name} {dtype} {mode}"] = beside(every[f"{name} {dtype} {mode}"], members, {speed.OURS: others})
    tokens = speed.MICRO_BATCHES * speed.LAYOUT_STYLE.tokens
    rows = [Contestant(name, torchs, (name, tokens, steps), ranks=ranks) for name in dict.fromkeys(TORCHS.values())]
    rivals = {ours: [theirs] for ours, theirs in TORCHS.items()}
    for kind in ("TP", "PP", "DP"):
        found[kind] = beside(every[kind], [row for row in rows if speed.kind_of(row.name) == kind], rivals)
    return found


def beside(cell: speed.Cell, members: Sequence[Contestant], others: dict[str, list[str]]) -> speed.Cell:
    """Return a copy of a benchmark cell to which the contestants `members` are added."""
    return replace(cell, contestants=[*cell.contestants, *members], others=others)


def main(argv: Sequence[str] | None = None) -> int:
    return speed.run_cells(__doc__, cells, argv, [*PEERS])


if __name__ == "__main__":
    sys.exit(main())
