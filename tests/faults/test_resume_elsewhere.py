"""A reduced DeepSeek-V3 that is killed in the middle, resumed at another layout, and compared with one process.

The model has what makes DeepSeek-V3 hard to lay out: multi-latent attention, a dense layer in front of layers with
experts, sigmoid scores with a bias, groups of experts, a shared expert and multi-token prediction. At TP2 PP2 EP2 with
zb-v, one rank gets SIGKILL as soon as half of the iterations are logged; the same command with PP1 CP2 then loads the
newest checkpoint and trains to the end. In fp64 every logged loss and gradient norm, and every tensor of the final
checkpoint, must be that of a run on one process to within 1e-9 of its largest value.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

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


@pytest.mark.grid("size", [(6, 4)], [(6, 4), (50, 8)])
def test_killed_and_resumed_at_another_layout_as_one_process(tmp_path: Path, size: tuple[int, int]) -> None:
    iterations, ranks = size
    outcome = killed_and_resumed(iterations, ranks, tmp_path)
    assert outcome.equal and 0 < outcome.resumed_from < iterations, outcome
