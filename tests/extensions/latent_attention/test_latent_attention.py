"""Multi-latent attention and YaRN: their rules, kernels for values of another width than keys, what is cached, and
frequencies against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.attention.flash_kernels import EqualWidthsKernel, EqualWidthsPackedKernel, FlashCPUKernel
from megatron.core.attention.kv_cache import KeyValueCache
from megatron.core.attention.local_attention import local_attention
from megatron.core.attention.tile_kernels import Causal, TorchKernel
from megatron.core.attention.varlen import Sequences, packed_attention
from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.rotary import RotaryEmbedding
from megatron.extensions.hugging_face.read_config import config_from_hf
from megatron.extensions.latent_attention.flags import LatentAttentionFlags
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import notices, resolve, validate
from tests.gpt_cases import FP64, LATENT, STYLES, logits_in_parts, random_batch
from tests.hf_models import SIZES, YARN

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --vocab-size 100 --mock-data "
    "--global-batch-size 8 --train-iters 1 --lr 1e-3 --position-embedding-type rope "
)
MLA = "--multi-latent-attention "


def problems(flags: str, world_size: int = 1) -> list[str]:
    config = resolve(parse_args((BASE + flags).split()), world_size)
    return [str(problem) for problem in (*validate(config, world_size), *notices(config, world_size))]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{MLA} --group-query-attention --num-query-groups 2", f"{MLA[:-1]}: cannot be combined with --group-query"),
        (f"{MLA} --position-embedding-type alibi", "cannot be combined with --position-embedding-type alibi"),
        (f"{MLA} --attention-output-gate", "--multi-latent-attention: cannot be combined with --attention-output-gate"),
        (f"{MLA} --qk-layernorm --qk-layernorm-scope all", "--qk-layernorm-scope all: is not known to --multi-latent"),
        (f"{MLA} --head-wise-attn-gate", "cannot be combined with --head-wise-attn-gate"),
        (f"{MLA} --value-channels 8", "cannot be combined with --value-channels 8"),
        (f"{MLA} --qk-l2-norm", "--qk-l2-norm: cannot be combined with --multi-latent-attention"),
        (f"{MLA} --attention-temperature-coeff 0.1", "-coeff 0.1: cannot be combined with --multi-latent-attention"),
        ("--attention-module multi_latent_attention --qk-l2-norm", "cannot be combined with --multi-latent-attention"),
        (f"{MLA} --kv-channels 16", "--kv-channels 16: has no effect with --multi-latent-attention, whose heads are"),
        (f"{MLA} --rotary-interleaved", "--rotary-interleaved: has no effect with --multi-latent-attention, which"),
        (f"{MLA} --add-qkv-bias", "--add-qkv-bias: has no effect with --multi-latent-attention, whose projections"),
        (f"{MLA} --qk-pos-emb-head-dim 7", "--qk-pos-emb-head-dim 7: times --rotary-percent 1 rotates 7 channels; it"),
        (f"{MLA} --kv-lora-rank 0", "--kv-lora-rank 0: must be above 0"),
        (f"{MLA} --q-lora-rank 0", "--q-lora-rank 0: must be above 0"),
        ("--kv-lora-rank 64", "--kv-lora-rank 64: has no effect without --multi-latent-attention"),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "mla_up_proj: has no effect without"),
        ("--rotary-scaling-factor 4", "--rotary-scaling-factor 4.0: has no effect without --rope-type yarn"),
        ("--rope-type yarn --rotary-scaling-factor 0.5", "--rotary-scaling-factor 0.5: must be at least 1"),
        ("--rope-type yarn --beta-slow 32", "--beta-slow 32.0: must be below --beta-fast 32"),
        ("--rope-type yarn --position-embedding-type none", "--rope-type yarn: has no effect without --position-emb"),
        (
            "--rope-type yarn --rotary-scaling-factor 4 --use-rope-scaling",
            "--use-rope-scaling: cannot be combined with --rope-type yarn: both scale",
        ),
        (f"{MLA} --bf16 --fp8-format e4m3 --kv-lora-rank 24", "--kv-lora-rank 24: must be a multiple of 16 under"),
        (f"{MLA} --bf16 --fp8-format e4m3 --v-head-dim 3", "--v-head-dim 3: times the 8 heads of a rank must be a mul"),
    ],
)
def test_rules(flags: str, expected: str) -> None:
    found = problems(flags)
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        (f"{MLA} --hidden-size 60", 1),  # which need not be a multiple of the heads
        (f"{MLA} --tp 4 --sequence-parallel --bf16 --fp8-format e4m3 --micro-batch-size 2", 4),
        (f"{MLA} --rotary-scaling-factor 40 --mscale 0.7 --mscale-all-dim 0.7 --q-lora-rank 24", 1),
        ("--attention-module multi_latent_attention --v-head-dim 16", 1),
        ("--rope-type yarn --rotary-scaling-factor 4 --beta-fast 16", 1),
    ],
)
def test_legal(flags: str, world_size: int) -> None:
    assert problems(flags, world_size) == []


def test_tokens_of_a_rank_in_fp8() -> None:
    found = problems(f"{MLA} --tp 8 --sequence-parallel --bf16 --fp8-format e4m3", 8)
    assert any("--seq-length 64: gives a rank 8 tokens of a micro-batch to project" in problem for problem in found)


def operands(width: int, value_width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((12, 2, 4, width), (12, 2, 2, width), (12, 2, 2, value_width))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)  # type: ignore[return-value]


def gradients(out: Tensor, qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weights).sum(), qkv)


@pytest.mark.parametrize("widths", [(10, 6), (6, 10)])
@pytest.mark.parametrize("window", [None, 5])
def test_kernels_of_one_width(widths: tuple[int, int], window: int | None) -> None:
    """A kernel that needs equal widths gives the output and the gradients of one that does not."""
    qkv, documents = operands(*widths), ((0, 5), (0, 7, 9))
    expected = local_attention(*qkv, Causal(TorchKernel(0.3), documents, window))
    assert expected.shape == (12, 2, 4, widths[1])
    found = local_attention(*qkv, Causal(EqualWidthsKernel(FlashCPUKernel(0.3)), documents, window))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(found, qkv), gradients(expected, qkv), rtol=1e-11, atol=1e-12)


class OneSampleKernel:
    """A packed kernel of equal widths, in plain torch: one sequence."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, ...]:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = local_attention(*(x[:, None] for x in leaves), Causal(TorchKernel(0.3)))[:, 0]
        return out.detach(), q

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, ...], sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert grad.shape == kept[0].shape == q.shape
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = local_attention(*(x[:, None] for x in leaves), Causal(TorchKernel(0.3)))[:, 0]
        torch.testing.assert_close(out, kept[0])
        return torch.autograd.grad(out, leaves, grad)


def test_packed_kernels_of_one_width() -> None:
    qkv = tuple(x[:, :1].detach().requires_grad_() for x in operands(10, 6))
    expected = local_attention(*qkv, Causal(TorchKernel(0.3)))
    found = packed_attention(*qkv, None, None, EqualWidthsPackedKernel(OneSampleKernel()))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, qkv), gradients(expected, qkv))


def test_generation_caches_latents() -> None:
    """As many numbers for each token as the latent and the rotary key have, and the logits of the whole text."""
    widths = LATENT.options(LatentAttentionFlags)
    model, tokens = GPTModel(LATENT, FP64), random_batch(LATENT).tokens
    cache = KeyValueCache()
    parts = logits_in_parts(model, tokens, (6, 1, 4, 5), cache)
    torch.testing.assert_close(torch.cat(parts, 1), model.logits(None, Batch.of_tokens(tokens)), rtol=1e-12, atol=1e-12)
    kept = [x.shape[1] * x.shape[3] for layer in cache._layers.values() for x in layer]
    assert kept == [widths.kv_lora_rank + widths.qk_pos_emb_head_dim] * LATENT.num_layers


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 4.0, "original_max_position_embeddings": 64},
        {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 0.5},
        {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 6.0, "beta_slow": 0.5},
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ],
)
def test_yarn_frequencies(scaling: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, **scaling}
    theirs = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    fields = {**scaling, "rotary_scaling_factor": scaling["factor"]}
    del fields["factor"]
    fields["yarn_correction_range_round_to_int"] = fields.pop("truncate", True)
    config = replace(STYLES["llama"], hidden_size=64, num_attention_heads=2, rope_type="yarn", **fields)
    ours = RotaryEmbedding(config, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(ours.frequencies, frequencies, rtol=1e-6, atol=0)
    assert ours.mscale == pytest.approx(factor, rel=1e-12)
    cos, _ = ours(torch.zeros(1))
    assert cos.flatten().tolist() == pytest.approx([factor] * 16)


def test_factor_of_yarn_that_is_written_out() -> None:
    """As gpt-oss and Qwen have it: what follows from the other settings, or an error."""
    hf = {"model_type": "llama", "rope_scaling": {**YARN, "attention_factor": 1.1386294361119891}, **SIZES}
    assert config_from_hf(hf).rotary_mscale == pytest.approx(1.1386294361119891)


def test_yarn_of_factor_one_changes_nothing() -> None:
    plain, yarn = STYLES["llama"], replace(STYLES["llama"], rope_type="yarn")
    tables = [RotaryEmbedding(config, torch.device("cpu"), torch.float32)(torch.arange(9)) for config in (plain, yarn)]
    torch.testing.assert_close(tables[0], tables[1], rtol=0, atol=1e-6)
