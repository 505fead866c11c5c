"""Test that computing the output layer and the loss in chunks of tokens changes neither losses, gradients nor the FLOPs
of GEMMs, but needs less memory."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.config.losses import AUTO, LOSSES, chunk_size
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.loss import CrossEntropy
from megatron.core.pipeline_parallel.layout import Stage
from megatron.training.config.arguments import parse_args
from tests.gpt_cases import FP64, GPT, LLAMA, random_batch

HEADS = {
    "tied": GPT,
    "untied": replace(LLAMA, untie_embeddings_and_output_weights=True),
    "bias": replace(GPT, add_output_layer_bias=True, logits_scaling=3.0),
    "z-loss and cap": replace(LLAMA, z_loss_coeff=0.1, final_logit_softcapping=0.5, logits_scaling=3.0),
    "padded vocabulary": replace(LLAMA, vocab_size=33),
    "further tokens": replace(GPT, mtp_num_layers=2, mtp_loss_scaling_factor=0.7),
    "further tokens without weight": replace(LLAMA, mtp_num_layers=1, mtp_loss_scaling_factor=0.0),
}


@pytest.mark.parametrize(
    ("layers", "hidden", "vocab", "size"),
    [(32, 4096, 128256, 4096), (16, 2048, 128256, 8192), (80, 8192, 128256, 1024), (12, 768, 50304, 0)],
)
def test_the_size_is_chosen_by_its_cost(layers: int, hidden: int, vocab: int, size: int) -> None:
    asked = parse_args(["--loss-chunk-tokens", "auto"]).parallel.loss_chunk_tokens
    assert chunk_size(asked, vocab, layers, hidden) == size
    assert chunk_size(7, vocab, layers, hidden) == 7 and chunk_size(None, vocab, layers, hidden) == 0


def test_the_chunk_size_is_a_number_or_auto() -> None:
    for wrong in ("-2", "some", "1.5"):
        with pytest.raises(ValueError, match="must be auto or a whole number of at least 0"):
            parse_args(["--loss-chunk-tokens", wrong])
    wide = replace(LLAMA, num_layers=300, vocab_size=32)
    built = GPTModel(wide, replace(FP64, loss_chunk_tokens=AUTO), stage=Stage([], False, True))
    assert built.chunk_tokens == 1024


class Found(NamedTuple):
    """Results of one forward and one backward pass."""

    loss: Tensor
    token_losses: Tensor
    gradients: dict[str, Tensor]


def trained(
    model: TransformerConfig, chunk: int, main_grad: bool, seed: float = 1.0, parallel: ModelParallelConfig = FP64
) -> Found:
    """Run the forward and backward passes of one micro-batch. Gradients are accumulated by autograd, or in a
    `main_grad` that initially contains ones."""
    built = GPTModel(model, replace(parallel, loss_chunk_tokens=chunk)).train()
    seen: list[Tensor] = []
    built.loss_watchers.append(lambda losses, batch: seen.append(losses))
    for parameter in built.parameters() if main_grad else ():
        parameter.main_grad = torch.ones_like(parameter)  # type: ignore[attr-defined]
    batch = random_batch(model)
    loss = built(None, replace(batch, loss_seed=torch.tensor(seed, dtype=torch.float64)) if seed != 1 else batch)
    (loss * seed).backward()
    gradients = {}
    for name, parameter in built.named_parameters():
        parts = [parameter.grad, getattr(parameter, "main_grad", None)]
        gradients[name] = torch.stack([part for part in parts if part is not None]).sum(0)
    return Found(loss.detach(), seen[0], gradients)


def assert_equal(found: Found, expected: Found) -> None:
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(found.loss, expected.loss, **close)
    torch.testing.assert_close(found.token_losses, expected.token_losses, **close)
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-12, atol=1e-13 * largest, msg=name)


@pytest.mark.parametrize("main_grad", [False, True], ids=["autograd", "main_grad"])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("head", HEADS)
def test_chunks_compute_the_same_as_all_tokens_at_once(head: str, chunk: int, main_grad: bool) -> None:
    model = replace(HEADS[head], attention_dropout=0.0, hidden_dropout=0.0)
    assert_equal(trained(model, chunk, main_grad), trained(model, 0, main_grad))


@pytest.mark.parametrize("head", ["tied", "bias", "further tokens"])
def test_chunks_apply_the_loss_scale(head: str) -> None:
    model = replace(HEADS[head], attention_dropout=0.0, hidden_dropout=0.0)
    assert_equal(trained(model, 7, True, 64.0), trained(model, 0, True, 64.0))


def test_an_unexpected_output_gradient_is_an_error() -> None:
    built = GPTModel(GPT, replace(FP64, loss_chunk_tokens=7)).train()
    for parameter in built.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="differs from the one with which its chunks were computed"):
        (2 * built(None, random_batch(GPT))).backward()


@pytest.mark.parametrize("frozen", ["head", "all but the head"])
def test_frozen_parameters_get_no_gradient(frozen: str) -> None:
    found = []
    for chunk in (0, 7):
        built = GPTModel(HEADS["untied"], replace(FP64, loss_chunk_tokens=chunk)).train()
        for name, parameter in built.named_parameters():
            parameter.requires_grad_(name.startswith("output_layer") == (frozen != "head"))
        built(None, random_batch(HEADS["untied"])).backward()
        found.append({name: parameter.grad for name, parameter in built.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert (gradient is None) == (found[1][name] is None)
        if gradient is not None:
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-12, atol=1e-13)


@torch.no_grad()
def test_evaluation_in_chunks_matches_all_tokens_at_once() -> None:
    models = [GPTModel(LLAMA, replace(FP64, loss_chunk_tokens=chunk)).eval() for chunk in (0, 7)]
    losses = [model(None, random_batch(LLAMA)) for model in models]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-14, atol=0)


class Squared(CrossEntropy):
    """Custom loss."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().__call__(logits, labels).square()


def test_a_custom_loss_is_computed_in_chunks() -> None:
    LOSSES.register("squared", Squared, multi_token=True)
    model = replace(LLAMA, loss_func="squared")
    assert_equal(trained(model, 7, True), trained(model, 0, True))


def test_a_loss_without_token_losses_is_refused() -> None:
    class Mean(CrossEntropy):
        def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
            return super().__call__(logits, labels).mean()

    LOSSES.register("mean", Mean, multi_token=True)
    with pytest.raises(ValueError, match="must return the loss of each token"):
        trained(replace(LLAMA, loss_func="mean"), 7, True)


@pytest.mark.parametrize("head", HEADS)
def test_chunks_run_the_same_gemms(head: str) -> None:
    counted = []
    for chunk in (0, 7):
        with FlopCounterMode(display=False) as counter:
            trained(HEADS[head], chunk, True)
        counted.append(counter.get_total_flops())
    assert counted[1] == counted[0] > 0
