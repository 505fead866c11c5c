"""Compare five packing methods: the fraction of padding, the fraction of cut documents, and the balance of work between
replicas and between context-parallel ranks.

    python tools/bench/packing.py                   both tables, of 20,000 documents of each distribution
    python tools/bench/packing.py --documents 2000  other numbers

Lengths are drawn from three distributions, or are those of real text: the source files of Python's standard library, at
four bytes per token. There are five packing methods: greedy packing as in Megatron-LM, first-fit in document order with
any number of open samples, first-fit as in torchtitan (Grain's method with eight open samples), best-fit decreasing as
in OLMo-core, and the best-fit method of this program.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.attention.tiles import Documents
from megatron.core.datasets.dataset import StepShape
from megatron.extensions.data.packing.dividing import Divider, imbalance_of, mean_imbalances
from megatron.extensions.data.packing.order import Packed, Rounds, Waste, cut, round_of
from megatron.extensions.data.packing.survey import balance, starts_of

STEP = StepShape(samples=128, replicas=8, micro_batch_size=1)
CONTEXT_RANKS = (2, 4, 8, 16)
MICRO_BATCHES = 32
OPEN = 8
"""Default number of samples that torchtitan's first-fit packing fills at the same time."""

LONG = 32768
"""Number of tokens in a sample that context-parallel ranks share."""

Lengths = NDArray[np.int64]


def distributions(documents: int, seq_length: int) -> Iterator[tuple[str, Lengths]]:
    """Yield the name of each length distribution, and document lengths that are drawn from it."""
    random = np.random.default_rng(0)
    mean = np.log(seq_length / 8)
    yield "log-normal", random.lognormal(mean, 1.2, documents).astype(np.int64) + 2
    yield "uniform", random.integers(2, seq_length, documents)
    yield "two modes", np.where(random.random(documents) < 0.8, seq_length // 32, seq_length * 5 // 8)
    yield "source files", source_files(documents)


def source_files(documents: int) -> Lengths:
    """Return the lengths of source files in Python's standard library, drawn with replacement."""
    sizes = [path.stat().st_size for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))]
    lengths = np.array([size // 4 for size in sizes if size >= 16], np.int64)
    return np.random.default_rng(1).choice(lengths, documents)


def greedy(lengths: Lengths, seq_length: int) -> tuple[float, float]:
    """Return the fractions of padding tokens and of cut documents for samples that are cut from the concatenated
    documents."""
    ends = np.cumsum(lengths)
    return 0.0, float(((ends - lengths) // seq_length != (ends - 1) // seq_length).mean())


def first_fit(lengths: Lengths, seq_length: int) -> tuple[float, float]:
    """Return the fractions of padding tokens and of cut documents for first-fit packing. The documents are put, in
    order, into the first bin that has enough room. Documents longer than a sample are cut first."""
    _, _, sizes = cut(np.arange(len(lengths)), lengths, seq_length)
    room = np.full(len(sizes), seq_length + 1)
    for size in sizes.tolist():
        room[int((room >= size).argmax())] -= size
    used = room[room <= seq_length]
    return float(used.sum() / (len(used) * (seq_length + 1))), float((lengths > seq_length + 1).mean())


def first_fit_of_torchtitan(lengths: Lengths, seq_length: int) -> float:
    """Return the fraction of padding tokens for first-fit packing with at most `OPEN` open samples. If a document fits
    into none of the open samples, all open samples are closed."""
    _, _, sizes = cut(np.arange(len(lengths)), lengths, seq_length)
    samples, room = 0, [seq_length] * OPEN
    for places in (sizes - 1).tolist():  # The last token of a document is only a label, so it needs no room.
        fits = next((bin for bin in range(OPEN) if room[bin] >= places), None)
        if fits is None:
            samples += OPEN
            room, fits = [seq_length] * OPEN, 0
        room[fits] -= places
    samples += sum(left < seq_length for left in room)
    return 1 - float((sizes - 1).sum()) / (samples * seq_length)


def best_fit_of_olmo(lengths: Lengths, seq_length: int) -> tuple[float, float]:
    """Return the fractions of padding tokens and of cut documents for best-fit packing. Documents are cut into
    fragments of at most `seq_length` tokens. In order of decreasing length, each fragment is put into the fullest bin
    that has enough room."""
    whole, rest = lengths // seq_length, lengths % seq_length
    sizes = np.sort(np.concatenate([np.full(int(whole.sum()), seq_length), rest[rest > 0]]))[::-1]
    rooms: list[int] = []  # ascending
    bins = 0
    for size in sizes.tolist():
        place = bisect_left(rooms, size)
        if place == len(rooms):
            bins, room = bins + 1, seq_length
        else:
            room = rooms.pop(place)
        insort(rooms, room - size)
    return 1 - float(lengths.sum()) / (bins * seq_length), float((lengths > seq_length).mean())


def print_packing(documents: int, seq_length: int) -> None:
    print(
        f"Padding and cut documents, samples of {seq_length:,} tokens; work of the busiest of 8 replicas over the mean"
    )
    print(
        "lengths       greedy cut  first-fit pad, cut  torchtitan pad  OLMo-core pad, cut  best-fit pad, cut  "
        "DP 8 in order, dealt"
    )
    for name, lengths in distributions(documents, seq_length):
        packed = round_of(lengths, Rounds(range(documents), 1, 1), seq_length, seed=0, number=0)
        waste = Waste.of(packed, seq_length)
        shares = [greedy(lengths, seq_length)[1], *first_fit(lengths, seq_length)]
        shares += [first_fit_of_torchtitan(lengths, seq_length), *best_fit_of_olmo(lengths, seq_length)]
        shares += [waste.padding / waste.places, waste.cut / waste.documents]
        before, after = balance(packed, seq_length, STEP) or (1.0, 1.0)
        print(f"{name:12}" + "".join(f"{share:10.3%}" for share in shares) + f"{before:10.3f}{after:10.4f}", flush=True)


def joined_documents(lengths: Lengths, seq_length: int) -> Iterator[Documents]:
    """Yield the positions at which documents begin in samples that are cut from concatenated documents. Attention does
    not cross these positions."""
    bounds = np.cumsum(lengths)
    for first in range(0, MICRO_BATCHES * seq_length, seq_length):
        inside = bounds[(bounds > first) & (bounds < first + seq_length)] - first
        yield ((0, *inside.tolist()),)


def packed_documents(packed: Packed, seq_length: int) -> Iterator[Documents]:
    """Yield the positions at which documents begin in samples that contain only whole documents."""
    for a, b in pairwise([0, *packed.ends[:MICRO_BATCHES].tolist()]):
        yield (starts_of(packed.lengths[a:b].tolist(), seq_length),)


def print_context(documents: int) -> None:
    print(f"\nWork of the busiest context rank over the mean, samples of {LONG:,} tokens, and share of the keys sent")
    print("lengths       packing   CP  chunks of samples  balanced  sent   hybrid  sent   DP 8 in order  dealt")
    random = np.random.default_rng(2)
    short = random.lognormal(np.log(LONG / 32), 1.5, documents).astype(np.int64) + 2
    for name, lengths in (("log-normal", short), ("source files", source_files(documents))):
        packed = round_of(lengths, Rounds(range(documents), 1, 1), LONG, seed=0, number=0)
        before, after = balance(packed, LONG, STEP._replace(samples=64)) or (1.0, 1.0)
        ways = {"greedy": joined_documents(lengths, LONG), "best-fit": packed_documents(packed, LONG)}
        for (way, samples), ranks in product([(way, list(found)) for way, found in ways.items()], CONTEXT_RANKS):
            dealt, hybrid = (
                mean_imbalances([imbalance_of(divider.divided(each, LONG, ranks), each, LONG) for each in samples])
                for divider in (Divider(), Divider(hybrid=True))
            )
            print(
                f"{name:12}  {way:8} {ranks:3} {dealt.before:18.3f} {dealt.after:9.4f} {dealt.sent:5.0%} "
                f"{hybrid.after:8.4f} {hybrid.sent:5.0%} "
                + (f"{before:15.3f} {after:7.4f}" if way == "best-fit" else ""),
                flush=True,
            )


def main(argv: list[str] | None = None) -> int:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20000, help="of each distribution (20000)")
    parser.add_argument("--seq-length", type=int, default=4096, help="tokens per sample in the first table (4096)")
    args = parser.parse_args(argv)
    print_packing(args.documents, args.seq_length)
    print_context(args.documents)
    return 0


if __name__ == "__main__":
    sys.exit(main())
