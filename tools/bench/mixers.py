"""Time of multi-latent attention and of gated delta nets beside transformers' own of the same shape: forward and
backward of one layer on CPU, in turns, in processor time: what other work on the machine takes does not count.

    python tools/bench/mixers.py                                        # fp32 and bf16, one thread
    python tools/bench/mixers.py --mixers latent --precisions bf16 --length 1024 --rounds 9

Shapes are those of DeepSeek-V3 and Qwen3-Next with an eighth of their width and heads. A layer is norm, mixer, norm and
dense MLP; "mixer" is the mixer alone. transformers' attention is its sdpa, and its delta rule that in torch, as ours.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.side_by_side import Contestant, Round, Spread, interleaved, machine, positive, say_machine, write_json

HIDDEN, MLP, EPSILON = 512, 1408, 1e-6
LATENT = {"heads": 16, "q_rank": 192, "kv_rank": 64, "key": 128, "rotary": 64, "value": 128}
DELTA = {"keys": 2, "values": 4, "key": 128, "value": 128, "taps": 4}
MIXERS, PARTS, WHOSE = ("latent", "delta net"), ("mixer", "layer"), ("ours", "transformers")
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def measured(whose: str, mixer: str, part: str, precision: str, length: int, samples: int) -> Round:
    """Forward and backward passes per second of processor time."""
    import torch

    dtype, generator = getattr(torch, PRECISIONS[precision]), torch.Generator().manual_seed(1)
    x = torch.randn(length, samples, HIDDEN, generator=generator).to(dtype)
    if whose == "transformers":
        x = x.transpose(0, 1).contiguous()
    module, call = (_ours if whose == "ours" else _theirs)(mixer, part, precision, length, samples)
    x.requires_grad_()

    def one_round() -> float:
        module.zero_grad(set_to_none=True)
        x.grad = None
        began = time.process_time()
        out = call(x)
        out.backward(torch.ones_like(out))
        return 1 / (time.process_time() - began)

    return one_round


def _ours(mixer: str, part: str, precision: str, length: int, samples: int) -> tuple[Any, Callable[..., Any]]:
    """The layer's module, and a function of [s, b, h]."""
    import torch

    from megatron.core.batch import Batch, BatchContext
    from megatron.core.config.model import TransformerConfig
    from megatron.core.config.parallel import ModelParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training.config.flags import with_fields

    fields: dict[str, Any]
    if mixer == "latent":
        fields = {
            "num_attention_heads": LATENT["heads"],
            "multi_latent_attention": True,
            "q_lora_rank": LATENT["q_rank"],
            "kv_lora_rank": LATENT["kv_rank"],
            "qk_head_dim": LATENT["key"],
            "qk_pos_emb_head_dim": LATENT["rotary"],
            "v_head_dim": LATENT["value"],
            "qk_layernorm": True,
            "rope_type": "rope",
        }
    else:
        fields = {
            "num_attention_heads": 8,
            "experimental_attention_variant": "gated_delta_net",
            "linear_num_key_heads": DELTA["keys"],
            "linear_num_value_heads": DELTA["values"],
            "linear_key_head_dim": DELTA["key"],
            "linear_value_head_dim": DELTA["value"],
            "linear_conv_kernel_dim": DELTA["taps"],
        }
    shape = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=MLP,
        seq_length=length,
        vocab_size=8,
        position_embedding_type="rope",
        normalization="RMSNorm",
        norm_epsilon=EPSILON,
        swiglu=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    config = with_fields(shape, fields)
    stage = GPTModel(config, ModelParallelConfig(**{precision: True}), first=False, last=False).train()
    tokens = torch.zeros(samples, length, dtype=torch.int64)
    context = stage.decoder._complete(BatchContext.of(Batch.of_tokens(tokens)), tokens.t())
    module = stage.decoder.layers[0]
    if part == "mixer":
        module = module.self_attention
    return module, lambda x: module(x, context)


def _theirs(mixer: str, part: str, precision: str, length: int, samples: int) -> tuple[Any, Callable[..., Any]]:
    """The layer's module, and a function of [b, s, h]."""
    import torch

    shared = {
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "rms_norm_eps": EPSILON,
        "max_position_embeddings": length,
    }
    torch.manual_seed(1)
    if mixer == "latent":
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
        from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

        config: Any = DeepseekV3Config(
            **shared,
            num_attention_heads=LATENT["heads"],
            num_key_value_heads=LATENT["heads"],
            q_lora_rank=LATENT["q_rank"],
            kv_lora_rank=LATENT["kv_rank"],
            qk_nope_head_dim=LATENT["key"],
            qk_rope_head_dim=LATENT["rotary"],
            v_head_dim=LATENT["value"],
            first_k_dense_replace=1,
        )
        config._attn_implementation = "sdpa"
        layer: Any = deepseek.DeepseekV3DecoderLayer(config, 0)
        table: Any = deepseek.DeepseekV3RotaryEmbedding(config)
    else:
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen
        from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

        config = Qwen3NextConfig(
            **shared,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=HIDDEN // 8,
            linear_num_key_heads=DELTA["keys"],
            linear_num_value_heads=DELTA["values"],
            linear_key_head_dim=DELTA["key"],
            linear_value_head_dim=DELTA["value"],
            linear_conv_kernel_dim=DELTA["taps"],
            layer_types=["linear_attention"],
            mlp_only_layers=[0],
        )
        layer, table = qwen.Qwen3NextDecoderLayer(config, 0), qwen.Qwen3NextRotaryEmbedding(config)
    dtype = getattr(torch, PRECISIONS[precision])
    layer = layer.to(dtype).train()
    tables = table(torch.zeros(1, dtype=dtype), torch.arange(length)[None])
    of_layer = {"position_embeddings": tables, "attention_mask": None}
    if part == "layer":
        return layer, lambda x: _first(layer(x, **of_layer))
    module = layer.self_attn if mixer == "latent" else layer.linear_attn
    given = of_layer if mixer == "latent" else {}
    return module, lambda x: _first(module(x, **given))


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


@dataclass(frozen=True)
class Row:
    mixer: str
    part: str
    precision: str
    ours: Spread
    transformers: Spread
    """Milliseconds of processor time of a forward and a backward pass."""

    @property
    def ratio(self) -> float:
        """How many times as fast ours is."""
        return self.transformers.median / self.ours.median


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=MIXERS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--length", type=positive, default=512, help="tokens of a sample")
    parser.add_argument("--samples", type=positive, default=2)
    parser.add_argument("--threads", type=positive, default=1, help="of each process")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    facts = machine() | {"threads": args.threads, "length": args.length, "samples": args.samples}
    say_machine(facts)
    rows = []
    for mixer, part, precision in product(args.mixers, args.parts, args.precisions):
        given = mixer, part, precision, args.length, args.samples
        found = interleaved([Contestant(who, measured, (who, *given), args.threads) for who in WHOSE], args.rounds)
        spreads = []
        for who in WHOSE:
            values = found[who]
            if isinstance(values, str):
                raise ValueError(f"{who}: {values}")
            spreads.append(Spread.of([1e3 / value for value in values]))
        rows.append(row := Row(mixer, part, precision, *spreads))
        print(
            f"{mixer:<10} {part:<6} {precision}  ours {row.ours:7.1f} ms   transformers {row.transformers:7.1f} ms   "
            f"{row.ratio:5.2f} x as fast",
            flush=True,
        )
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
