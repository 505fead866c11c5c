"""Mamba-2: chunks against the recurrence and against transformers, packed documents, states that go on where a text
stopped, initial values, and rules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.stage_parameters import count_parameters
from megatron.extensions.hybrid_layers.flags import HybridConfig
from megatron.extensions.mamba.flags import MambaFlags, group_channels, num_heads
from megatron.extensions.mamba.mamba2 import gated_group_norm, mamba_operands
from megatron.extensions.mamba.ssd import ssd_chunks, ssd_steps
from megatron.extensions.planner.flops import model_flops
from megatron.training.config.flags import with_fields
from tests.extensions.recurrences import ModelTests, check_chunks, check_strong_decay, greedy_text
from tests.gpt_cases import FP64, model_of, random_batch
from tests.pure.test_regions import check_region, compiles

MAMBA = model_of("mamba")


def operands(length: int, dtype: torch.dtype = torch.float64, decay: float = 0.5) -> list[Tensor]:
    """x, dt, a, B, C of 2 samples, 2 groups and 6 heads, and a state to begin with."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, dt, a = normal(length, 2, 6, 7), F.softplus(normal(length, 2, 6)), -decay * normal(6).exp()
    found = [x, dt, a, normal(length, 2, 2, 5), normal(length, 2, 2, 5), normal(2, 6, 5, 7)]
    return [t.to(dtype).requires_grad_() for t in found]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (9, 64), (48, 16), (53, 16), (70, 64)])
def test_chunks_are_the_recurrence(length: int, chunk: int, packed: bool) -> None:
    check_chunks(ssd_chunks, ssd_steps, operands(length), chunk, packed)


def test_strong_decay_is_no_overflow() -> None:
    check_strong_decay(ssd_chunks, ssd_steps, operands(64, torch.float32, decay=40.0))


def test_sixteen_bits_are_computed_in_fp32() -> None:
    rounded = [x.detach().bfloat16() for x in operands(20)[:-1]]
    found = ssd_chunks(*rounded)
    assert {x.dtype for x in found} == {torch.float32}
    torch.testing.assert_close(found, ssd_chunks(*(x.float() for x in rounded)))


class TestModel(ModelTests):
    config = MAMBA
    cached = ((3, 2, 4, 2 * 5 + 2 * 6), (3, 8, 6, 5))


def test_initial_values() -> None:
    """Step sizes from 0.001 to 0.1 and decays per step size from 1 to 16, as in Megatron-LM."""
    model = GPTModel(MAMBA.with_options(replace(MAMBA.options(MambaFlags), mamba_num_heads=512)), FP64)
    mixer: Any = model.decoder.layers[0].self_attention
    steps, decay = F.softplus(mixer.dt_bias), mixer.a_log.exp()
    assert 1e-3 < steps.min() < 1.2e-3 and 0.08 < steps.max() < 0.1 and 0.007 < steps.log().mean().exp() < 0.014
    assert 1 < decay.min() < 1.2 and 15.5 < decay.max() < 16
    assert (mixer.d == 1).all() and (mixer.norm == 1).all()


class ExactTorch:
    """torch with fp64 where a mixer of `transformers` asks for fp32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Random Nemotron-H in fp64, all of whose parts are."""
    transformers = pytest.importorskip("transformers")
    own = MAMBA.options(MambaFlags)
    torch.manual_seed(5)
    config = transformers.NemotronHConfig(
        vocab_size=MAMBA.vocab_size,
        hidden_size=MAMBA.hidden_size,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        num_attention_heads=MAMBA.num_attention_heads,
        num_key_value_heads=MAMBA.query_groups,
        head_dim=MAMBA.head_dim,
        intermediate_size=MAMBA.ffn_size,
        ssm_state_size=own.mamba_state_dim,
        mamba_num_heads=own.mamba_num_heads,
        mamba_head_dim=own.mamba_head_dim,
        n_groups=own.mamba_num_groups,
        conv_kernel=own.mamba_conv_kernel_dim,
        chunk_size=5,
        time_step_min=1e-30,  # its lower limit too, except token by token behind a cache
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.5 if parameter.ndim == 1 else 0.0))
    monkeypatch.setattr(sys.modules[type(model).__module__], "torch", ExactTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return model


def by_group(weight: Tensor, widths: list[int]) -> Tensor:
    """[rows, ...] of several maps side by side, each group after group -> [groups, rows of a group, ...]"""
    groups = MAMBA.options(MambaFlags).mamba_num_groups
    parts = weight.split([groups * width for width in widths])
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1)


def ours_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights, or gradients, under our names and in our layout."""
    channels = list(group_channels(MAMBA))
    found = {
        "embedding.word_embeddings.weight": weights["model.embeddings.weight"],
        "decoder.final_layernorm.weight": weights["model.norm_f.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }
    for number, letter in enumerate("M-*M"):
        theirs, ours = f"model.layers.{number}", f"decoder.layers.{number}"
        mixer = {key: weights[f"{theirs}.mixer.{key}"] for key in MIXERS[letter]}
        norm = "pre_mlp_layernorm" if letter == "-" else "input_layernorm"
        found[f"{ours}.{norm}.weight"] = weights[f"{theirs}.norm.weight"]
        if letter == "M":
            mixer["in_proj.weight"] = by_group(mixer["in_proj.weight"], channels)
            mixer["conv1d.weight"] = by_group(mixer["conv1d.weight"].squeeze(1), channels[1:4])
            mixer["conv1d.bias"] = by_group(mixer["conv1d.bias"], channels[1:4])
        elif letter == "*":
            heads = [mixer.pop(f"{each}_proj.weight").unflatten(0, (MAMBA.query_groups, -1)) for each in "qkv"]
            rows = torch.cat(heads, 1).unflatten(1, (-1, MAMBA.head_dim))
            mixer = {"linear_qkv.weight": rows, "linear_proj.weight": mixer["o_proj.weight"]}
        else:
            mixer = {"linear_fc1.weight": mixer["up_proj.weight"], "linear_fc2.weight": mixer["down_proj.weight"]}
        part = "mlp" if letter == "-" else "self_attention"
        found |= {f"{ours}.{part}.{key}": value for key, value in mixer.items()}
    return found


PROJECTIONS = ("in_proj.weight", "out_proj.weight")
MIXERS = {
    "M": (*PROJECTIONS, "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight"),
    "-": ("up_proj.weight", "down_proj.weight"),
    "*": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"),
}


def loaded(theirs: Any) -> GPTModel:
    config = replace(MAMBA, make_vocab_size_divisible_by=1)
    model, weights = GPTModel(config, FP64), ours_of(dict(theirs.named_parameters()))
    assert weights.keys() == model.named_metas().keys()
    with torch.no_grad():
        for name, (parameter, _) in model.named_metas().items():
            parameter.copy_(weights[name])
    return model


def test_nemotron_h(exact: Any) -> None:
    """Logits and every gradient."""
    batch = random_batch(MAMBA)
    model = loaded(exact)
    logits = exact(batch.tokens).logits
    torch.testing.assert_close(model.eval().logits(None, batch), logits, rtol=1e-9, atol=1e-9)
    model.train()(None, batch).backward()
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    (losses * batch.loss_mask.flatten()).sum().backward()
    expected = ours_of({name: parameter.grad for name, parameter in exact.named_parameters()})
    for name, (parameter, _) in model.named_metas().items():
        error = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert error < 1e-9, f"{name}: {error:.1e}"


def test_greedy_text_of_nemotron_h(exact: Any) -> None:
    """Token by token behind a cache."""
    tokens = random_batch(MAMBA).tokens[:2, :5]
    expected = exact.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert greedy_text(loaded(exact).eval(), tokens, 8) == expected.tolist()


def test_flops() -> None:
    """Products per token of a sample of several chunks, thrice: scores of a group, what they weigh, states that are
    kept and read, projections."""
    own = replace(MAMBA.options(MambaFlags), mamba_chunk_size=8)
    shape = {"num_layers": 1, "hybrid_layer_pattern": "M", "seq_length": 32}
    one = with_fields(MAMBA.with_options(own), shape)
    none = with_fields(one, {"hybrid_layer_pattern": "-"})
    heads, width, states, chunk = num_heads(one), own.mamba_head_dim, own.mamba_state_dim, own.mamba_chunk_size
    mixed = own.mamba_num_groups * chunk * states + heads * width * (chunk + 2 * states)
    projections = one.hidden_size * (own.mamba_num_groups * sum(group_channels(one)) + heads * width)
    mlp = 2 * one.hidden_size * one.ffn_size
    sums = 2 * 2 * heads * chunk  # of decays, and their gradient
    assert model_flops(one).matmul - model_flops(none).matmul == 6 * (mixed + projections - mlp) + sums
    assert model_flops(one).attention == 0


def region_of_mamba(x: Tensor, compiled: bool) -> Tensor:
    mixed, number = x.unflatten(-1, (2, 20)), torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]).t()
    weight, bias = (torch.linspace(-1, 1, 36 * n, dtype=x.dtype) for n in (3, 1))
    operands, _ = region(mamba_operands, compiled)(
        mixed, weight.view(2, 18, 3), bias.view(2, 18), mixed[0, 0, :, :2].flatten(), (8, 5, 4), 0.6, number, None
    )
    out = region(gated_group_norm, compiled)(operands[0].flatten(2), mixed[..., :8], weight[:16], 1e-5)
    return torch.cat([part.flatten(2) for part in (*operands, out)], -1)


@compiles
def test_the_compiled_region_is_the_plain_one() -> None:
    check_region(region_of_mamba)


def test_parameters_of_nemotron_h_8b() -> None:
    """As many as transformers makes of its configuration."""
    transformers = pytest.importorskip("transformers")
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    config = transformers.NemotronHConfig(hybrid_override_pattern=pattern)
    with torch.device("meta"):
        expected = sum(
            parameter.numel() for parameter in transformers.AutoModelForCausalLM.from_config(config).parameters()
        )
    options = MambaFlags(mamba_num_heads=128)
    model = replace(
        replace(MAMBA, num_layers=52, hidden_size=4096, ffn_hidden_size=21504, num_attention_heads=32, kv_channels=128),
        num_query_groups=8,
        vocab_size=131072,
    ).with_options(options, HybridConfig(pattern))
    assert count_parameters(model).total == expected
