"""Tests of training on packed documents: the samples, the flags that depend on packing, and runs under several
layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.build import build_datasets, source_lines
from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.gpt_dataset import Pieces
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample_format import SampleFormat
from megatron.extensions.data.packing.flags import PackingConfig
from megatron.extensions.data.packing.packed_dataset import PackedDataset
from megatron.testing.layout_matrix import TOLERANCE
from megatron.testing.snapshot import differences
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from tests.corpus import write_documents
from tests.faults.test_kills import check_kills
from tests.harness import train_in_world
from tests.tiny import TINY

EOD = 49
PACKED = "--sequence-packing best-fit --tokenizer-type NullTokenizer --vocab-size 50"


def corpus(prefix: Path, lengths: Sequence[int], seed: int = 1) -> str:
    """Write documents of random tokens. Each document ends with the EOD token."""
    random = np.random.default_rng(seed)
    texts = (np.append(random.integers(0, EOD, length - 1), EOD) if length else [] for length in lengths)
    return write_documents(prefix, texts)


def packed(prefix: str, documents: range | Pieces, samples: int | None, format: SampleFormat) -> PackedDataset:
    cache = IndexCache(str(Path(prefix).parent / "cache"), "")
    rules = {"window": 8, "seed": 3, "split": "train", "cache": cache}
    return PackedDataset(IndexedDataset(prefix), documents, samples, format, **rules)  # type: ignore[arg-type]


def test_samples_contain_separate_whole_documents(tmp_path: Path) -> None:
    lengths = [5, 4, 9, 3, 20, 1, 2, 7, 6]
    prefix = corpus(tmp_path / "x", lengths)
    indexed = IndexedDataset(prefix)
    data = packed(prefix, range(9), None, SampleFormat(8, EOD, 50, reset_position_ids=True))
    predicted = []
    for number in range(len(data)):
        sample = {name: value for name, value in data[number].items() if value is not None}
        assert (sample["tokens"][1:] == sample["labels"][:-1]).all()
        place = 0
        for document, start, count in data.documents_of(number):
            text = indexed.get(document, start, start + count)
            rows = slice(place, place + count - 1)
            assert (sample["tokens"][rows] == text[:-1]).all() and (sample["labels"][rows] == text[1:]).all()
            assert sample["loss_mask"][rows].all() and (sample["position_ids"][rows] == np.arange(count - 1)).all()
            assert not sample["loss_mask"][rows.stop : rows.stop + 1].any()
            assert len(set(sample["document_ids"][place : place + count].tolist())) == 1
            predicted += [(document, start + n) for n in range(1, count)]
            place += count
        assert not sample["loss_mask"][max(0, place - 1) :].any()
        assert place == 9 or (sample["labels"][max(0, place - 1) :] == EOD).all()
        assert int(sample["loss_mask"].sum()) == sum(count - 1 for _, _, count in data.documents_of(number))
        assert len(np.unique(sample["document_ids"])) == len(data.documents_of(number)) + (place < 8)
    assert sorted(predicted) == [(d, n) for d, length in enumerate(lengths) for n in range(1, length)]


def test_end_of_document_inside_a_document_is_masked_on_request_only(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "x", [[1, EOD, 2, 3, EOD]])
    masks = [packed(prefix, range(1), None, SampleFormat(8, EOD, 50, mask))[0]["loss_mask"] for mask in (False, True)]
    assert [mask.tolist() for mask in masks if mask is not None] == [[1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0, 0, 0]]


def test_a_longer_run_and_a_resumed_run_keep_the_order(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x", (np.arange(60) * 7 % 13 + 2).tolist())
    format = SampleFormat(16, EOD, 50)
    short, long = (packed(prefix, range(10, 60), samples, format) for samples in (5, 500))
    assert len(short) < 500 <= len(long) and short.fingerprint == long.fingerprint
    assert all((short.text(n) == long.text(n)).all() for n in range(len(short)))
    rest = Pieces(*short.rest(4), "rest")
    parts = sorted(part for n in range(4, len(short)) for part in short.documents_of(n))
    again = packed(prefix, rest, None, format)
    assert sorted(part for n in range(len(again)) for part in again.documents_of(n)) == parts
    whole = PackedDataset.rest(again, 0)
    assert sorted(zip(*(each.tolist() for each in whole), strict=True)) == parts


def test_nothing_to_predict_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no document of the train split has two tokens"):
        packed(corpus(tmp_path / "x", [1, 1, 1]), range(3), 5, SampleFormat(8, EOD, 50))


def train_split(config: DatasetConfig, size: int | None) -> Dataset:
    data = build_datasets(config, seq_length=16, seed=1, sizes=(size, 0, 0), eod=EOD, vocab_size=50).train
    assert data is not None
    return data


@pytest.mark.parametrize("weights", [True, False])
def test_blends_pack_documents_of_each_source(tmp_path: Path, weights: bool) -> None:
    first, second = (corpus(tmp_path / name, [5, 9, 3, 12] * 9, seed) for seed, name in enumerate(("a", "b")))
    words = ("1", first, "3", second) if weights else (first, second)
    config = DatasetConfig(data_path=words, split="1,0,0").with_options(PackingConfig("best-fit"))
    data = train_split(config, 40 if weights else None)
    for number in range(len(data)):
        mask: NDArray | None = data[number]["loss_mask"]
        assert mask is not None and mask.sum() == sum(count - 1 for *_, count in data.documents_of(number))  # type: ignore[attr-defined]
    (line, _) = source_lines(config, 40, 16)
    assert "best-fit packing: " in line and " % padding, 0 of " in line


def test_flags_of_packing_are_validated(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x", [8] * 40)
    given = f"{TINY} --data-path {prefix} {PACKED}".replace("--mock-data ", "")
    config = resolve(parse_args(given.split()), 1)
    assert not validate(config, 1) and config.data.reset_attention_mask and config.data.reset_position_ids
    assert not resolve(parse_args(f"{given} --position-embedding-type rope".split()), 1).data.reset_position_ids
    wrong = {
        given.replace("--tokenizer-type NullTokenizer ", ""): "needs the tokenizer's end-of-document token",
        f"{TINY} {PACKED}": "packs documents of files, but --dataset-type mock makes its own samples",
        f"{given} --fim-data": "cannot be combined with --fim-data",
        f"{TINY} --packing-window 9": "has no effect without --sequence-packing best-fit",
    }
    for flags, rule in wrong.items():
        assert rule in "\n".join(map(str, validate(parse_args(flags.split()), 1)))


MODEL = (
    f"{TINY} {PACKED} --fp64 --attention-dropout 0.1 --hidden-dropout 0.1 --seq-length 16 --global-batch-size 8 "
    "--split 1,0,0 --num-attention-heads 4"
).replace("--mock-data ", "")


def test_layouts_compute_the_same_as_one_process(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x", np.random.default_rng(2).integers(1, 24, 90).tolist())
    flags = f"{MODEL} --data-path {prefix}".split()
    alone = train_in_world(1, flags)
    for world, layout in ((2, "--cp 2"), (4, "--tp 2 --sequence-parallel"), (4, "--pp 2 --micro-batch-size 2")):
        found = train_in_world(world, [*flags, *layout.split()])
        assert max(value for _, value in differences(alone, found)) < TOLERANCE, layout


def test_documents_of_a_sample_do_not_influence_each_other(tmp_path: Path) -> None:
    """The gradient of packed documents equals the gradient of the same documents in separate samples."""
    texts = [np.append(np.random.default_rng(n).integers(0, EOD, size), EOD) for n, size in enumerate((7, 4, 2))]
    together = write_documents(tmp_path / "x", texts)
    apart = [write_documents(tmp_path / f"y{n}", [text]) for n, text in enumerate(texts)]
    flags = f"{MODEL} --hidden-dropout 0 --attention-dropout 0 --seq-length 15".replace("--train-iters 4", "").split()
    of_one = train_in_world(1, [*flags, "--global-batch-size", "1", "--data-path", together], steps=1)
    of_three = train_in_world(1, [*flags, "--global-batch-size", "3", "--data-path", *apart], steps=1)
    assert max(value for _, value in differences(of_one, of_three)) < TOLERANCE


def test_runs_killed_across_phases_take_each_sample_once(tmp_path: Path) -> None:
    """Each run is killed and resumed under a different layout. From sample 17 on, the sequence length is larger, so the
    remaining documents are packed again."""
    lengths = np.random.default_rng(3).integers(1, 40, 200)
    prefix = corpus(tmp_path / "x", lengths.tolist())
    phases = tmp_path / "phases.yaml"
    phases.write_text("- {name: short}\n- {name: long, from-samples: 17, seq-length: 32}\n")
    data = f"--data-path {prefix} --split 1,0,0 {PACKED} --data-phases {phases}".split()
    check_kills(tmp_path, (10, 4, 2), [*data, "--balance-packed-samples"])
    log = [json.loads(line) for line in (tmp_path / "alone" / "samples.jsonl").read_text().splitlines()]
    parts = [tuple(part) for record in log for sample in record["documents"] for part in sample]
    assert len(set(parts)) == len(parts) > 0
