"""Compare the speed of this program's token-mixing layers with those of transformers. The benchmark times forward and
backward passes of models with few layers. The timed rounds of the two programs are interleaved.

    python research/mixers.py                                # all, one sample of 2,048 tokens in float32
    python research/mixers.py --only mamba2 --compile --rounds 7
    python research/mixers.py --only deepseek_v32 --seq-length 8192

The models have a small vocabulary so that the layers take most of the time. This program's model is built from the
configuration of the transformers model. The row "products" shows the time of the GEMMs alone in this program's forward
and backward passes, with the same operand shapes and strides.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # Remove this folder from the path, because its module names clash with those of other packages.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tools.bench.side_by_side import (
    Contestant,
    Round,
    bench_parser,
    compared,
    interleaved,
    machine,
    positive,
    say_rows,
    timed,
    write_json,
)

SIZES = {"vocab_size": 1024, "num_hidden_layers": 2, "tie_word_embeddings": False}
DELTA = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
LATENTS = {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {"hidden_size": 1024, "num_heads": 32, "head_dim": 64, "state_size": 128, "n_groups": 8},
    "nemotron_h": {
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4},
        **{"head_dim": 64, "mamba_num_heads": 32, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8},
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"],
    },
    "qwen3_5_text": {
        **{"hidden_size": 1024, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"head_dim": 128, "layer_types": ["linear_attention", "full_attention"], **DELTA},
    },
    "lfm2": {
        **{"hidden_size": 1024, "intermediate_size": 1536, "num_attention_heads": 16, "num_key_value_heads": 4},
        "layer_types": ["conv", "conv"],
    },
    "minimax": {
        **{"hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 4},
        **{"head_dim": 64, "num_local_experts": 2, "num_experts_per_tok": 1},
        "layer_types": ["linear_attention", "linear_attention"],
    },
    "deepseek_v32": {
        **{"hidden_size": 1024, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8},
        **{"first_k_dense_replace": 2, "index_n_heads": 4, "index_head_dim": 64, "index_topk": 512, **LATENTS},
    },
}
"""Model sizes, keyed by Hugging Face family."""


def step_of(model: Any, loss_of: Any) -> Any:
    def step() -> None:
        loss_of().backward()
        model.zero_grad(set_to_none=True)

    return step


def threads() -> None:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)


def stated(family: str) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(family, **{**SIZES, **MODELS[family]})


def own_step(family: str, seq: int, compiled: bool) -> Any:
    import torch

    from megatron.core.batch import Batch
    from megatron.core.config.parallel import ModelParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.extensions import load
    from megatron.extensions.interop.hugging_face.read_config import config_from_hf

    load()
    model = GPTModel(config_from_hf(stated(family).to_dict()), ModelParallelConfig(fp32=True, compile=compiled)).train()
    text = torch.randint(SIZES["vocab_size"], (1, seq + 1))
    batch = Batch(text[:, :-1], text[:, 1:], torch.ones(1, seq), torch.arange(1))
    return step_of(model, lambda: model(None, batch) / seq)


def ours(family: str, seq: int, compiled: bool) -> Round:
    threads()
    return timed(own_step(family, seq, compiled), 1, seq)


def theirs(family: str, seq: int, compiled: bool) -> Round:
    import torch
    import transformers

    threads()
    model = transformers.AutoModelForCausalLM.from_config(stated(family), dtype=torch.float32).train()
    run = torch.compile(model) if compiled else model
    text = torch.randint(SIZES["vocab_size"], (1, seq))
    return timed(step_of(model, lambda: run(text, labels=text, use_cache=False).loss), 1, seq)


def products(family: str, seq: int, compiled: bool) -> Round:
    import torch

    from megatron.core.torch_private import TorchDispatchMode

    threads()
    aten, calls = torch.ops.aten, []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm):
                calls.append((func, [(x.shape, x.stride(), x.dtype) for x in args if isinstance(x, torch.Tensor)]))
            return func(*args, **(kwargs or {}))

    step = own_step(family, seq, False)
    with Products():
        step()
    shapes = dict.fromkeys(key for _, keys in calls for key in keys)
    operands = {key: torch.empty_strided(key[0], key[1], dtype=key[2]).normal_() for key in shapes}
    return timed(lambda: [func(*(operands[key] for key in keys)) for func, keys in calls], 1, seq)


KINDS = {"ours": ours, "transformers": theirs, "products": products}


def beside(name: str) -> Iterator[str]:
    yield from KINDS if name == "ours" else ()


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, 5, seq_length=(2048, "tokens of a sample"))
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="of a contestant (default: all cores)")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="these families")
    parser.add_argument(
        "--compile", action="store_true", help="compile this program's regions and whole transformers models"
    )
    args = parser.parse_args(argv)
    facts, rows = machine("transformers") | {"threads": args.threads}, []
    for family in args.only:
        given = (family, args.seq_length, args.compile)
        members = [Contestant(name, build, given, args.threads) for name, build in KINDS.items()]
        found = compared(interleaved(members, args.rounds), beside)
        say_rows(found, f"{family:<14}")
        rows += [{"family": family, **asdict(row)} for row in found]
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
