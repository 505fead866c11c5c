"""Padding and cut documents of three ways to pack, and the balance of eight replicas, on made-up lengths.

python tools/bench/packing.py              20,000 documents of each distribution, samples of 4,096 tokens
python tools/bench/packing.py 2000 1024    other numbers
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.extensions.data.packing.dealing import deal, imbalance, pairs_of
from megatron.extensions.data.packing.order import Packed, Rounds, Waste, cut, round_of

REPLICAS, SAMPLES = 8, 16
"""Data-parallel replicas, and samples of each in a step."""


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


def balance(packed: Packed, seq_length: int) -> tuple[float, float]:
    """Mean of max/mean of the work of replicas over steps, in order and dealt by work."""
    bounds = pairwise([0, *packed.ends.tolist()])
    works = np.array([pairs_of(packed.lengths[a:b].tolist(), seq_length) for a, b in bounds], np.int64)
    batch = REPLICAS * SAMPLES
    in_order = np.arange(batch).reshape(SAMPLES, REPLICAS, 1)
    steps = [works[first : first + batch] for first in range(0, len(works) - batch + 1, batch)]
    found = [(imbalance(step, in_order), imbalance(step, deal(step, REPLICAS, 1))) for step in steps]
    before, after = np.mean(found, axis=0).tolist() if found else (1.0, 1.0)
    return before, after


def main(words: list[str]) -> int:
    """Prints a table."""
    documents, seq_length = map(int, words or ("20000", "4096"))
    print("lengths     greedy cut  first-fit pad  cut    best-fit pad  cut    DP 8 max/mean  balanced")
    for name, lengths in distributions(documents, seq_length):
        packed = round_of(lengths, Rounds(range(documents), 1, 1), seq_length, seed=0, number=0)
        waste = Waste.of(packed, seq_length)
        _, cuts = greedy(lengths, seq_length)
        padding, long = first_fit(lengths, seq_length)
        before, after = balance(packed, seq_length)
        print(
            f"{name:11} {cuts:10.2%}  {padding:13.3%}  {long:5.2%}  {waste.padding / waste.places:12.3%}  "
            f"{waste.cut / waste.documents:5.2%}  {before:13.3f}  {after:8.4f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
