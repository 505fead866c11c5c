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
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.latest_checkpoint import choose_checkpoint
from megatron.core.parallel_state import Axis
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
LOGGED = ("iteration", "lm_loss", "mtp_loss_1", "moe_aux_loss", "grad_norm")


def flags(save: Path, iterations: int) -> list[str]:
    run = f"--train-iters {iterations} --save-interval {max(1, iterations // 5)} --keep-last 2"
    return [*MODEL, *run.split(), "--save", str(save), "--load", str(save)]


def logged(save: Path) -> list[list[float]]:
    path = save / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # what is behind the last end is unfinished
    return [[json.loads(line)[name] for name in LOGGED] for line in lines]


@pytest.mark.grid("size", [(6, 4)], [(6, 4), (50, 8)])
def test_killed_and_resumed_at_another_layout_as_one_process(tmp_path: Path, size: tuple[int, int]) -> None:
    (iterations, ranks), limit = size, time.monotonic() + HANG
    save, alone, screen = (tmp_path / name for name in ("save", "one-process", "screen"))
    with forked_ranks(ranks, [*flags(save, iterations), *FIRST], screen) as processes:
        while len(logged(save)) < iterations // 2:
            running = all(process.exitcode is None for process in processes)
            assert running and time.monotonic() < limit, screen.read_text()[-4000:]
            time.sleep(0.005)
        os.kill(processes[-1].pid, signal.SIGKILL)
        join(processes)
    text = run_forked(ranks, [*flags(save, iterations), *SECOND], screen)
    resumed = re.search(r"loaded checkpoint of iteration (\d+)", text)
    assert resumed is not None and 0 < int(resumed[1]) < iterations
    run_forked(1, flags(alone, iterations), screen)
    for found, expected in zip(logged(save), logged(alone), strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
    one, other = (choose_checkpoint(folder, Axis()) for folder in (save, alone))
    assert one is not None and other is not None and one.tensors.keys() == other.tensors.keys()
    assert one.payload["iteration"] == other.payload["iteration"] == iterations
    for key in other.tensors:
        whole = other.read(key).double()
        assert (one.read(key).double() - whole).abs().max() <= 1e-9 * whole.abs().max().clamp_min(1e-12), key
