"""Tests that compare compressed attention with a plain implementation. The tests also cover the loss of the indexer and
the memory use. The tests in tests/extensions/hugging_face compare logits and gradients with those of DeepSeek-V4."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.batch import BatchContext
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.rotary import apply_rotary_interleaved
from megatron.extensions.attention.latent_attention.flags import LatentAttentionFlags
from megatron.extensions.attention.sparse_attention import compressed_attention
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import with_fields
from megatron.training.config.validation import resolve
from tests.extensions.planner.test_planned_activations import kept_in_bf16
from tests.extensions.sparse_attention.test_sparse_attention import COEFF, check_layer, layer_and_context
from tests.gpt_cases import FP64, model_of
from tests.tiny import TINY

COMPRESSED = model_of("compressed")
HEADS, GROUPS, ROTARY, WINDOW, TOPK, BASE = 8, 4, 4, 3, 2, 500.0


def rotated(x: Tensor, tables: tuple[Tensor, Tensor], back: bool = False) -> Tensor:
    """Return x [..., d] with its last channels rotated at each position by the angles in `tables`."""
    cos, sin = tables
    turned = apply_rotary_interleaved(x[..., -ROTARY:], cos, -sin if back else sin)
    return torch.cat((x[..., :-ROTARY], turned), dim=-1)


def literal_keys(compressor: Any, x: Tensor, start: int, stop: int, tables: Any) -> tuple[list[Tensor], list[int]]:
    """Return the compressed keys of tokens `start` to `stop` of a text x [s, h], and the last token that contributes to
    each key."""
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
    """Compute a layer token by token for x [s, b, h]. Return the output, the sum of the indexer's KL divergences, and
    the number of these divergences."""
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
                index_q = q_latent.detach() @ layer.indexer.linear_wq_b.weight.t()
                index_q = rotated(index_q.unflatten(-1, (layer.indexer.heads, -1)), (cos[:, None], sin[:, None]))
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


CASES = [
    *((number, chunk, None) for number, chunk in ((0, 1), (1, 1), (1, 900), (1, 2**25), (2, 900))),
    *((1, 900, part) for part in ("core_attn", "mla_up_proj")),
]


@pytest.mark.parametrize("sparse_loss", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("number", "chunk", "recompute"), CASES)
def test_gradients_match_the_literal_form(
    number: int, chunk: int, packed: bool, sparse_loss: bool, recompute: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 0 has only window attention. The queries of layer 1 also attend to selected compressed keys, each of which
    combines two groups of tokens. The queries of layer 2 also attend to all compressed keys, each of which combines 3
    tokens."""
    monkeypatch.setattr(compressed_attention, "CHUNK", chunk)
    options: dict[str, Any] = {"dsa_indexer_loss_coeff": COEFF, "dsa_indexer_use_sparse_loss": sparse_loss}
    if recompute:
        options |= {"recompute_granularity": "selective", "recompute_modules": (recompute,)}
    layer, x, context = layer_and_context(with_fields(COMPRESSED, options), packed, number)
    expected, loss, count = literal(layer, x, context, sparse_loss)
    check_layer(layer, x, context, expected, loss, count)


def test_memory_grows_linearly_with_the_sequence() -> None:
    """Layers save their operands and outputs, the selected keys, and the gradients of the indexer."""
    assert kept_in_bf16(replace(COMPRESSED, seq_length=96)) <= 2 * kept_in_bf16(replace(COMPRESSED, seq_length=48))


def test_multi_token_modules_have_their_own_ratios() -> None:
    config = with_fields(COMPRESSED, {"mtp_num_layers": 1})
    rotations = [kind.rotation for kind in (*config.layers, *config.mtp_layers)]
    assert [rotation.base for rotation in rotations if rotation] == [10000.0, BASE, BASE, BASE, BASE]
    config = with_fields(config, {"csa_compress_ratios": "[0,4,3,4,0]"})
    (last,) = config.mtp_layers
    assert last.rotation == config.layers[0].rotation and not last.rotation.scaled


@pytest.mark.parametrize(("flags", "expected"), [("", 64), ("--v-head-dim 512", 448), ("--qk-head-dim 100", 100)])
def test_channels_without_rotation_follow_from_value_channels(flags: str, expected: int) -> None:
    """In compressed attention, each key also serves as the value. Unless a flag sets `qk_head_dim`, the number of
    channels without rotation therefore follows from the number of value channels."""
    variant = "--multi-latent-attention --experimental-attention-variant dsv4_hybrid --csa-compress-ratios [4]*4"
    config = resolve(parse_args(f"{TINY} {variant} {flags}".split()), 1)
    assert config.options(LatentAttentionFlags).qk_head_dim == expected


def test_sinks_start_at_zero() -> None:
    model = GPTModel(COMPRESSED, FP64)
    sinks = [p for name, (p, _) in model.named_metas().items() if name.endswith("softmax_offset")]
    assert len(sinks) == COMPRESSED.num_layers and not any(p.any() for p in sinks)
