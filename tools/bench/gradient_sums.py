"""Distance that sums of gradients in bf16 lead the weights away from sums in fp32, rounded at random and to nearest.

    OMP_NUM_THREADS=1 python tools/bench/gradient_sums.py            # 200 iterations of 32 micro-batches
    OMP_NUM_THREADS=1 python tools/bench/gradient_sums.py --iterations 20 --json FILE

The same model, samples and initial weights three times, in one process. The distance is that of all main parameters,
|w - w_fp32|, divided by the way that training in fp32 sums has gone, |w_fp32 - w_0|.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from megatron.core.tensor_parallel import weight_grad
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from tools.bench.side_by_side import machine, own_run, positive, write_figures

MODEL = (
    "--cpu --bf16 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 256 --swiglu "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --lr 1e-3 --lr-decay-style constant --adam-beta2 0.95 --mock-data "
    "--num-workers 0 --eval-iters 0 --use-precision-aware-optimizer"
)
SUMS = {"fp32": "", "bf16, rounded at random": "bf16", "bf16, rounded to nearest": "bf16"}


def to_nearest(key: Tensor, salt: int) -> Tensor:
    return torch.full(key.shape, 0.5)


def trained(dtype: str, nearest: bool, iterations: int, microbatches: int) -> tuple[Tensor, Tensor, float]:
    """(initial main parameters, those after training, last loss)"""
    from megatron.training.progress import Interval
    from megatron.training.train_step import train_step

    flags = f"{MODEL} --global-batch-size {microbatches} --train-iters {iterations}".split()
    run = own_run([*flags, *(["--main-grads-dtype", dtype] if dtype else [])])

    def weights() -> Tensor:
        return torch.cat([shard.read_main(0, shard.numel) for shard in run.optimizer.shards])

    before = weights()
    with ExitStack() as resources:
        if nearest:
            resources.enter_context(mock.patch.object(weight_grad, "uniform_of", to_nearest))
        for _ in range(iterations):
            interval = run.interval = Interval()
            train_step(run)
    loss, tokens = interval.losses[-1][:2].tolist()
    return before, weights(), loss / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=positive, default=200)
    parser.add_argument("--microbatches", type=positive, default=32)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    resolve_legal(parse_args(f"{MODEL} --train-iters 1".split()), 1)
    print(json.dumps(head := machine()))
    print("| sums of gradients | distance from fp32 | last loss |\n|---|---|---|")
    found, reference, way = {}, torch.empty(0), 1.0
    for name, dtype in SUMS.items():
        before, after, loss = trained(dtype, name.endswith("nearest"), options.iterations, options.microbatches)
        if not dtype:
            reference, way = after, (after - before).norm().item()
        found[name] = {"distance": (after - reference).norm().item() / way, "loss": loss}
        print(f"| {name} | {found[name]['distance']:.4f} | {loss:.4f} |", flush=True)
    write_figures(options.json, {"machine": head, "model": MODEL, "runs": found})


if __name__ == "__main__":
    main()
