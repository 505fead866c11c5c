"""Kills a run of a reduced DeepSeek-V3 in the middle, resumes it at another layout, and compares it with one process.

    python -m tests.faults.resume_elsewhere                       # 50 iterations, 8 processes
    python -m tests.faults.resume_elsewhere --iterations 12 --ranks 4

The model has what makes DeepSeek-V3 hard to lay out: multi-latent attention, a dense layer in front of layers with
experts, sigmoid scores with a bias, groups of experts, a shared expert and multi-token prediction. At TP2 PP2 EP2 with
zb-v, one rank gets SIGKILL as soon as half of the iterations are logged; the same command with PP1 CP2 then loads the
newest checkpoint and trains to the end. In fp64 every logged loss and gradient norm, and every tensor of the final
checkpoint, must be that of a run on one process to within 1e-9 of its largest value.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.latest_checkpoint import choose_checkpoint
from megatron.core.parallel_state import Axis
from tests.faults.kill_campaign import read_latest
from tests.forked import forked_ranks, join, run_forked
from tests.limits import HANG

MODEL = (
    "--cpu --fp64 --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 16 "
    "--vocab-size 64 --make-vocab-size-divisible-by 8 --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 "
    "--qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5 --qk-layernorm --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --num-experts 8 --moe-layer-freq [0]+[1]*3 --moe-ffn-hidden-size 12 "
    "--moe-shared-expert-intermediate-size 12 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --mtp-num-layers 1 "
    "--mtp-loss-scaling-factor 0.3 --moe-token-dispatcher-type alltoall --mock-data --global-batch-size 4 "
    "--lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2 --clip-grad 1 --log-interval 1 --eval-iters 0 --num-workers 0"
).split()
FIRST = "--tp 2 --sequence-parallel --etp 1 --pp 2 --ep 2 --pipeline-schedule zb-v".split()
SECOND = "--pp 1 --cp 2 --ep 2 --recompute-granularity full --recompute-method uniform".split()
LOGGED = ("lm_loss", "mtp_loss_1", "moe_aux_loss", "grad_norm")
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Outcome:
    killed_at: int
    """Iterations that were logged when the rank was killed."""

    resumed_from: int

    logged: float
    """Largest relative difference of a logged number from that of one process."""

    stored: tuple[str, float]
    """The tensor of the final checkpoint that differs most, relative to its largest value, and by how much."""

    @property
    def equal(self) -> bool:
        return self.logged < TOLERANCE and self.stored[1] < TOLERANCE


def killed_and_resumed(iterations: int, ranks: int, folder: Path) -> Outcome:
    """Raises RuntimeError if a run ends early by itself, TimeoutError if one hangs."""
    save, alone, screen = folder / "save", folder / "one-process", folder / "screen"
    begun, killed = _flags(save, iterations), 0
    with forked_ranks(ranks, [*begun, *FIRST], screen) as processes:
        limit = time.monotonic() + HANG
        while killed < iterations // 2:
            if any(process.exitcode is not None for process in processes) or time.monotonic() > limit:
                raise RuntimeError(f"no {iterations // 2} iterations were logged:\n{screen.read_text()[-4000:]}")
            time.sleep(0.005)
            killed = len(_records(save))
        os.kill(processes[-1].pid, signal.SIGKILL)
        join(processes)
    text = run_forked(ranks, [*begun, *SECOND], screen)
    found = re.search(r"loaded checkpoint of iteration (\d+)", text)
    run_forked(1, _flags(alone, iterations), screen)
    return Outcome(killed, int(found[1]) if found else 0, _logged_difference(save, alone), _stored(save, alone))


def _flags(save: Path, iterations: int) -> list[str]:
    run = f"--train-iters {iterations} --save-interval {max(1, iterations // 5)} --keep-last 2"
    return [*MODEL, *run.split(), "--save", str(save), "--load", str(save)]


def _records(save: Path) -> list[dict[str, float]]:
    path = save / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # what is behind the last end is unfinished
    return [json.loads(line) for line in lines]


def _logged_difference(save: Path, alone: Path) -> float:
    pairs = list(zip(_records(save), _records(alone), strict=True))
    assert all(one["iteration"] == other["iteration"] for one, other in pairs)
    return max(abs(one[name] - other[name]) / abs(other[name]) for one, other in pairs for name in LOGGED)


def _stored(save: Path, alone: Path) -> tuple[str, float]:
    problems: list[str] = []
    one, other = (choose_checkpoint(folder, Axis(), problems.append) for folder in (save, alone))
    assert one is not None and other is not None and not problems, problems
    assert one.tensors.keys() == other.tensors.keys() and read_latest(save) == read_latest(alone)
    worst = ("none", 0.0)
    for key in sorted(one.tensors):
        expected = other.read(key).double()
        largest = expected.abs().max().clamp_min(1e-12)
        worst = max(worst, (key, float((one.read(key).double() - expected).abs().max() / largest)), key=lambda w: w[1])
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=50, help="length of the run")
    parser.add_argument("--ranks", type=int, default=8, choices=(4, 8), help="processes")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        outcome = killed_and_resumed(args.iterations, args.ranks, Path(name))
    print(f"killed at iteration {outcome.killed_at} of {args.iterations}, resumed from {outcome.resumed_from}")
    print(f"logged numbers differ from those of one process by {outcome.logged:.1e}, relatively, at most")
    print(f"of the final checkpoint {outcome.stored[0]} differs most, by {outcome.stored[1]:.1e} of its largest value")
    return 0 if outcome.equal else 1


if __name__ == "__main__":
    sys.exit(main())
