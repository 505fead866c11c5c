"""Padding and cut documents of three ways to pack, and the balance of eight replicas, on made-up lengths.

python tools/bench/packing.py              20,000 documents of each distribution, samples of 4,096 tokens
python tools/bench/packing.py 2000 1024    other numbers
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.datasets.dataset import StepShape
from megatron.extensions.data.packing.order import Rounds, Waste, cut, round_of
from megatron.extensions.data.packing.survey import balance

STEP = StepShape(samples=128, replicas=8, micro_batch_size=1)


def distributions(documents: int, seq_length: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Name and lengths of each."""
    random = np.random.default_rng(0)
    mean = np.log(seq_length / 8)
    yield "log-normal", random.lognormal(mean, 1.2, documents).astype(np.int64) + 2
    yield "uniform", random.integers(2, seq_length, documents)
    yield "two modes", np.where(random.random(documents) < 0.8, seq_length // 32, seq_length * 5 // 8)


def first_fit(lengths: NDArray[np.int64], seq_length: int) -> tuple[float, float]:
    """Shares of padding and of cut documents if each document goes, in its order, into the first bin that it fits."""
    _, _, sizes = cut(np.arange(len(lengths)), lengths, seq_length)
    room = np.full(len(sizes), seq_length + 1)
    for size in sizes.tolist():
        room[int((room >= size).argmax())] -= size
    used = room[room <= seq_length]
    return float(used.sum() / (len(used) * (seq_length + 1))), float((lengths > seq_length + 1).mean())


def greedy(lengths: NDArray[np.int64], seq_length: int) -> tuple[float, float]:
    """The same if documents are joined and cut wherever a sample ends."""
    ends = np.cumsum(lengths)
    return 0.0, float(((ends - lengths) // seq_length != (ends - 1) // seq_length).mean())


def main(words: list[str]) -> int:
    """Prints a table."""
    documents, seq_length = map(int, words or ("20000", "4096"))
    print("lengths     greedy cut  first-fit pad  cut    best-fit pad  cut    DP 8 max/mean  balanced")
    for name, lengths in distributions(documents, seq_length):
        packed = round_of(lengths, Rounds(range(documents), 1, 1), seq_length, seed=0, number=0)
        waste = Waste.of(packed, seq_length)
        _, cuts = greedy(lengths, seq_length)
        padding, long = first_fit(lengths, seq_length)
        before, after = balance(packed, seq_length, STEP) or (1.0, 1.0)
        print(
            f"{name:11} {cuts:10.2%}  {padding:13.3%}  {long:5.2%}  {waste.padding / waste.places:12.3%}  "
            f"{waste.cut / waste.documents:5.2%}  {before:13.3f}  {after:8.4f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
