"""A run that changes its sequence length uses each token of an epoch as an input exactly once."""

from __future__ import annotations

import shlex
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.blended import BlendedDataset
from megatron.core.datasets.build import Demands, TrainingOrder, build_datasets
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.sample_format import SampleFormat
from megatron.core.parallel_state import ParallelState
from megatron.extensions.data.phases.file_phase import cut_anew, rest_of
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from megatron.training.data import build_data
from megatron.training.initialize import Runtime
from megatron.training.plan import plan_of
from megatron.training.reliability.launch import Launch
from tests.corpus import write_documents
from tests.pure.test_data_order import inputs, order_of, source_of_lengths
from tests.tiny import TINY


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 40), st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_the_rest_of_a_stream_is_its_unused_part(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, samples: int, taken: int
) -> None:
    if sum(lengths) < 1:
        return
    folder = tmp_path_factory.mktemp("rest")
    indexed, cache = source_of_lengths(folder, lengths), IndexCache(str(folder / "c"), "")
    whole = GPTDataset(indexed, range(len(indexed)), samples, SampleFormat(seq_length), seed=1, cache=cache)
    rest = rest_of(whole, min(taken, len(whole)), cache)
    tokens = Counter(
        token
        for number, start, length in zip(rest.documents, rest.starts, rest.lengths, strict=True)
        for token in indexed.get(number, start, start + length).tolist()
    )
    assert all(length > 0 for length in rest.lengths)
    tokens.update(inputs(whole, min(taken, len(whole))))
    assert tokens == Counter(dict.fromkeys(range(sum(lengths)), whole.plan.epochs))


def test_a_source_continues_or_restarts_in_a_later_phase(tmp_path: Path) -> None:
    indexed, format = source_of_lengths(tmp_path, [7, 30, 11, 2, 50]), SampleFormat(4)
    whole = order_of(indexed, tmp_path).view(format, [24])
    order = order_of(indexed, tmp_path)
    found = inputs(order.view(format, [24]), 10)
    order.take(10)
    assert found + inputs(order.view(format, [14]), 14) == inputs(whole, 24)
    order.take(3)
    cut_anew(order, SampleFormat(8))
    longer = order.view(SampleFormat(8), [4])
    seen = Counter(found + inputs(whole, 13)[40:] + inputs(longer, len(longer)))
    assert seen.most_common(1)[0][1] == 1, "no token occurs twice"
    assert sum(seen.values()) >= 100 - 8, "every token occurs except at the end of the stream"
    order.restart()
    anew = order.view(SampleFormat(8), [12])
    assert len(set(inputs(anew, 12))) == 96


def test_phases_of_a_blend_continue_each_source(tmp_path: Path) -> None:
    for name, start in (("a", 0), ("b", 1000)):
        write_documents(tmp_path / name, (start + 20 * document + np.arange(20) for document in range(20)), "<i4")
    order, seen = TrainingOrder(take_up=lambda source, prefix, format: cut_anew(source, format)), []
    for blend, length, samples in (("3 a 1 b", 4, 40), ("1 a 1 b", 4, 20), ("b", 10, 12), ("0.5 b 0.5 a", 10, 10)):
        paths = tuple(str(tmp_path / word) if word in "ab" else word for word in blend.split())
        config = DatasetConfig(data_path=paths, split="1,0,0")
        order.present = []
        sizes, demands = (samples, 0, 0), Demands(order)
        train = build_datasets(config, seq_length=length, seed=1, sizes=sizes, demands=demands).train
        assert isinstance(train, BlendedDataset) == (blend != "b") and train is not None
        seen += [token for number in range(samples) for token in train.text(number)[:-1].tolist()]
        order.take(train, samples)
    assert max(Counter(seen).values()) == 1, "460 of 800 tokens are used"


def test_a_run_continues_in_a_source_at_each_phase(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "text", [np.arange(200) % 40])
    phases = tmp_path / "phases.yaml"
    phases.write_text(f"- {{data-path: {prefix}}}\n- {{from-samples: 8, data-path: {prefix}, lr: 1e-3}}\n")
    argv = shlex.split(f"{TINY} --data-phases {phases} --split 1,0,0")
    argv.remove("--mock-data")
    config = resolve_legal(parse_args(argv), 1)
    data, _ = build_data(plan_of(config), Runtime(Launch(), torch.device("cpu"), ParallelState()))
    with closing(data):
        assert len({data.train.dataset.origin(number) for number in range(16)}) == 16
