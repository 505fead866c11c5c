"""Tokens of packed documents are divided among context-parallel ranks. The tests cover the assignment itself and
training."""

from __future__ import annotations

import re
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.attention.tiles import Documents, Shards, causal_tiles, even_shards, rows_of
from megatron.core.datasets.dataset import StepShape
from megatron.extensions.data.packing.context_shards import (
    WHOLE,
    balanced_shards,
    chunks_of_documents,
    even_chunks,
    hybrid_shards,
    owners_of,
    score,
)
from megatron.extensions.data.packing.flags import PackingConfig
from megatron.extensions.data.packing.survey import survey_line
from megatron.testing.layout_matrix import TOLERANCE
from megatron.testing.snapshot import differences
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import findings, resolve
from tests.apart import read_records
from tests.extensions.packing.test_packed_data import MODEL, PACKED, corpus
from tests.harness import run_world, train_in_world, train_to_the_end
from tests.tiny import TINY

RANKS = (2, 3, 4, 8, 16)


@st.composite
def micro_batches(draw: st.DrawFn, samples: int = 3) -> tuple[Documents, int, int]:
    """Draw a tuple (documents, sequence length, number of ranks)."""
    ranks = draw(st.sampled_from(RANKS))
    length = 2 * ranks * draw(st.integers(1, 24))
    inner = st.lists(st.integers(1, length - 1), unique=True, max_size=12)
    found = draw(st.lists(inner, min_size=1, max_size=samples))
    return tuple((0, *sorted(starts)) for starts in found), length, ranks


def check(shards: Shards, documents: Documents, length: int) -> None:
    """Check that each position occurs once, that all ranks have the same number of positions, and that each pair of a
    query and a key that is not masked is in exactly one tile of one rank."""
    ranks = len(shards.held)
    held = [[place for span in spans for place in span] for spans in shards.held]
    assert sorted(chain.from_iterable(held)) == list(range(length)) and {len(each) for each in held} == {
        length // ranks
    }
    assert all(each == sorted(each) for each in held)
    assert len({sum(map(len, spans)) for spans in shards.sent}) == 1
    pairs = np.zeros((len(documents), length, length), np.int64)
    for rank, spans in enumerate(shards.held):
        for source in range(ranks):
            keys = spans if source == rank else shards.sent[source]
            places = [place for span in keys for place in span]
            for tile in causal_tiles(spans, keys, documents, None):
                rows = np.array(held[rank])[tile.queries.start : tile.queries.stop]
                columns = np.array(places)[tile.keys.start : tile.keys.stop]
                seen = rows[:, None] >= columns if tile.diagonal else np.ones((len(rows), len(columns)), bool)
                chosen = slice(None) if tile.sample is None else slice(tile.sample, tile.sample + 1)
                pairs[chosen, rows[:, None], columns] += seen
    for sample, starts in enumerate(documents):
        number = np.searchsorted(starts, np.arange(length), "right")
        assert (pairs[sample] == np.tril(number[:, None] == number)).all()


@settings(max_examples=60, deadline=None)
@given(micro_batches())
def test_divided_samples_have_each_token_and_each_pair_once(case: tuple[Documents, int, int]) -> None:
    documents, length, ranks = case
    shards = balanced_shards(documents, length, ranks)
    check(shards, documents, length)
    usual = score(even_chunks(length, ranks), documents, ranks)
    assert score(owners_of(shards, length), documents, ranks).time <= 1.02 * usual.time


@settings(max_examples=60, deadline=None)
@given(micro_batches(samples=1), st.sampled_from([None, 1, 4, 1000]))
def test_whole_documents_stay_on_one_rank_if_they_fit(case: tuple[Documents, int, int], longest: int | None) -> None:
    documents, length, ranks = case
    shards = hybrid_shards(documents, length, ranks, longest)
    check(shards, documents, length)
    owners, limit = owners_of(shards, length), longest or min(WHOLE) * length / ranks
    sizes = zip(documents[0], np.diff([*documents[0], length]).tolist(), strict=True)
    cut = [start for start, size in sizes if size <= limit and len({*owners[start : start + size].tolist()}) > 1]
    assert len(cut) < ranks, "a document is cut only if it fills a rank"


@settings(max_examples=60, deadline=None)
@given(micro_batches(samples=1))
def test_chunks_of_documents_are_equal_to_a_token(case: tuple[Documents, int, int]) -> None:
    documents, length, ranks = case
    lengths = np.diff([*documents[0], length])
    owners = chunks_of_documents(lengths, ranks)
    assert (np.bincount(owners) == length // ranks).all()
    for start, size in zip(documents[0], lengths.tolist(), strict=True):
        counts = np.bincount(owners[start : start + size], minlength=ranks)
        assert counts.max() - counts.min() <= 1 or size < 2 * ranks


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_log_normal_lengths_are_balanced(ranks: int) -> None:
    random = np.random.default_rng(0)
    before, after, whole = [], [], []
    for _ in range(8):
        lengths: list[int] = []
        while sum(lengths) < 32768:
            lengths.append(min(32768 - sum(lengths), 1 + int(random.lognormal(7, 1.5))))
        documents = (tuple(accumulate(lengths[:-1], initial=0)),)
        usual = score(even_chunks(32768, ranks), documents, ranks)
        found = score(owners_of(balanced_shards(documents, 32768, ranks), 32768), documents, ranks)
        before.append(usual.work)
        after.append(found.work)
        whole.append(score(owners_of(hybrid_shards(documents, 32768, ranks, None), 32768), documents, ranks).work)
    assert np.mean(before) > 1.2 and np.mean(after) <= 1.05 and np.mean(whole) <= 1.05


def test_short_documents_send_no_keys() -> None:
    documents = (tuple(range(0, 64, 4)),)
    shards = balanced_shards(documents, 64, 4)
    assert shards.sent == ((), (), (), ()) and score(owners_of(shards, 64), documents, 4).work == 1
    # One long document is on all ranks, and eight short documents are on two ranks each.
    documents = ((0, *range(32, 64, 4)),)
    shards = hybrid_shards(documents, 64, 4, 4)
    assert [sum(map(len, spans)) for spans in shards.sent] == [8, 8, 8, 8]
    assert all(span.stop <= 32 for spans in shards.sent for span in spans)
    assert score(owners_of(shards, 64), documents, 4).work < 1.02


def test_rows_are_computed_from_positions() -> None:
    held = (range(2, 5), range(9, 12))
    assert rows_of(held, (range(3, 5), range(10, 11))) == (range(1, 3), range(4, 5))
    assert even_shards(16, 2).held == ((range(4), range(12, 16)), (range(4, 8), range(8, 12)))


LAYOUTS = [
    (2, "--cp 2"),
    (2, "--cp 2 --micro-batch-size 2"),
    (2, "--cp 2 --cp-comm-type all_gather"),
    (4, "--cp 4 --cp-comm-type all_gather"),
    (4, "--cp 4"),
    (4, "--cp 2 --pp 2"),
    (4, "--cp 2 --tp 2 --sequence-parallel"),
    (2, "--cp 2 --cp-comm-type a2a"),
    (8, "--cp 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2"),
    (2, "--cp 2 --hybrid-context-parallel"),
    (4, "--cp 4 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 6"),
    (4, "--cp 2 --pp 2 --hybrid-context-parallel --cp-comm-type all_gather"),
    (4, "--cp 2 --tp 2 --sequence-parallel --dynamic-context-parallel"),
]


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x", np.random.default_rng(2).integers(1, 24, 90).tolist())
    flags = f"{MODEL} --data-path {prefix}".split()
    alone = train_in_world(1, flags)
    for world, layout in LAYOUTS:
        found = train_in_world(world, [*flags, "--balance-packed-samples", *layout.split()])
        assert max(value for _, value in differences(alone, found)) < TOLERANCE, layout


def test_the_log_has_the_work_of_the_busiest_context_rank(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x", np.random.default_rng(2).integers(1, 24, 90).tolist())
    flags = f"{MODEL} --data-path {prefix} --cp 2 --hybrid-context-parallel --log-interval 1 --save {tmp_path}"
    run_world(2, train_to_the_end, flags.split())
    records = read_records(tmp_path / "metrics.jsonl")
    assert records and all(record["context_imbalance"] >= 1 for record in records)
    assert sum(record["context_imbalance_in_order"] - record["context_imbalance"] for record in records) > 0.1
    assert all(0 <= record["context_keys_sent"] <= 1 for record in records)


def test_a_plan_predicts_the_balance_of_work() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 4000).astype(np.int64) + 1
    for asked, how in ((False, "with --balance-packed-samples"), (True, "with the division by work")):
        line = survey_line(PackingConfig("best-fit", 4000, asked), lengths, 4096, StepShape(32, 1, 1, 4))
        found = re.search(r"busiest context-parallel rank .*: (\S+) with the default division, (\S+) (.*)$", line)
        assert found and found[3] == how and float(found[1]) > 1.15 > 1.05 > float(found[2])
    assert "context-parallel rank" not in survey_line(PackingConfig("best-fit"), lengths, 4096, StepShape(32, 8, 1))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--cp 2 --hybrid-context-parallel", "add --sequence-packing best-fit or --reset-attention-mask"),
        (f"{PACKED} --cp 2 --hybrid-context-parallel --micro-batch-size 2", "--micro-batch-size 2: must be 1 with"),
        (f"{PACKED} --cp 2 --hybrid-context-parallel --cp-comm-type a2a", "--cp-comm-type a2a: cannot be combined"),
        (
            f"{PACKED} --cp 2 --hybrid-context-parallel --experimental-attention-variant short_convolution "
            "--linear-attention-freq 2",
            "--hybrid-context-parallel: cannot be combined with layers that mix tokens",
        ),
        (f"{PACKED} --hybrid-context-parallel", "has no effect without --context-parallel-size above 1"),
        (f"{PACKED} --cp 2 --max-seqlen-per-dp-cp-rank 4", "has no effect without --hybrid-context-parallel"),
    ],
)
def test_configuration_rules(flags: str, said: str) -> None:
    config = parse_args(f"{TINY} --data-path x {flags}".replace("--mock-data ", "").split())
    assert any(said in str(problem) for problem in findings(config, 2))


def test_other_layers_keep_the_usual_chunks() -> None:
    mixed = "--experimental-attention-variant short_convolution --linear-attention-freq 2"
    for more, divides in (("", True), (mixed, False), ("--cp-comm-type a2a", False)):
        config = resolve(parse_args(f"{MODEL} --data-path x --balance-packed-samples --cp 2 {more}".split()), 2)
        assert (config.options(PackingConfig).divider(config) is not None) == divides
