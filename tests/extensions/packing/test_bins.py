"""Tests of best-fit-decreasing packing and of the order of packed samples. Packing and order are computed from document
lengths alone."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron.extensions.data.packing.bins import best_fit_decreasing
from megatron.extensions.data.packing.flags import PackingConfig
from megatron.extensions.data.packing.order import Packed, Rounds, Waste, round_of
from megatron.extensions.data.packing.survey import survey_line


def one_by_one(lengths: list[int], capacity: int) -> list[list[int]]:
    """Return the lengths in each bin, computed by literally following the best-fit rule."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [each for each in bins if sum(each) + length <= capacity]
        best = max(fitting, key=sum, default=None)
        if best is not None:
            bins.remove(best)  # append the bin again at the end, after other bins that are equally full
        bins.append([*(best or []), length])
    return bins


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 30))
@example([10, 10, 6, 4, 4, 4, 3, 3], 20)
def test_bins_match_the_rule(lengths: list[int], capacity: int) -> None:
    bins = best_fit_decreasing(np.array(lengths, np.int64), capacity)
    found = [sorted(np.array(lengths)[bins == number].tolist()) for number in range(max(bins, default=-1) + 1)]
    assert sorted(found) == sorted(map(sorted, one_by_one(lengths, capacity)))


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(lambda lengths: max(lengths) > 1)


def packed(lengths: list[int], seq_length: int, window: int, seed: int, number: int = 0) -> tuple[Packed, Rounds]:
    array: NDArray[np.int32] = np.array(lengths, np.int32)
    rounds = Rounds.of(array, range(len(array)), seq_length, window)
    return round_of(array, rounds, seq_length, seed, number), rounds


@given(LENGTHS, st.integers(2, 16), st.integers(1, 50), st.integers(0, 3), st.integers(0, 2))
def test_every_token_but_the_first_is_predicted_once_an_epoch(
    lengths: list[int], seq_length: int, window: int, seed: int, number: int
) -> None:
    samples, rounds = packed(lengths, seq_length, window, seed, number)
    predicted = [
        (document, place)
        for document, start, count in zip(*(field.tolist() for field in samples[1:]), strict=True)
        for place in range(start + 1, start + count)
    ]
    once = [(document, place) for document, length in enumerate(lengths) for place in range(1, length)]
    assert sorted(predicted) == sorted(once * (rounds.epochs if number else 1))


@given(LENGTHS, st.integers(2, 16), st.integers(1, 50), st.integers(0, 3))
def test_documents_stay_whole_if_they_fit_and_samples_are_not_too_long(
    lengths: list[int], seq_length: int, window: int, seed: int
) -> None:
    samples, _ = packed(lengths, seq_length, window, seed)
    parts = np.diff(samples.ends, prepend=0)
    assert parts.min() > 0 and samples.ends[-1] == len(samples.documents)
    sizes = np.add.reduceat(samples.lengths, samples.ends - parts)
    assert sizes.max() <= seq_length + 1
    whole = samples.lengths == np.array(lengths)[samples.documents]
    assert (whole | (np.array(lengths)[samples.documents] > seq_length + 1)).all()


@given(LENGTHS, st.integers(2, 16), st.integers(0, 3))
def test_the_order_depends_only_on_seed_round_and_lengths(lengths: list[int], seq_length: int, seed: int) -> None:
    first, again = (packed(lengths, seq_length, 8, seed, 1)[0] for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))


def test_seeds_and_rounds_differ_and_samples_are_shuffled() -> None:
    lengths = (np.arange(400) * 7 % 60 + 2).tolist()
    orders = [packed(lengths, 64, 400, seed, number)[0] for seed, number in ((1, 0), (1, 1), (2, 0))]
    assert len({tuple(each.documents.tolist()) for each in orders}) == 3
    firsts = orders[0].lengths[orders[0].ends - 1]
    assert not (np.diff(firsts) <= 0).all()


def test_windows_are_of_equal_size_and_a_small_data_set_repeats() -> None:
    lengths = np.full(100, 8, np.int32)
    assert Rounds.of(lengths, range(100), 15, 40) == Rounds(range(100), 1, 3)
    assert Rounds.of(lengths, range(100), 1023, 40) == Rounds(range(100), 21, 1)
    # the first round is one epoch long
    assert round_of(lengths, Rounds(range(100), 21, 1), 1023, 0, 0).lengths.sum() == 800


def test_waste_counts_padding_and_long_documents() -> None:
    samples, _ = packed([9, 4, 5, 30, 3, 6], 8, 100, 0, number=1)
    waste = Waste.of(samples, 8)
    epochs = round((waste.documents) / 6)
    assert waste.cut == epochs and waste.places == 9 * waste.samples
    # The document of 30 tokens is cut into four parts, which share three tokens.
    tokens = epochs * (9 + 4 + 5 + 3 + 6 + 30 + 3)
    assert waste.padding == waste.places - tokens
    assert survey_line(PackingConfig("best-fit", 100), np.full(1000, 5), 8, None) == (
        "best-fit packing: 44.4 % padding, 0 of 1,000 documents cut because they are longer than a sample"
    )


def test_a_million_documents_take_seconds() -> None:
    lengths = np.random.default_rng(0).lognormal(6.5, 1, 10**6).astype(np.int64).clip(1, 4097)
    bins = best_fit_decreasing(lengths, 4097)
    assert np.bincount(bins, lengths).max() <= 4097
    assert lengths.sum() / ((int(bins.max()) + 1) * 4097) > 0.999
