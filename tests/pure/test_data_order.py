"""Tests of the order of samples. In recorded cases, the order equals the order in Megatron-LM. For arbitrary data, the
order equals the order that a straightforward implementation computes. A run that is extended uses each token of an
epoch as an input exactly once."""

import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets import indices
from megatron.core.datasets.build import build_datasets
from megatron.core.datasets.gpt_dataset import GPTDataset, TextDataset
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample_format import SampleFormat
from megatron.core.datasets.source_order import SourceOrder
from tests.corpus import write_documents

FOLDER = Path(__file__).parents[1] / "fixtures" / "megatron_order"
CASES = json.loads((FOLDER / "manifest.json").read_text())
WEIGHTS = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=6)


def blend_flag(prefixes, weights):
    paths = [str(FOLDER / prefix) for prefix in prefixes]
    if weights is None:
        return tuple(paths)
    return tuple(value for weight, path in zip(weights, paths, strict=True) for value in (str(weight), path))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_samples_match_megatron_lm(case, tmp_path):
    config = DatasetConfig(
        data_path=blend_flag(*case["blend"]), split=case["split"], data_cache_path=str(tmp_path / "cache")
    )
    recorded = np.load(FOLDER / f"{case['name']}.npz")
    for _ in range(2):  # the first loop iteration builds the index, and the second reads it from the cache
        datasets = build_datasets(config, seq_length=case["seq"], seed=case["seed"], sizes=tuple(case["sizes"]))
        for split, dataset in datasets._asdict().items():
            assert (dataset is None) == (split not in recorded.files)
            if dataset is not None:
                assert len(dataset) == recorded[f"{split}_len"]
                samples = np.stack([dataset.text(i) for i in range(len(dataset))])
                np.testing.assert_array_equal(samples, recorded[split])
    assert len(CASES) == 5


def naive_blend(weights, size, limits=None):
    taken, choice = [0] * len(weights), []
    for i in range(size):
        errors = [
            weight * float(max(i, 1)) - count if limits is None or count < limits[j] else -np.inf
            for j, (weight, count) in enumerate(zip(weights, taken, strict=True))
        ]
        best = errors.index(max(errors))
        choice.append((best, taken[best]))
        taken[best] += 1
    return choice


def pairs(index):
    return list(zip(index.dataset.tolist(), index.sample.tolist(), strict=True))


@given(weights=WEIGHTS, size=st.integers(1, 2000), lead=st.sampled_from([1, 4, 32]))
@settings(max_examples=60)
def test_wrongly_guessed_blocks_are_drawn_again(weights, size, lead):
    shares = [weight / sum(weights) for weight in weights]
    with blocks_of(32, lead, cells=64):
        assert pairs(indices.build_blend_index(shares, size)) == naive_blend(shares, size)


@contextmanager
def blocks_of(draws, lead, cells):
    """Context manager that reduces the block sizes, so that the index of a blend is computed in many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BLOCK", draws), ("LEAD", lead), ("CELLS", cells), ("STREAM", 3 * draws)):
            patch.setattr(indices, name, value)
        yield


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any))
def test_an_exhaustive_blend_follows_the_rule_and_uses_every_sample(sizes):
    with blocks_of(8, lead=4, cells=16):
        index = indices.build_exhaustive_blend_index(sizes)
    weights = [size / sum(sizes) for size in sizes]
    assert pairs(index) == naive_blend(weights, sum(sizes), limits=sizes)
    assert np.bincount(index.dataset, minlength=len(sizes)).tolist() == sizes


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    samples=st.none() | st.integers(1, 60),
    seq_length=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_samples_are_windows_of_the_document_stream(lengths, samples, seq_length, seed):
    lengths = np.array(lengths, np.int32)
    total = int(lengths.sum())
    plan = indices.plan_epochs(total, samples, seq_length)
    with pytest.MonkeyPatch.context() as patch:
        # The index is computed in parts of 5 tokens, which end in the middle of documents.
        patch.setattr(indices, "STREAM", 5)
        forms = []
        for many in (0, 10**9):  # first with an index of document ends, and then with an index of sample starts
            patch.setattr(indices, "MANY_SAMPLES", many)
            parts = indices.gpt_index_parts(lengths, range(len(lengths)), plan, seq_length, seed)
            forms.append(indices.GPTIndex(*parts))
    found, index = forms
    assert plan.samples == 0 or (found.sample_index.ndim, index.sample_index.ndim) == (1, 2)
    assert all((one == other).all() for one, other in zip(found[::2], index[::2], strict=True))
    if samples is None:
        assert plan.epochs == 1
    else:
        needed = samples * seq_length + 1
        assert plan.epochs * total >= needed and (plan.epochs == 1 or (plan.epochs - 1) * total < needed)
        assert plan.samples >= samples
    assert (np.bincount(index.document_index, minlength=len(lengths)) == plan.epochs).all()
    assert sorted(index.shuffle_index.tolist()) == list(range(plan.samples))
    # A token is represented as (document, position in the document). The loop compares the stream of all tokens with
    # the samples of the index.
    stream = [(document, place) for document in index.document_index for place in range(lengths[document])]
    for sample in range(plan.samples + 1):
        position, offset = index.start(sample, seq_length)
        assert (index.document_index[position], offset) == stream[sample * seq_length]
        assert found.start(sample, seq_length) == (position, offset)


def test_positions_may_exceed_2_31_tokens():
    """Five documents with 2**30 tokens each have more tokens in total than an int32 can represent."""
    lengths = np.full(5, 2**30, np.int32)
    seq_length = 2**28
    plan = indices.plan_epochs(5 * 2**30, None, seq_length)
    index = indices.build_sample_index(lengths, np.arange(len(lengths)), plan.samples, seq_length)
    assert plan.samples == 19
    assert index[:, 0].tolist() == [i // 4 for i in range(20)]
    assert index[:, 1].tolist() == [i % 4 * 2**28 for i in range(20)]


def test_without_weights_every_sample_appears_once(tmp_path):
    def build(names, size=None):
        paths = tuple(str(FOLDER / name) for name in names)
        config = DatasetConfig(data_path=paths, split="1,0,0", data_cache_path=str(tmp_path))
        return build_datasets(config, seq_length=16, seed=3, sizes=(size, 0, 0)).train

    both = ["alpha", "beta"]
    whole, parts = build(both), [build([name]) for name in both]
    assert len(whole) == sum(map(len, parts))
    drawn = sorted(whole.text(i).tobytes() for i in range(len(whole)))
    assert drawn == sorted(part.text(i).tobytes() for part in parts for i in range(len(part)))
    assert len(build(both, 10)) == 10
    assert len(build(both, 10**6)) == len(whole)


def test_separate_data_paths_use_all_documents_and_ignore_one_weight(tmp_path):
    alpha = str(FOLDER / "alpha")
    config = DatasetConfig(
        train_data_path=("0.3", alpha), valid_data_path=(str(FOLDER / "beta"),), data_cache_path=str(tmp_path)
    )
    train, valid, test = build_datasets(config, seq_length=64, seed=1, sizes=(None, None, None))
    assert test is None
    assert len(train) == (IndexedDataset(alpha).num_tokens - 1) // 64
    assert len(valid) == (IndexedDataset(str(FOLDER / "beta")).num_tokens - 1) // 64


def test_one_prefix_with_a_weight_is_a_blend_of_one(tmp_path):
    config = DatasetConfig(data_path=("2", str(FOLDER / "alpha")), split="1,0,0", data_cache_path=str(tmp_path))
    assert len(build_datasets(config, seq_length=64, seed=1, sizes=(7, 0, 0)).train) == 7


def test_a_longer_run_keeps_the_fingerprint_if_the_order_is_the_same(tmp_path):
    def fingerprint(samples, **kwargs):
        config = DatasetConfig(data_path=(str(FOLDER / "alpha"),), split="1,0,0", data_cache_path=str(tmp_path))
        return build_datasets(
            config, **({"seq_length": 64, "seed": 1} | kwargs), sizes=(samples, 0, 0)
        ).train.fingerprint

    assert fingerprint(10) == fingerprint(20)
    assert len({fingerprint(10), fingerprint(60), fingerprint(10, seed=2), fingerprint(10, seq_length=32)}) == 4


def test_other_tokens_of_the_same_lengths_have_another_fingerprint(tmp_path):
    def fingerprint(name, token):
        prefix = write_documents(tmp_path / name, [[token] * 50])
        config = DatasetConfig(data_path=(prefix,), split="1,0,0")
        return build_datasets(config, seq_length=8, seed=1, sizes=(2, 0, 0)).train.fingerprint

    assert fingerprint("a", 1) == fingerprint("b", 1) != fingerprint("c", 2)


def test_a_quoted_split_is_parsed() -> None:
    assert indices.parse_split("'949,50,1'") == indices.parse_split("949,50,1") == indices.parse_split("949/50/1")


def source_of_lengths(folder: Path, lengths: list[int]) -> IndexedDataset:
    """Return a dataset of documents with these lengths in which every token has a different id."""
    ends = np.cumsum(lengths)
    documents = map(np.arange, ends - lengths, ends)
    return IndexedDataset(write_documents(folder / "x", documents, "<i4"))


def order_of(indexed: IndexedDataset, folder: Path) -> SourceOrder:
    return SourceOrder(indexed, range(len(indexed)), seed=3, split="train", cache=IndexCache(str(folder / "c"), ""))


def inputs(view: TextDataset, samples: int) -> list[int]:
    return [token for number in range(samples) for token in view.text(number)[:-1].tolist()]


def test_a_longer_plan_keeps_the_order_and_appends_to_it(tmp_path: Path) -> None:
    indexed = source_of_lengths(tmp_path, [7, 30, 11, 2, 50])
    begun = order_of(indexed, tmp_path).view(SampleFormat(4), [30])
    megatron = GPTDataset(indexed, range(5), 30, SampleFormat(4), seed=3, cache=IndexCache(str(tmp_path / "c"), ""))
    assert isinstance(begun, GPTDataset) and begun.fingerprint == megatron.fingerprint
    alone = order_of(indexed, tmp_path).view(SampleFormat(4), [90])
    assert inputs(alone, 30) != inputs(begun, 30), "Megatron-LM's order depends on the number of samples"
    longer = order_of(indexed, tmp_path).view(SampleFormat(4), [30, 40, 90])
    assert inputs(longer, len(begun)) == inputs(begun, len(begun)) and len(longer) >= 90
    again = order_of(indexed, tmp_path).view(SampleFormat(4), [30, 90, 70])
    assert inputs(again, len(begun)) == inputs(begun, len(begun))
    # All tokens except those at the end of each segment occur equally often. The data has 100 tokens. A segment of one
    # epoch has 24 samples of 4 tokens, and a segment of two epochs has 49.
    counts = Counter(inputs(longer, len(longer)))
    assert set(counts.values()) <= {len(inputs(longer, len(longer))) // 100 + n for n in (-1, 0, 1)}
