"""Compressed attention against transformers' DeepSeek-V4 and a literal form, its indexer's loss, generation, memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.batch import Batch, BatchContext
from megatron.core.transformer.rotary import RotaryEmbedding, apply_rotary_interleaved
from megatron.extensions.sparse_attention import compressed_attention
from megatron.training.config.flags import with_fields
from tests.extensions.planner.test_planned_activations import kept_in_bf16
from tests.extensions.recurrences import check_half_precision
from tests.extensions.sparse_attention.test_sparse_attention import COEFF, check_layer, layer_and_context
from tests.gpt_cases import model_of

COMPRESSED = model_of("compressed")
HEADS, GROUPS, ROTARY, WINDOW, TOPK, BASE = 8, 4, 4, 3, 2, 500.0


def rotated(x: Tensor, tables: tuple[Tensor, Tensor], back: bool = False) -> Tensor:
    """x [..., d] at each position of `tables`, its last channels turned"""
    cos, sin = tables
    turned = apply_rotary_interleaved(x[..., -ROTARY:], cos, -sin if back else sin)
    return torch.cat((x[..., :-ROTARY], turned), dim=-1)


def literal_keys(compressor: Any, x: Tensor, start: int, stop: int, tables: Any) -> tuple[list[Tensor], list[int]]:
    """Compressed keys of the tokens `start` to `stop` of a text x [s, h], and the last token that each is made of."""
    kv, gate = x @ compressor.linear_wkv.weight.t(), x @ compressor.linear_wgate.weight.t()
    ratio, width, found, ends = len(compressor.ape), compressor.width, [], []
    for first in range(start, stop - ratio + 1, ratio):
        values, logits = kv[first : first + ratio], gate[first : first + ratio] + compressor.ape
        if ratio == 4:
            values, logits = values[:, width:], logits[:, width:]
            if first > start:
                before = slice(first - ratio, first)
                values = torch.cat((values, kv[before, :width]))
                logits = torch.cat((logits, (gate[before] + compressor.ape)[:, :width]))
        key = F.rms_norm((values * logits.softmax(0)).sum(0), (width,), compressor.norm.weight, compressor.norm.eps)
        found.append(rotated(key, tuple(table[first] for table in tables)))  # type: ignore[arg-type]
        ends.append(first + ratio - 1)
    return found, ends


def literal(layer: Any, x: Tensor, context: BatchContext, sparse_loss: bool) -> tuple[Tensor, Tensor, int]:
    """Output of a layer for x [s, b, h], token by token, the sum of divergences, and their number."""
    out, total, count = torch.zeros_like(x), x.new_zeros(()), 0
    sinks = layer.core.softmax_offset
    for sample in range(x.shape[1]):
        text = x[:, sample]
        cos, sin = (table.squeeze(2)[:, min(sample, table.shape[1] - 1)] for table in context.rotary[layer.rotation])
        starts = context.documents[sample] if context.documents is not None else (0,)
        q_latent = layer.q_layernorm(text @ layer.linear_q_down.weight.t())
        q = F.rms_norm(torch.einsum("si,ndi->snd", q_latent, layer.linear_q.weight), (layer.width,), eps=layer.eps)
        q = rotated(q, (cos[:, None], sin[:, None]))
        kv = rotated(layer.kv_layernorm(text @ layer.linear_kv.weight.t()), (cos, sin))
        for start, stop in pairwise((*starts, len(text))):
            keys, ends = literal_keys(layer.compressor, text, start, stop, (cos, sin)) if layer.compressor else ([], [])
            if layer.indexer is not None:
                of_index = text.detach()
                index_keys, _ = literal_keys(layer.indexer.compressor, of_index, start, stop, (cos, sin))
                index_q = (q_latent.detach() @ layer.indexer.linear_wq_b.weight.t()).unflatten(
                    -1, (layer.indexer.heads, -1)
                )
                index_q = rotated(index_q, (cos[:, None], sin[:, None]))
                weights = of_index @ layer.indexer.linear_weights_proj.weight.t()
                weights = weights * (layer.indexer.heads * layer.indexer.width) ** -0.5
            for token in range(start, stop):
                seen = [number for number, end in enumerate(ends) if end <= token]
                chosen, scores = seen, {}
                if layer.indexer is not None:
                    scores = {n: F.relu(index_q[token] @ index_keys[n]) @ weights[token] for n in seen}
                    chosen = sorted(seen, key=lambda n: (-scores[n].item(), -n))[:TOPK]
                near = [kv[place] for place in range(max(start, token - WINDOW + 1), token + 1)]
                values = torch.stack(near + [keys[n] for n in chosen])
                logits = torch.cat((q[token] @ values.t() * layer.core.scale, sinks[:, None]), dim=1)
                found = rotated(logits.softmax(-1)[:, :-1] @ values, (cos[token], sin[token]), back=True)
                groups = torch.einsum("gd,grd->gr", found.reshape(GROUPS, -1), layer.core.linear_o_group_proj)
                out[token, sample] = layer.linear_proj.weight @ groups.flatten()
                count += layer.indexer is not None
                compared = chosen if sparse_loss else seen
                if layer.indexer is None or not compared:
                    continue
                every = torch.stack(near + [keys[n] for n in compared]).detach()
                logits = torch.cat((q[token].detach() @ every.t() * layer.core.scale, sinks.detach()[:, None]), dim=1)
                p = logits.softmax(-1)[:, len(near) : -1].sum(0)
                p, logs = p / p.sum(), torch.stack([scores[n] for n in compared]).log_softmax(0)
                total = total + (torch.xlogy(p, p) - p * logs).sum()
    return out, total, count


@pytest.mark.parametrize("sparse_loss", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("number", "chunk", "recompute"),
    [
        *((number, chunk, None) for number, chunk in ((0, 1), (1, 1), (1, 900), (1, 2**25), (2, 900))),
        *((1, 900, part) for part in ("core_attn", "mla_up_proj")),
    ],
)
def test_gradients_are_those_of_the_literal_form(
    number: int, chunk: int, packed: bool, sparse_loss: bool, recompute: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows alone (layer 0), selected keys of two windows (1), all keys of 3 tokens (2)."""
    monkeypatch.setattr(compressed_attention, "CHUNK", chunk)
    options: dict[str, Any] = {"dsa_indexer_loss_coeff": COEFF, "dsa_indexer_use_sparse_loss": sparse_loss}
    if recompute:
        options |= {"recompute_granularity": "selective", "recompute_modules": (recompute,)}
    layer, x, context = layer_and_context(with_fields(COMPRESSED, options), packed, number)
    expected, loss, count = literal(layer, x, context, sparse_loss)
    check_layer(layer, x, context, expected, loss, count)


KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("length", [3, 23])
def test_layer_of_deepseek_v4(number: int, length: int) -> None:
    """Output and every gradient of a layer of transformers with the same weights, in fp64 throughout. Its indexer has
    no gradient."""
    pytest.importorskip("transformers")
    hf_exact = pytest.importorskip("tests.extensions.hugging_face.hf_exact", reason="hugging_face is deleted")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    layer, _, _ = layer_and_context(with_fields(COMPRESSED, {"dsa_indexer_n_heads": 16}), False, number)
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": HEADS,
        "head_dim": 10,
        "q_lora_rank": 12,
        "sliding_window": WINDOW,
    }
    index = {"index_n_heads": 16, "index_head_dim": 6, "index_topk": TOPK, "o_groups": GROUPS, "o_lora_rank": 5}
    config = theirs.DeepseekV4Config(
        num_hidden_layers=3,
        layer_types=[*KINDS],
        compress_rates=dict(zip(KINDS[1:], (4, 3), strict=True)),
        compress_rope_theta=BASE,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        partial_rotary_factor=ROTARY / 10,
        rms_norm_eps=layer.eps,
        **sizes,
        **index,
    )
    config._attn_implementation = "eager"
    x = torch.randn(length, 2, 32, dtype=torch.float64, requires_grad=True)
    places = torch.arange(length)
    distances = places[:, None] - places
    mask = torch.zeros(length, length).double().masked_fill((distances < 0) | (distances >= WINDOW), -torch.inf)
    with hf_exact.fp64():
        attention = theirs.DeepseekV4Attention(config, number)
        rotary = theirs.DeepseekV4RotaryEmbedding(config)
        ids = places.expand(2, -1)
        tables = {kind: rotary(x.transpose(0, 1), ids, layer_type=kind) for kind in ("main", "compress")}
        named = of_theirs(layer)
        assert named.keys() == dict(attention.named_parameters()).keys()
        operands = {"position_embeddings": tables, "position_ids": ids, "attention_mask": mask.expand(2, 1, -1, -1)}
        expected, _ = torch.func.functional_call(attention, named, (x.transpose(0, 1),), operands)
    table = RotaryEmbedding(COMPRESSED, torch.device("cpu"), torch.float64, layer.rotation)
    table.frequencies = getattr(rotary, f"{'compress' if number else 'main'}_inv_freq")
    context = replace(
        BatchContext.of(Batch.of_tokens(torch.zeros(2, length).long())), rotary={layer.rotation: table(places)}
    )
    found, expected = layer(x, context), expected.transpose(0, 1)
    assert (found - expected).norm() < 1e-9 * expected.norm()
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    inputs = [x, *(parameter for name, parameter in layer.named_parameters() if "indexer" not in name)]
    pairs = (torch.autograd.grad((y * weights).sum(), inputs, allow_unused=True) for y in (found, expected))
    for one, two in zip(*pairs, strict=True):
        if one is None or not one.any():  # of compressors where the text is too short
            assert two is None or not two.any()
        else:
            assert (one - two).norm() < 1e-9 * two.norm()


def of_theirs(layer: Any) -> dict[str, Tensor]:
    """Weights of a layer by the names of transformers."""

    def compressor(ours: Any, name: str) -> dict[str, Tensor]:
        return {
            f"{name}.kv_proj.weight": ours.linear_wkv.weight,
            f"{name}.gate_proj.weight": ours.linear_wgate.weight,
            f"{name}.position_bias": ours.ape,
            f"{name}.kv_norm.weight": ours.norm.weight,
        }

    found = {
        "q_a_proj.weight": layer.linear_q_down.weight,
        "q_a_norm.weight": layer.q_layernorm.weight,
        "q_b_proj.weight": layer.linear_q.weight.flatten(0, 1),
        "kv_proj.weight": layer.linear_kv.weight,
        "kv_norm.weight": layer.kv_layernorm.weight,
        "o_a_proj.weight": layer.core.linear_o_group_proj.flatten(0, 1),
        "o_b_proj.weight": layer.linear_proj.weight,
        "sinks": layer.core.softmax_offset,
    }
    if layer.compressor is not None:
        found |= compressor(layer.compressor, "compressor")
    if layer.indexer is not None:
        found |= compressor(layer.indexer.compressor, "compressor.indexer")
        found["compressor.indexer.q_b_proj.weight"] = layer.indexer.linear_wq_b.weight
        found["compressor.indexer.scorer.weights_proj.weight"] = layer.indexer.linear_weights_proj.weight
    return found


def test_half_precision_follows_single() -> None:
    check_half_precision(COMPRESSED)


def test_memory_grows_linearly_with_the_sequence() -> None:
    """Kept are operands, outputs, selected keys and gradients of the index."""
    assert kept_in_bf16(replace(COMPRESSED, seq_length=96)) <= 2 * kept_in_bf16(replace(COMPRESSED, seq_length=48))


def test_modules_of_further_tokens_have_ratios_of_their_own() -> None:
    config = with_fields(COMPRESSED, {"mtp_num_layers": 1})
    rotations = [kind.rotation for kind in (*config.layers, *config.mtp_layers)]
    assert [rotation.base for rotation in rotations if rotation] == [10000.0, BASE, BASE, BASE, BASE]
    config = with_fields(config, {"csa_compress_ratios": "[0,4,3,4,0]"})
    (last,) = config.mtp_layers
    assert last.rotation == config.layers[0].rotation and not last.rotation.scaled
