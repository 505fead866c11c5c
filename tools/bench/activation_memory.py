"""Bytes that one transformer layer keeps for its backward, measured, beside the published formulas.

    python tools/bench/activation_memory.py --hidden-size 1024 --num-attention-heads 16 --seq-length 1024

The formulas are those of arXiv 2205.05198, table 2: 16-bit activations, dropout on, an MLP of width 4h with GeLU, an
attention that keeps its scores. Measured is the memory that is still there after a forward pass of two layers less
that after one, with nothing held but the output: what autograd keeps. Where no saved tensor is packed twice, the
sizes that saved-tensor hooks see must add up to the same. TP 2 runs on two ranks of a gloo world.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.model_math import activation_bytes_per_layer
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState, initialize_model_parallel
from megatron.testing.local_world import run_world
from tools.bench.live_memory import LiveMemory

LAYOUTS = {"TP1": (1, False), "TP2": (2, False), "TP2+SP": (2, True)}
"""Name -> (tensor parallel size, sequence parallel)."""

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full"},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "mlp_act": {"recompute_granularity": "selective", "recompute_modules": ("mlp_act",)},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "all modules": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
}
HOOKED = ("none", "selective", "full")
"""Where no hooks are nested: of nested ones only the inner see a tensor."""

REASONS = """\
Reasons for the differences
  none       The formula's attention keeps scores, their softmax and its dropout mask, 5as/h. Ours computes them again
             from q, k, v and one fp32 number per head and query, with dropout too: 4a/h, and nothing of size s x s.
  selective  So core_attn has only those numbers left to drop; the formula drops all of 5as/h.
  full       The input of the layer alone, as in the formula; under SP a rank's part of it, where the formula has all.
  all        Both norms keep mean and 1/deviation of each token as well: 8 bytes a token on CPU, 16 on CUDA.
  layernorm  Not in the formulas. Drops the norms' outputs, 4sbh (under TP each rank has them whole, under SP its part).
  mlp_act    Not in the formulas. Drops the activation function's output, 8sbh/t.
  mlp        Not in the formulas. Drops both, input and output of the activation function, 16sbh/t."""


@dataclass(frozen=True)
class Measurement:
    """Bytes that a layer keeps: as memory that is left, and as sizes that hooks saw."""

    left: int
    hooked: int


def kept_by(
    model: nn.Module, config: TransformerConfig, samples: int, rows: int, device: torch.device, dtype: torch.dtype
) -> Measurement:
    """What a stage without embedding and head keeps of a forward pass over `rows` tokens of each sample."""
    x = torch.randn(rows, samples, config.hidden_size, dtype=dtype, device=device, requires_grad=True)
    batch = Batch.of_tokens(torch.zeros(samples, config.seq_length, dtype=torch.int64, device=device))
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    hooked: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        hooked[saved.untyped_storage()._cdata] = saved.untyped_storage().nbytes()
        return saved

    with LiveMemory() as live, saved_tensors_hooks(pack, lambda saved: saved):
        y = model(x, batch)
    output = y.untyped_storage()._cdata
    live.settle()
    left = sum(size for key, size in live.sizes.items() if key not in own and key != output)
    return Measurement(left, sum(size for key, size in hooked.items() if key not in own))


def measure(
    config: TransformerConfig,
    samples: int,
    tp: int,
    sequence_parallel: bool,
    state: ParallelState,
    device: torch.device,
) -> Measurement:
    """Bytes that one layer keeps on this rank: two layers' less one's."""
    # Not compiled, on GPUs either: the memory of compiled regions is not seen.
    parallel = ModelParallelConfig(
        tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel, bf16=True, compile=False
    )
    rows = config.seq_length // tp if sequence_parallel else config.seq_length
    found = []
    for layers in (1, 2):
        model = GPTModel(config, parallel, state, layers=range(layers), first=False, last=False, device=device)
        found.append(kept_by(model.train(), config, samples, rows, device, torch.bfloat16))
    one, two = found
    return Measurement(two.left - one.left, two.hooked - one.hooked)


def measure_all(
    rank: int, world_size: int, config: TransformerConfig, samples: int, sequence_parallel: bool, device: str
) -> dict[str, Measurement]:
    """By way of recomputation, on one rank of a world that is all tensor parallel."""
    state = initialize_model_parallel(world_size) if world_size > 1 else ParallelState()
    return {
        name: measure(replace(config, **more), samples, world_size, sequence_parallel, state, torch.device(device))
        for name, more in RECOMPUTE.items()
    }


def table(
    config: TransformerConfig, samples: int, device: str = "cpu"
) -> dict[tuple[str, str], tuple[Measurement, float]]:
    """(layout, recomputation) -> what is measured, and the formula's bytes."""
    found = {}
    for layout, (tp, sequence_parallel) in LAYOUTS.items():
        if tp == 1:
            measured = measure_all(0, 1, config, samples, sequence_parallel, device)
        elif device == "cpu":
            measured = run_world(tp, measure_all, config, samples, sequence_parallel, device)[0]
        else:
            continue
        for name, measurement in measured.items():
            formula = activation_bytes_per_layer(config, samples, tp, sequence_parallel, formula_of(name))
            found[layout, name] = measurement, formula
    return found


def formula_of(name: str) -> str | None:
    """Which of the formulas to put beside a way of recomputation."""
    return {"none": None, "full": "full"}.get(name, "selective")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure what a layer keeps for its backward.")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--num-attention-heads", type=int, default=16)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for TP1 on a GPU")
    args = parser.parse_args(argv)
    if args.hidden_size % args.num_attention_heads or args.num_attention_heads % 2 or args.seq_length % 2:
        parser.error("--hidden-size must be a multiple of --num-attention-heads; that and --seq-length must be even")
    config = TransformerConfig(
        num_layers=2,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        seq_length=args.seq_length,
        vocab_size=128,
    )
    s, b, h, a = args.seq_length, args.micro_batch_size, args.hidden_size, args.num_attention_heads
    sbh = s * b * h
    print(f"s {s}, b {b}, h {h}, a {a}, bf16, dropout 0.1")
    print(f"bytes that a layer keeps, in units of sbh = {sbh:,}; 5as/h = {5 * a * s / h:g}, 4a/h = {4 * a / h:g}")
    print(f"{'layout':<8}{'recompute':<13}{'measured':>10}{'hooks':>10}{'formula':>10}{'ratio':>8}")
    for (layout, name), (found, formula) in table(config, args.micro_batch_size, args.device).items():
        hooked = f"{found.hooked / sbh:.3f}" if name in HOOKED else "-"
        compared = f"{formula / sbh:>10.3f}{found.left / formula:>8.3f}" if name in HOOKED else f"{'-':>10}{'-':>8}"
        print(f"{layout:<8}{name:<13}{found.left / sbh:>10.3f}{hooked:>10}{compared}")
    print(REASONS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
