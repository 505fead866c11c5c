"""Compare the memory that the output layer and the loss need for all tokens at once and for chunks of tokens. The tool
prints the memory planned for a GPU, the memory planned for a CPU, and the memory measured on this CPU.

    python tools/bench/head_memory.py
    python tools/bench/head_memory.py --vocab 131072 --tokens 2048 --chunks 0 512 128

For each figure, a separate process builds the output layer and measures the peak growth of its resident memory in one
forward and one backward pass. Weights and weight gradients are allocated beforehand. MALLOC_MMAP_THRESHOLD_ is set so
that freed memory returns to the system immediately. The figures therefore exclude memory that an allocator would keep
in reserve.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.side_by_side import bench_parser, positive, write_json

if TYPE_CHECKING:
    from megatron.training.config.run_config import RunConfig

MIB = 2**20
WIDTH = 512


@dataclass(frozen=True)
class Row:
    """Peak memory of a forward and a backward pass in bytes, excluding weights and weight gradients."""

    vocab: int
    chunk: int
    """Number of tokens in a chunk; 0 if all tokens are processed at once."""

    planned_gpu: int
    planned: int
    measured: int

    def __str__(self) -> str:
        sizes = (f"{size / MIB:>13,.1f}" for size in (self.planned_gpu, self.planned, self.measured))
        return f"{self.vocab:>10,}{self.chunk or 'all':>8}{''.join(sizes)}"


def config_of(vocab: int, tokens: int, chunk: int, precision: str) -> RunConfig:
    """Return the configuration of a model whose last stage contains only the output layer. The batch consists of one
    sample with `tokens` tokens."""
    from megatron.training.config.arguments import parse_args
    from megatron.training.config.validation import resolve_legal

    flags = (
        f"--num-layers 1 --hidden-size {WIDTH} --num-attention-heads 8 --seq-length {tokens} --vocab-size {vocab} "
        "--untie-embeddings-and-output-weights --normalization RMSNorm --swiglu --disable-bias-linear --mock-data "
        "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --train-iters 1 "
        f"--micro-batch-size 1 --global-batch-size 1 --cpu --{precision} --no-compile --loss-chunk-tokens {chunk}"
    )
    return resolve_legal(parse_args(flags.split()), 1)


def planned(config: RunConfig, device: str) -> int:
    from dataclasses import replace

    from megatron.core.pipeline_parallel.layout import Stage
    from megatron.extensions.plan.planner.activations import ActivationPlan
    from megatron.extensions.plan.planner.micro_batch import MicroBatch

    batch = replace(MicroBatch.of(config), device=device)
    stage = ActivationPlan(batch).stage(Stage([], first=False, last=True))
    return max(stage.forward, stage.backward)


def measured(config: RunConfig) -> int:
    """Return the peak growth, in bytes, of this process's resident memory during a forward and backward pass."""
    from dataclasses import replace

    import torch

    from megatron.core.batch import Batch
    from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
    from megatron.core.pipeline_parallel.layout import Stage

    stage = Stage([], first=False, last=True)
    model = GPTModel(config.model, config.parallel, None, stage, weights=WeightSetup("cpu", initialize=False)).train()
    main = getattr(torch, config.parallel.main_dtype)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
        parameter.main_grad = torch.ones(parameter.shape, dtype=main)  # type: ignore[attr-defined]
    tokens = torch.zeros(1, config.model.seq_length, dtype=torch.int64)
    batch = replace(Batch.of_tokens(tokens), aux_scale=torch.ones((), dtype=torch.float64))
    dtype = getattr(torch, config.parallel.params_dtype)
    few = torch.randn(8, 1, WIDTH).to(dtype).requires_grad_()
    small = replace(Batch.of_tokens(tokens[:, :8]), aux_scale=batch.aux_scale)
    model(few, small).backward()  # warm-up: libraries allocate their buffers in the first pass
    hidden = torch.randn(config.model.seq_length, 1, WIDTH).to(dtype).requires_grad_()
    Path("/proc/self/clear_refs").write_text("5")  # Reset the peak resident memory that Linux records.
    before = status("VmRSS")
    model(hidden, batch).backward()
    return status("VmHWM") - before


def status(name: str) -> int:
    """Return the value of the /proc/self/status entry `name`, such as "VmRSS", in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--vocab", nargs="+", type=positive, default=[32768, 131072, 262144])
    add("--tokens", type=positive, default=1024)
    add("--chunks", nargs="+", type=int, default=[0, 256, 64], help="tokens per chunk; 0 for all at once")
    add("--precision", choices=("bf16", "fp32"), default="bf16")
    add(
        "--only-measure",
        action="store_true",
        help="measure only the first --vocab with the first --chunks, and print the bytes",
    )
    args = parser.parse_args(argv)
    if args.only_measure:
        print(measured(config_of(args.vocab[0], args.tokens, args.chunks[0], args.precision)))
        return 0
    print(f"{'vocabulary':>10}{'chunk':>8}{'planned, GPU':>13}{'CPU':>13}{'measured':>13}  MiB")
    rows = []
    for vocab in args.vocab:
        for chunk in args.chunks:
            config = config_of(vocab, args.tokens, chunk, args.precision)
            words = ["--vocab", vocab, "--tokens", args.tokens, "--chunks", chunk, "--precision", args.precision]
            own = [sys.executable, __file__, "--only-measure", *map(str, words)]
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(own, env=environment, capture_output=True, text=True, check=True)
            rows.append(Row(vocab, chunk, planned(config, "cuda"), planned(config, "cpu"), int(done.stdout)))
            print(rows[-1], flush=True)
    write_json(args.json, {"tokens": args.tokens, "precision": args.precision}, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
