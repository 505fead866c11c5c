"""Tests of GPTModel as an ordinary module in one process."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch
from torch import nn

from megatron.core.attention.core_attention import alibi_slopes
from megatron.core.batch import Batch
from megatron.core.config.activations import ACTIVATIONS
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.embedding import rounded
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from megatron.core.transformer.recompute import recompute_segments
from megatron.core.transformer.rotary import RotaryEmbedding
from tests.gpt_cases import FP64, GPT, LLAMA, STYLES, random_batch, token_losses, with_dropout


def test_recompute_segments_cover_every_layer_once() -> None:
    for method in ("uniform", "block"):
        for count in (1, 2, 3, 9):
            config = replace(GPT, recompute_granularity="full", recompute_method=method, recompute_num_layers=count)
            for layers in range(8):
                segments = recompute_segments(config, layers)
                assert [i for segment in segments for i in segment.layers] == list(range(layers))
                recomputed = sum(len(segment.layers) for segment in segments if segment.recompute)
                assert recomputed == (layers if method == "uniform" else min(count, layers))


def test_dropout_is_a_function_of_the_sample_and_off_in_evaluation() -> None:
    plain, config = GPTModel(GPT, FP64), with_dropout(GPT)
    model, batch = GPTModel(config, FP64), random_batch(GPT)
    losses = token_losses(model, batch)
    assert torch.equal(losses, token_losses(model, batch))
    assert not torch.equal(losses, token_losses(model, replace(batch, sample_index=batch.sample_index + 1)))
    flipped = {name: getattr(batch, name).flip(0) for name in ("tokens", "labels", "loss_mask", "sample_index")}
    torch.testing.assert_close(token_losses(model, Batch(**flipped)).flip(0), losses, rtol=1e-12, atol=1e-12)
    assert torch.equal(token_losses(model.eval(), batch), token_losses(plain, batch))


def test_no_two_dropouts_share_a_mask() -> None:
    keys = [module.key for module in GPTModel(with_dropout(GPT)).modules() if hasattr(module, "key")]
    assert len(keys) == 1 + 3 * GPT.num_layers
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("style", ["gpt", "qwen3"])
def test_half_precision_follows_single(dtype: str, style: str) -> None:
    config = with_dropout(STYLES[style])
    batch = random_batch(config)
    exact = GPTModel(config)(None, batch)
    model = GPTModel(config, ModelParallelConfig(**{dtype: True}))
    loss = model(None, batch)
    loss.backward()
    assert loss.dtype == torch.float32
    weight = model.embedding.word_embeddings.weight
    assert all(parameter.grad.dtype == weight.dtype for parameter, _ in model.named_metas().values())
    torch.testing.assert_close(loss, exact, rtol=2e-3, atol=0)


@pytest.mark.parametrize("of_embeddings", [None, 1.0])
def test_initial_weights_have_the_configured_deviation(of_embeddings: float | None) -> None:
    config = replace(GPT, num_layers=8, hidden_size=128, init_method_std=0.05, untie_embeddings_and_output_weights=True)
    config = replace(config, embedding_init_method_std=of_embeddings)
    found = {name: parameter.detach() for name, (parameter, _) in GPTModel(config).named_metas().items()}
    for name, value in found.items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert bool((value == 1).all()), name
        else:
            std = 0.05 / 4 if "linear_proj" in name or "fc2" in name else 0.05
            std = of_embeddings or std if name.startswith("embedding.") else std
            assert abs(value.std().item() / std - 1) < 0.05, name
            assert abs(value.mean().item()) < std / 10, name


def test_text_beyond_the_learned_positions_is_refused() -> None:
    model = GPTModel(GPT)
    with pytest.raises(ValueError, match="--max-position-embeddings 16"):
        model(None, Batch.of_tokens(torch.zeros(1, 17, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda losses: losses.mean(), r"shape \(\)"),
        (lambda losses: losses[:, :1], r"shape \(5, 1\)"),
        (lambda losses: None, "a NoneType"),
    ],
)
def test_a_loss_without_one_value_per_token_is_refused(returned, found: str) -> None:
    model = GPTModel(GPT)
    loss = model.loss
    model.loss = lambda logits, labels: returned(loss(logits, labels))
    with pytest.raises(ValueError, match=rf"--loss-func: the function returned {found}, .* shape \(5, 2\); do not"):
        model(None, Batch.of_tokens(torch.zeros(2, 5, dtype=torch.int64)))


def test_duplicate_parameter_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ACTIVATIONS, "_entries", dict(ACTIVATIONS._entries))

    @ACTIVATIONS.register("own_scale")
    class OwnScale(nn.Module):
        def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
            super().__init__()
            self.scale = make_parameter(ParamMeta("scale", (1,), init=Init("ones"), role="vector"), ctx)

    with pytest.raises(ValueError, match=r"^parameters scale: each name must be unique in the model"):
        GPTModel(replace(GPT, activation_func="own_scale"))


def test_word_embeddings_are_scaled_in_the_models_precision() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for hidden in (32, 2048, 3072):
            assert rounded(sqrt(hidden), dtype) == float(torch.tensor(sqrt(hidden), dtype=dtype)), (dtype, hidden)


CPU = torch.device("cpu")
ROPE = replace(LLAMA, hidden_size=64, kv_channels=8)


@pytest.mark.parametrize("scaled", [False, True])
def test_interpolated_positions_are_divided(scaled: bool) -> None:
    """With an interpolation factor of 4, position 4i is treated as position i, even for the frequencies that Llama 3.1
    scales."""
    config = replace(ROPE, use_rope_scaling=scaled, rope_scaling_original_max_position_embeddings=16)
    at = torch.arange(6)
    longer = replace(config, rotary_seq_len_interpolation_factor=4)
    plain = RotaryEmbedding(config, CPU, torch.float64, config.rotation)(at)
    stretched = RotaryEmbedding(longer, CPU, torch.float64, config.rotation)(4 * at)
    for one, other in zip(plain, stretched, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 14, 16, 71, 112])
def test_alibi_slopes_match_bloom(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), theirs, rtol=2e-6, atol=0)
