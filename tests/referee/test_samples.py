"""Tests of tools/referee.py on samples with several documents, and on samples of a run's training data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from megatron.extensions import load
from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.train_step import train_step
from tests.corpus import write_documents
from tests.referee.test_referee import SHAPE, saved
from tools import referee

load()
LEARNED = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32, "bos_token_id": 0}
DROPOUTS = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "eos_token_id": 0}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)), id="rotary positions"),
        pytest.param(lambda: GPT2LMHeadModel(GPT2Config(**LEARNED, **DROPOUTS)), id="a table of positions"),
    ],
)
def test_packed_documents_of_transformers_are_judged(model: type[PreTrainedModel], tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = saved(model(), tmp_path)  # type: ignore[call-arg]
    # as Trainer does, because attention with a cache would cross documents
    other.model.config.use_cache = False
    positions = [[*range(9), *range(8)], [*range(4), *range(13)]]
    other.inputs = {"position_ids": torch.tensor(positions)}
    assert other.judged()["equal"]
    batch = dict(np.load(tmp_path / "batch.npz"))
    del batch["position_ids"]
    np.savez(tmp_path / "batch.npz", **batch)
    flags = ["--model", "model", "--batch", "batch.npz", "--gradients", "gradients.safetensors"]
    assert referee.main([each if each.startswith("--") else str(tmp_path / each) for each in flags]) == 1


RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --lr 1e-3 --cpu "
    "--global-batch-size 4 --micro-batch-size 1 --train-iters 3 --num-workers 0 --eval-iters 0 --split 1 "
    "--attention-dropout 0 --hidden-dropout 0 --dump-step 2 --tokenizer-type NullTokenizer"
).split()


def train(rank: int, world_size: int, config: RunConfig) -> None:
    with local_run(config, rank, world_size) as run:
        for _ in range(2):
            train_step(run)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Create a corpus of documents with 3 to 9 tokens each. The last token of each document is the end-of-document
    token."""
    random = np.random.default_rng(1)
    documents = ([*random.integers(0, 63, size=random.integers(2, 9)), 63] for _ in range(80))
    return write_documents(tmp_path / "corpus", documents)


def dumped(folder: Path, corpus: str, *more: str) -> Path:
    """Train on two ranks, dump the second step, and return the folder of the dump."""
    flags = [*RUN, "--data-path", corpus, "--dump-step-dir", str(folder), *more]
    run_world(2, train, resolve_legal(parse_args(flags), 2))
    return folder


@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_a_dumped_step_of_several_documents_is_judged(tmp_path: Path, corpus: str, positions: str) -> None:
    documents = ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]
    step = dumped(tmp_path / "step", corpus, *documents, "--position-embedding-type", positions)
    with np.load(next(step.glob("samples-*.npz"))) as samples:
        assert samples["document_ids"].max() > 0 and (samples["loss_mask"] == 0).any()
    assert referee.main(["--step", str(step)]) == 0


def test_a_checkpoint_gives_the_samples_of_its_run(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = dumped(tmp_path / "step", corpus, "--reset-attention-mask", "--seed", "7")
    loss = str(json.loads((step / "loss.json").read_text())["loss"])
    given = ["--model", str(step), "--gradients", str(step), "--loss", loss, "--computed-in", "fp32"]
    for chosen in (["--iteration", "2"], ["--samples", "4-6,7"]):
        assert referee.main([*given, *chosen]) == 0
    assert "loss" in capsys.readouterr().out
    for chosen in (["--iteration", "1"], ["--samples", "0-3"]):
        assert referee.main([*given, *chosen]) == 1
    for chosen, message in (
        (["--iteration", "4"], "--iteration 4: the run has steps 1 to 3"),
        (["--samples", "3,12"], "--samples 12: the run has samples 0 to 11"),
        (["--samples", "3-1"], "'3-1' must be a number or a range, as in 0-7,12"),
        (["--samples", "1,0-2"], "a sample is named twice"),
        (["--samples", "0-99999999999"], "names more than 100,000 samples; name the samples of one step"),
        (["--samples", "1", "--iteration", "1"], "--samples and --iteration each select samples; use one"),
    ):
        with pytest.raises(ValueError, match=message):
            referee.main([*given, *chosen])


def test_data_flags_give_samples_for_any_model(tmp_path: Path, corpus: str) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    model.save_pretrained(tmp_path / "model")
    data = f"--data-path {corpus} --split 1 --seq-length 16 --train-iters 3 --global-batch-size 4 --seed 7".split()
    step = dumped(tmp_path / "step", corpus, "--seed", "7")
    with np.load(step / "samples-00000.npz") as first, np.load(step / "samples-00001.npz") as second:
        tokens, labels = (np.concatenate([first[name], second[name]]) for name in ("tokens", "labels"))
    logits = model(torch.from_numpy(tokens)).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten()).backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    model.save_pretrained(tmp_path / "gradients", state_dict=gradients)
    given = ["--model", str(tmp_path / "model"), "--gradients", str(tmp_path / "gradients"), "--computed-in", "fp32"]
    assert referee.main([*given, "--iteration", "2", "--", *data]) == 0
    with pytest.raises(
        ValueError, match="--iteration 2: the configuration of --model names no training data; add flags"
    ):
        referee.main([*given, "--iteration", "2"])
