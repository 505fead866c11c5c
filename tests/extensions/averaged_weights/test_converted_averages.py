"""Tests of the conversion of averaged weights to the formats of this program, Hugging Face and Megatron-LM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.storage import Checkpoint
from tests.forked import run_forked
from tests.tiny import TINY
from tools import convert_checkpoint

RUN = (
    f"{TINY} --vocab-size 128 --bf16 --train-iters 3 --ema-decay 0.5 0.9 --untie-embeddings-and-output-weights "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0"
)


def weights(folder: Path) -> dict[str, Tensor]:
    (metadata,) = folder.rglob("metadata.json")
    found = Checkpoint(metadata.parent)
    return {key: found.read(key) for key in found.tensors if key.startswith("model.")}


def convert(*words: str | Path) -> None:
    assert convert_checkpoint.main([str(word) for word in words]) == 0


def test_averages_are_converted_to_each_format(tmp_path: Path) -> None:
    run_forked(2, f"{RUN} --freeze output_layer.weight --save {tmp_path / 'run'}".split(), tmp_path / "screen")
    saved = Checkpoint(tmp_path / "run" / "iter_0000003")
    convert("--input", tmp_path / "run", "--output", tmp_path / "ours", "--weights", "ema.decay_0_9", "--to", "dcp")
    ours = weights(tmp_path / "ours")
    for key, found in ours.items():
        average = f"callbacks.ema.decay_0_9.{key.removeprefix('model.')}"
        expected = saved.read(average if average in saved.tensors else key)
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected.to(found.dtype)), key
        assert (average in saved.tensors) == ("output_layer" not in key)
    for kind in ("hf", "megatron"):
        convert("--input", tmp_path / "run", "--output", tmp_path / kind, "--weights", "ema.decay_0_9", "--to", kind)
        convert("--input", tmp_path / kind, "--output", tmp_path / f"from-{kind}", "--weights-only")
        back = weights(tmp_path / f"from-{kind}")
        for key, expected in ours.items():
            assert torch.equal(back[key], expected), (kind, key)


@pytest.mark.parametrize(
    ("averages", "wanted", "rule"),
    [
        ("--ema-decay 0.5 0.9", "ema", "has ema.decay_0_5, ema.decay_0_9; name one of them"),
        ("", "ema", "has no averaged weights; train with --ema-decay"),
    ],
)
def test_missing_weights_are_refused(averages: str, wanted: str, rule: str, tmp_path: Path) -> None:
    run_forked(1, f"{TINY} --train-iters 1 {averages} --save {tmp_path / 'run'}".split(), tmp_path / "screen")
    with pytest.raises(ValueError, match=rule):
        convert("--input", tmp_path / "run", "--output", tmp_path / "out", "--weights", wanted)
