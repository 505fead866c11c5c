"""A mixture-of-experts model that starts from a dense model computes the same outputs as the dense model under any
layout. Its training can then continue."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.checkpoints.checkpointing import load_whole_model
from tests.forked import run_forked

MODEL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --position-embedding-type rope
    --vocab-size 96 --seq-length 16 --init-method-std 0.3 --attention-dropout 0 --hidden-dropout 0"""
TRAINING = """--cpu --fp32 --mock-data --global-batch-size 4 --eval-iters 0 --num-workers 0 --log-interval 1
    --save-interval 1"""
STILL = "--lr 1e-30 --train-iters 1"
"""Flags for one training step with a tiny learning rate. The step changes no weight, so the saved weights equal the
initial weights."""


@pytest.fixture(scope="module", params=["gelu", "swiglu"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of a dense model's checkpoint after one training step, and the model's flags."""
    folder = tmp_path_factory.mktemp("dense") / "dense"
    model = MODEL + (" --swiglu --disable-bias-linear" if request.param == "swiglu" else "")
    run_forked(1, f"{model} {TRAINING} --lr 0.1 --train-iters 1 --save {folder}".split(), folder.with_name("screen"))
    return folder, model


def logits(model: GPTModel) -> torch.Tensor:
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model.double().eval().logits(None, Batch.of_tokens(tokens))


@pytest.mark.parametrize(
    ("experts", "layout"),
    [
        ("--num-experts 4 --moe-router-topk 2", ""),
        ("--num-experts 4 --moe-router-topk 3 --moe-layer-freq [0,1]", "--ep 2 --etp 1"),
        (
            "--num-experts 8 --moe-router-topk 4 --moe-upcycling-granularity 2 --moe-ffn-hidden-size 24",
            "--tp 2 --sequence-parallel --ep 2 --etp 1",
        ),
        (
            "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
            "--moe-router-topk-scaling-factor 2.5",
            "--pp 2",
        ),
    ],
)
def test_upcycled_model_equals_the_dense_model_at_step_0(
    dense: tuple[Path, str], experts: str, layout: str, tmp_path: Path
) -> None:
    folder, model = dense
    flags = f"{model} {TRAINING} {experts} --moe-use-upcycling --load {folder} --save {tmp_path / 'moe'} {layout}"
    screen = run_forked(2 if layout else 1, f"{flags} {STILL}".split(), tmp_path / "screen")
    assert f"upcycled the dense model in --load {folder}; each of " in screen
    assert "routers are initialized at random with --init-method-std 0.3" in screen
    mixture, expected = load_whole_model(tmp_path / "moe")[0], load_whole_model(folder)[0]
    torch.testing.assert_close(logits(mixture), logits(expected), rtol=1e-5, atol=1e-5)
    assert any(".router." in name for name, _ in mixture.named_parameters())


def test_layouts_start_alike_with_noise_and_resume(dense: tuple[Path, str], tmp_path: Path) -> None:
    """Noise depends only on the parameter name and the position of the element. If the command is repeated, the run
    resumes, and the experts diverge from each other."""
    folder, model = dense
    experts = "--num-experts 4 --moe-router-topk 2 --moe-use-upcycling --moe-upcycling-noise 0.5"
    found = []
    for ranks, layout in ((1, ""), (2, "--ep 2 --etp 1 --use-distributed-optimizer")):
        save = tmp_path / f"moe{ranks}"
        flags = f"{model} {TRAINING} {experts} --load {folder} --save {save} {layout} {STILL}"
        run_forked(ranks, flags.split(), tmp_path / f"screen{ranks}")
        found.append(load_whole_model(save)[0])
    for one, two in zip(found[0].parameters(), found[1].parameters(), strict=True):
        assert torch.equal(one, two)
    first, second, *_ = dict(found[0].named_parameters())["decoder.layers.0.mlp.experts.linear_fc1.weight"]
    assert not torch.equal(first, second)
    flags = f"{model} {TRAINING} {experts} --load {folder} --save {tmp_path / 'moe1'} --lr 0.1 --train-iters 2"
    screen = run_forked(1, flags.split(), tmp_path / "again")
    assert (
        f"from {tmp_path / 'moe1'} (--save), not the dense model in --load {folder}: starting at iteration 1" in screen
    )


def test_a_mismatched_dense_model_is_refused(dense: tuple[Path, str], tmp_path: Path) -> None:
    folder, model = dense
    flags = f"{model} {TRAINING} --num-experts 4 --moe-use-upcycling --load {folder} --norm-epsilon 0.5 {STILL}"
    screen = run_forked(1, flags.split(), tmp_path / "screen", code=2)
    assert "does not fit the run: --norm-epsilon 1e-05 in the dense model, 0.5 in the run" in screen


def test_upcycling_from_a_hugging_face_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("megatron.extensions.interop.hugging_face")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=96, num_key_value_heads=2, max_position_embeddings=64)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config)
    for parameter in theirs.parameters():
        parameter.data.mul_(5)
    theirs.save_pretrained(tmp_path / "llama")
    experts = "--num-experts 8 --moe-router-topk 4 --moe-upcycling-granularity 2 --moe-ffn-hidden-size 24"
    flags = f"{TRAINING} --seq-length 16 {experts} --moe-use-upcycling --load {tmp_path / 'llama'}"
    run_forked(1, f"{flags} --save {tmp_path / 'moe'} {STILL}".split(), tmp_path / "screen")
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs.double().eval()(tokens).logits
    found = logits(load_whole_model(tmp_path / "moe")[0])[..., :96]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
