"""Tests of the comparisons in research/. The other programs train the same model, and every row of this program has a
counterpart."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron.core.pipeline_parallel.stage_parameters import count_parameters
from megatron.extensions.interop.hugging_face.read_config import config_from_hf
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from research import mixers
from research.peers import PEERS, build_peer
from research.speed import TORCHS, cells
from research.torch_parallel import KINDS
from tests.apart import ROOT
from tools.bench.speed import flags
from tools.bench.styles import STYLES


def test_every_package_is_pinned() -> None:
    lines = (ROOT / "research/requirements.txt").read_text().splitlines()
    pinned = [line.partition("==")[0] for line in lines if "==" in line]
    assert set(PEERS) <= set(pinned)
    assert not [line for line in lines if line.startswith("-")], "the pins of this program differ from those of litgpt"


def test_our_model_has_the_same_number_of_parameters() -> None:
    style = STYLES["llama"]
    config = resolve(parse_args([*flags(style, "float32", False), "--make-vocab-size-divisible-by", "128"]), 1)
    assert count_parameters(config.model).total == style.parameters


def test_each_kind_of_parallelism_is_compared_with_that_of_torch() -> None:
    rows = {kind: [contestant.name for contestant in cells()[kind].contestants] for kind in ("TP", "PP", "DP")}
    assert set(TORCHS.values()) == KINDS.keys()
    for ours, theirs in TORCHS.items():
        assert any(ours in names and theirs in names for names in rows.values())


def test_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transformers model has as many parameters as the style and returns a loss. A model with a wider MLP has more
    parameters and is refused."""
    pytest.importorskip("transformers")
    import torch

    style = replace(STYLES["llama"], layers=1, hidden=32, heads=4, groups=2, ffn=96, seq=8, vocab=64)
    model, loss_of = build_peer("transformers", style, "float32")
    tokens = torch.randint(64, (2, 8))
    loss = loss_of(model, tokens, tokens)
    loss.backward()
    assert loss.dim() == 0 and all(parameter.grad is not None for parameter in model.parameters())
    wider = PEERS["transformers"](replace(style, ffn=128), torch.float32)
    monkeypatch.setitem(PEERS, "transformers", lambda style, dtype: wider)
    with pytest.raises(ValueError, match=r"transformers's model has \d+ parameters, not \d+"):
        build_peer("transformers", style, "float32")


@pytest.mark.parametrize("family", mixers.MODELS)
def test_mixers_are_compared_in_models_of_one_size(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    stated = mixers.stated(family)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(stated)
    expected = sum(parameter.numel() for parameter in theirs.parameters())
    assert count_parameters(config_from_hf(stated.to_dict())).total == expected


def test_mixers_are_timed_in_turns(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert mixers.main("--only lfm2 --seq-length 32 --rounds 1 --threads 1".split()) == 0
    assert re.search(r"ours .* tokens/s +[\d.]+ x transformers +[\d.]+ x products", capfd.readouterr().out)
