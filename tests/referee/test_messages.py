"""Tests of tools/referee.py with wrong inputs. Each error names the flag, the value, the rule and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from megatron.extensions import load
from tests.referee.test_referee import SHAPE
from tools import referee

load()
IDS = np.arange(34).reshape(2, 17)
UNTIED = {"tie_word_embeddings": False}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create valid and invalid models, batches and gradients."""
    folder = tmp_path_factory.mktemp("inputs")
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **UNTIED))
    model.save_pretrained(folder / "model")
    wider = LlamaForCausalLM(LlamaConfig(**SHAPE | {"hidden_size": 64}, **UNTIED))
    wider.save_pretrained(folder / "wider")
    MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)).save_pretrained(folder / "experts")
    ids = torch.from_numpy(IDS)
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    files = {
        "gradients": gradients,
        "prefix": {f"module.{name}": each for name, each in gradients.items()},
        "shape": gradients | {"model.norm.weight": torch.zeros(16)},
        "integers": {name: each.to(torch.int32) for name, each in gradients.items()},
        "queries": {name: each for name, each in gradients.items() if "q_proj" in name},
        "scaled": {name: each.to(torch.float8_e4m3fn) for name, each in gradients.items()},
        "nothing": dict[str, torch.Tensor](),
    }
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    dcp.save({"foo": torch.zeros(3)}, checkpoint_id=folder / "dcp", no_dist=True)
    (folder / "empty").mkdir()
    (folder / "text.safetensors").write_text("hello")
    for name, arrays in {"batch": IDS, "long": np.zeros((1, 40), int), "tokens": np.full((1, 9), 77)}.items():
        np.savez(folder / f"{name}.npz", input_ids=arrays)
    return folder


GIVEN = {"--model": "model", "--batch": "batch.npz", "--gradients": "gradients.safetensors"}
NAMES = "the parameters of this llama model are model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        (
            "--model",
            "none",
            "none is missing: there is no such file or folder; give the folder of a Hugging Face model",
        ),
        ("--model", "empty", "empty is an empty folder; give the folder"),
        ("--model", "wider", r"gradients.safetensors: .* has the shape \(64, 32\), not \(64, 64\)"),
        ("--batch", "none.npz", "none.npz does not exist; write it with numpy.savez"),
        ("--batch", "long.npz", r"--batch: a sample has position 38, but --model supports only 32 positions \(max_pos"),
        ("--batch", "tokens.npz", "--batch: tokens has the token 77, but the vocabulary of --model has 64 tokens; tok"),
        ("--gradients", "none", "none does not exist; give gradients under the parameter names of --model"),
        ("--gradients", "empty", "it is a folder in no known format, and holds nothing; give gradients"),
        ("--gradients", "text.safetensors", "text.safetensors is not a safetensors file, or is truncated: it has 5 b"),
        ("--gradients", "nothing.safetensors", "it holds no tensors; give gradients"),
        ("--gradients", "prefix.safetensors", f"it holds module.lm_head.weight, .* and {NAMES}"),
        ("--gradients", "shape.safetensors", r"model.norm.weight has the shape \(16,\), not \(32,\); give gradients"),
        (
            "--gradients",
            "integers.safetensors",
            "it holds torch.int32 tensors, which are not gradients; give gradients",
        ),
        ("--gradients", "queries.safetensors", "it contains no complete gradient of any parameter of"),
        ("--gradients", "scaled.safetensors", "are float8_e4m3fn; say in which format they were computed: --computed"),
        ("--gradients", "experts", f"it holds model.layers.0.block_sparse_moe.* and {NAMES}"),
        ("--gradients", "wider", r"lm_head.weight has the shape \(64, 64\), not \(64, 32\); .*and 19 more"),
        ("--gradients", "dcp", f"it holds foo, and {NAMES}"),
    ],
)
def test_a_wrong_input_is_explained(inputs: Path, flag: str, value: str, message: str) -> None:
    given = {name: str(inputs / each) for name, each in (GIVEN | {flag: value}).items()}
    with pytest.raises(ValueError, match=message) as raised:
        referee.main([word for pair in given.items() for word in pair])
    assert any(name in str(raised.value) for name in GIVEN)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--step empty", "--step empty holds no step of --dump-step: loss.json: .*; give the folder that a run"),
        ("--step none", "--step none does not exist; give the folder that a run with --dump-step names"),
        ("--step none --batch batch.npz", "--step none contains the model, .*; leave out --batch"),
        ("--gradients g", r"--model, --batch \(or --samples or --iteration\) must be given, or --step instead of all"),
        ("--model m --gradients g --batch b --iteration 2", "--batch and --iteration each select samples; use one"),
    ],
)
def test_wrong_flags_are_explained(flags: str, message: str, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inputs)
    with pytest.raises(ValueError, match=message):
        referee.main(flags.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hidden-size 16", "would make another model: 15 parameters differ .*; leave out the flags that change"),
        ("--no-such-flag 16", "--no-such-flag 16: unknown flag"),
        ("--tp 2", "--tensor-model-parallel-size after --: the reference runs one step in one process; leave it out"),
        (
            "--seq-length 8",
            "--seq-length after --: the batch is given, so the flag has no effect; leave it out, or give",
        ),
        ("--data-path x", "--data-path after --: the batch is given, so the flag has no effect"),
    ],
)
def test_flags_without_effect_are_refused(inputs: Path, flags: str, message: str) -> None:
    given = {name: str(inputs / each) for name, each in GIVEN.items()}
    with pytest.raises(ValueError, match=message):
        referee.main([*(word for pair in given.items() for word in pair), "--", *flags.split()])


def test_loss_flags_have_an_effect(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flags for a load-balancing loss must change the gradients of the reference model."""
    given = ["--model", str(inputs / "experts"), "--batch", str(inputs / "batch.npz"), "--computed-in", "fp32"]
    given += ["--gradients", str(inputs / "experts")]
    for number, coefficient in enumerate(("1e-2", "1e-1")):
        flags = ["--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", coefficient]
        assert referee.main([*given, "--json", str(inputs / f"found/{number}.json"), "--", *flags]) == 1
    assert "no gradient resembles the model's; check that the weights and the batch" in capsys.readouterr().out
    first, second = (json.loads((inputs / f"found/{number}.json").read_text())["gradients"] for number in range(2))
    router = "decoder.layers.1.mlp.router.weight"
    assert first[router]["difference"] != second[router]["difference"]
