"""New tokens per second of processor time: prompts of several lengths batched in one cache, one by one, and batched by
transformers' `generate`, on CPU, in turns.

    python tools/bench/generation.py                                # 16 prompts of 16 to 128 tokens, 32 new tokens each
    python tools/bench/generation.py --prompts 64 --rows 32 --precision bf16 --rounds 9

The model has Llama's layers, with random weights. Decoding is greedy, and every text has all its tokens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.side_by_side import (
    Contestant,
    Round,
    Spread,
    bench_parser,
    interleaved,
    machine,
    positive,
    say_machine,
    write_json,
)

WAYS = ("one by one", "batched", "transformers")
VOCABULARY = 8192


@dataclass(frozen=True)
class Work:
    """The model and what it is asked."""

    layers: int
    hidden: int
    prompts: int
    rows: int
    shortest: int
    longest: int
    new: int
    precision: str

    def tokens(self) -> list[list[int]]:
        """Prompts of lengths from the shortest to the longest, in no order."""
        span, count = self.longest - self.shortest, self.prompts
        lengths = [self.shortest + span * (number * 7 % count) // max(1, count - 1) for number in range(count)]
        return [[(number * 131 + place * 17) % VOCABULARY for place in range(n)] for number, n in enumerate(lengths)]


def ours(work: Work, rows: int) -> Round:
    """New tokens per second with so many texts at once."""
    import torch

    from megatron.core.config.model import TransformerConfig
    from megatron.core.config.parallel import ModelParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.extensions.inference.generation import generate

    config = TransformerConfig(
        num_layers=work.layers,
        hidden_size=work.hidden,
        ffn_hidden_size=4 * work.hidden,
        num_attention_heads=work.hidden // 64,
        seq_length=work.longest + work.new + 1,
        vocab_size=VOCABULARY,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    torch.manual_seed(1)
    model, prompts = GPTModel(config, ModelParallelConfig(**{work.precision: True})).eval(), work.tokens()

    def one_round() -> float:
        began = time.process_time()
        found = generate(model, prompts, work.new, rows=rows)
        return sum(map(len, found)) / (time.process_time() - began)

    return one_round


def theirs(work: Work) -> Round:
    """New tokens per second of transformers, `work.rows` prompts of about one length at once, padded on the left."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=work.hidden,
        intermediate_size=4 * work.hidden,
        num_hidden_layers=work.layers,
        num_attention_heads=work.hidden // 64,
        vocab_size=VOCABULARY,
        max_position_embeddings=work.longest + work.new + 1,
        eos_token_id=None,
        bos_token_id=None,
    )
    dtype: Any = {"fp32": torch.float32, "bf16": torch.bfloat16}[work.precision]
    model, prompts = LlamaForCausalLM(config).to(dtype).eval(), sorted(work.tokens(), key=len)
    batches = [prompts[start : start + work.rows] for start in range(0, len(prompts), work.rows)]

    def one_round() -> float:
        began, count = time.process_time(), 0
        for batch in batches:
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(each)) + each for each in batch])
            mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in batch])
            out = model.generate(ids, attention_mask=mask, max_new_tokens=work.new, do_sample=False, pad_token_id=0)
            count += out[:, width:].numel()
        return count / (time.process_time() - began)

    return one_round


@dataclass(frozen=True)
class Row:
    way: str
    tokens: Spread
    """New tokens per second of processor time."""

    times_one_by_one: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, 5)
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:], help="besides one by one")
    parser.add_argument("--prompts", type=positive, default=16)
    parser.add_argument("--rows", type=positive, default=16, help="texts at once")
    parser.add_argument("--shortest", type=positive, default=16, help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=positive, default=128, help="tokens of the longest prompt")
    parser.add_argument("--new", type=positive, default=32, help="new tokens of each text")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--hidden", type=positive, default=512)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=positive, default=1, help="of each process")
    args = parser.parse_args(argv)
    names = ("layers", "hidden", "prompts", "rows", "shortest", "longest", "new", "precision")
    work = Work(**{name: getattr(args, name) for name in names})
    facts = machine("transformers") | {"threads": args.threads} | asdict(work)
    say_machine(facts)
    builds = {"one by one": (ours, (work, 1)), "batched": (ours, (work, work.rows)), "transformers": (theirs, (work,))}
    ways = [WAYS[0], *args.ways]
    found = interleaved([Contestant(way, *builds[way], args.threads) for way in ways], args.rounds)
    rows: list[Row] = []
    for way in ways:
        values = found[way]
        if isinstance(values, str):
            raise ValueError(f"{way}: {values}")
        spread = Spread.of(values)
        rows.append(Row(way, spread, spread.median / rows[0].tokens.median if rows else 1.0))
        print(f"{way:<12} {spread:8.1f} new tokens/s   {rows[-1].times_one_by_one:5.2f} x one by one", flush=True)
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
