"""Samples are assigned to replicas and micro-batches so that the work is balanced. The tests cover the assignment
itself, the data iterator, and training."""

from __future__ import annotations

import math
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.build import source_lines
from megatron.core.datasets.dataset import StepShape
from megatron.core.datasets.sample_format import SampleFormat
from megatron.core.datasets.samplers import DataIterator, in_order
from megatron.extensions.data.packing.dealing import WorkDealer, deal, imbalance, pairs_of
from megatron.extensions.data.packing.flags import PackingConfig
from megatron.extensions.data.packing.survey import survey_line
from megatron.extensions.observe.diagnosis.step_dump import SavedStep
from megatron.extensions.observe.diagnosis.step_replay import replay
from megatron.testing.layout_matrix import TOLERANCE
from megatron.testing.snapshot import differences
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.run import TrainingRun
from megatron.training.step_guard import BadStepError
from megatron.training.train_step import train_step
from tests.apart import read_records
from tests.extensions.packing.test_packed_data import EOD, MODEL, corpus, packed, train_split
from tests.harness import local_run, run_world, train_in_world, train_to_the_end

SHAPES = st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))


@given(SHAPES, st.randoms(use_true_random=False))
def test_each_sample_is_assigned_once_and_no_exchange_helps_the_busiest(shape: tuple[int, int, int], random) -> None:  # type: ignore[no-untyped-def]
    replicas, micro_batches, size = shape
    works = np.array([random.randrange(1, 1000) for _ in range(replicas * micro_batches * size)], np.int64)
    dealt = deal(works, replicas, size)
    assert dealt.shape == (micro_batches, replicas, size) and sorted(dealt.ravel().tolist()) == list(range(len(works)))
    sums = works[dealt].sum(2)
    assert (np.diff(sums, axis=0) <= 0).all()  # The micro-batches are in order of decreasing work.
    # The assignment cannot be improved. After any exchange of two samples between the busiest replica and another
    # replica, one of the two replicas has at least as much work as the busiest replica has now.
    totals = works[dealt].sum((0, 2))
    busiest = int(totals.argmax())
    for other in range(replicas):
        mine, theirs = works[dealt[:, busiest]].ravel(), works[dealt[:, other]].ravel()
        less = mine[:, None] - theirs
        larger = np.maximum(totals[busiest] - less, totals[other] + less)
        assert other == busiest or larger.min() >= totals[busiest]


def test_log_normal_lengths_are_balanced() -> None:
    """The test measures the ratio of the largest to the mean work of eight replicas with 16 samples each, averaged over
    20 steps."""
    random = np.random.default_rng(0)
    before, after = [], []
    for _ in range(20):
        works = []
        for _ in range(128):
            counts, left = [], 4097
            while left:
                counts.append(min(left, 1 + int(random.lognormal(6, 1.2))))
                left -= counts[-1]
            works.append(pairs_of(counts, 4096))
        array = np.array(works, np.int64)
        before.append(imbalance(array, np.arange(128).reshape(-1, 8, 1)))
        after.append(imbalance(array, deal(array, 8, 1)))
    assert np.mean(before) > 1.15 and np.max(after) < 1.01


@pytest.mark.parametrize(("counts", "pairs"), [([9], 36), ([4, 5], 20), ([4, 4], 20), ([3], 6 + 15), ([9, 0], 36)])
def test_pairs_of_a_sample(counts: list[int], pairs: int) -> None:
    """A sample of sequence length 8 has nine tokens, of which the last is only a label. Padding after the documents
    counts as one more document."""
    assert pairs_of(counts, 8) == pairs


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_takes_the_samples_of_each_step_at_any_start(tmp_path: Path, workers: int) -> None:
    prefix = corpus(tmp_path / "x", np.random.default_rng(2).integers(2, 24, 200).tolist())
    data = packed(prefix, range(200), 64, SampleFormat(16, EOD, 50))
    dealer = WorkDealer(16)

    def taken(starts: list[tuple[int, int]], ranks: int) -> list[list[int]]:
        iterators = [
            DataIterator(data, micro_batch_size=2, dp_rank=rank, dp_size=ranks, num_workers=workers)
            for rank in range(ranks)
        ]
        steps = []
        for each in iterators:
            each.deal = dealer
        for first, size in starts:
            parts = [each.next_step(first, size) for each in iterators]
            expected = dealer(data, range(first, first + size), ranks, 2)
            for rank, batches in enumerate(parts):
                numbers = [index.tolist() for batch in batches if (index := batch["sample_index"]) is not None]
                assert numbers == expected[:, rank].tolist()
            steps.append(sorted(expected.ravel().tolist()))
        for each in iterators:
            with closing(each):
                pass
        return steps

    for ranks in (1, 2, 4):  # the steps have different batch sizes, and one step is repeated
        starts = [(0, 8), (8, 8), (16, 16), (32, 8), (8, 8)]
        assert taken(starts, ranks) == [list(range(first, first + size)) for first, size in starts]


def test_without_balancing_samples_are_in_megatrons_order() -> None:
    assert in_order(None, range(8, 16), 2, 2).tolist() == [[[8, 9], [10, 11]], [[12, 13], [14, 15]]]  # type: ignore[arg-type]


def test_gradients_match_one_process_and_the_original_order(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x", np.random.default_rng(2).integers(1, 24, 90).tolist())
    flags = f"{MODEL} --data-path {prefix}".split()
    alone = train_in_world(1, flags)
    for world, layout in ((2, "--micro-batch-size 2"), (4, "--pp 2"), (4, "--cp 2")):
        found = train_in_world(world, [*flags, "--balance-packed-samples", *layout.split()])
        assert max(value for _, value in differences(alone, found)) < TOLERANCE, layout


def test_the_flag_spelling_of_megatron_is_accepted() -> None:
    config = parse_args(f"{MODEL} --data-path x --sequence-packing-scheduler dp_balanced".split())
    options = {field: value for each in config.extension_options for field, value in vars(each).items()}
    assert options["balance_packed_samples"] and options["sequence_packing"] == "best-fit"


def test_the_log_has_the_work_of_the_busiest_replica(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x", np.random.default_rng(2).integers(1, 24, 90).tolist())
    flags = f"{MODEL} --data-path {prefix} --balance-packed-samples --seed 1 --train-iters 4 --log-interval 2"
    run_world(2, train_to_the_end, [*flags.split(), "--save", str(tmp_path)])
    data = train_split(DatasetConfig(data_path=(prefix,), split="1,0,0").with_options(PackingConfig("best-fit")), 32)
    worth = []
    for sample in range(32):
        _, counts = np.unique(np.asarray(data[sample]["document_ids"]), return_counts=True)
        worth.append(int((counts * (counts + 1) // 2).sum()))
    of_micro_batch = np.array(worth).reshape(4, 4, 2)
    before = of_micro_batch.sum(1).max(1) / of_micro_batch.sum((1, 2)) * 2
    records = read_records(tmp_path / "metrics.jsonl")
    found = [record["work_imbalance_in_order"] for record in records]
    assert found == pytest.approx(before.reshape(2, 2).mean(1).tolist(), rel=1e-12)
    assert all(1 <= record["work_imbalance"] < record["work_imbalance_in_order"] for record in records)


def test_a_plan_predicts_the_balance_of_work() -> None:
    lengths = np.random.default_rng(0).lognormal(3, 1, 4000).astype(np.int64) + 1
    step = StepShape(32, 8, 1)
    lines = [survey_line(PackingConfig("best-fit", 4000, asked), lengths, 128, step) for asked in (False, True)]
    ends = [
        re.search(r" cut because .*; attention work .*: (\S+) with samples in order, (\S+) (.*)$", line)
        for line in lines
    ]
    assert ends[0] and ends[1] and ends[0][1] == ends[1][1] and ends[0][2] == ends[1][2]
    assert float(ends[0][1]) > 1.1 > 1.05 > float(ends[0][2]) >= 1
    assert (ends[0][3], ends[1][3]) == ("with --balance-packed-samples", "as assigned")
    for other in (None, StepShape(32, 1, 1), StepShape(100_000, 8, 1)):
        assert "attention work" not in survey_line(PackingConfig("best-fit"), lengths, 128, other)


def test_a_plan_of_text_says_that_padding_is_unknown() -> None:
    config = DatasetConfig(data_path=("a.jsonl",), split="1,0,0")
    told = ["text a.jsonl; best-fit packing: the share of padding is unknown until the documents are tokenized"]
    packs = config.with_options(PackingConfig("best-fit"))
    assert list(source_lines(packs, 8, 16, None, lambda path: f"text {path}")) == told
    assert list(source_lines(config, 8, 16, None, lambda path: f"text {path}")) == ["text a.jsonl"]


def break_a_sample(run: TrainingRun) -> None:
    """Set an MLP's output for sample 5 to NaN."""
    mlp = run.stages[0].decoder.layers[1].mlp
    inner = mlp.forward

    def forward(x: torch.Tensor, context: Any) -> torch.Tensor:
        output: torch.Tensor = inner(x, context)
        return output.masked_fill((context.sample_index == 5)[None, :, None], math.nan)

    mlp.forward = forward


def end_with_nan(rank: int, world_size: int, config: RunConfig) -> list[list[int]]:
    """Run one step whose loss is not finite, so that the run saves the step and raises an error. Return the samples in
    each of this rank's micro-batches of the step."""
    with local_run(config, rank, world_size) as run:
        break_a_sample(run)
        step = run.progress.next_step(run.batch_sizes)
        batches = run.data.read_batches(step)
        train_step(run)
        with pytest.raises(BadStepError):
            run.guard.settle()
        return [batch.sample_index.tolist() for batch in batches]


@pytest.mark.parametrize("balance", ["--balance-packed-samples", ""])
def test_a_saved_step_is_replayed_in_the_micro_batches_of_the_run(tmp_path: Path, balance: str) -> None:
    prefix = corpus(tmp_path / "x", np.random.default_rng(2).integers(1, 24, 90).tolist())
    flags = f"{MODEL} --data-path {prefix} --micro-batch-size 2 --eval-iters 0 {balance}".split()
    config = resolve_legal(parse_args([*flags, "--save", str(tmp_path)]), 2)
    first, second = run_world(2, end_with_nan, config)
    in_turn = [batch for pair in zip(first, second, strict=True) for batch in pair]
    assert (np.ravel(in_turn).tolist() == list(range(8))) is not bool(balance)
    folder = tmp_path / "nan" / "iter_0000001"
    seen: list[list[int]] = []

    def prepare(run: TrainingRun) -> None:
        seen.extend(batch["sample_index"].tolist() for batch in run.data.train.next_step(0, 8))  # type: ignore[union-attr]
        break_a_sample(run)

    found = replay(folder, prepare=prepare)
    assert seen == in_turn and found is not None and found.same_as(SavedStep.read(folder).finding)
