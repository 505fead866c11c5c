"""Train a reduced DeepSeek-V3 model, and kill ranks at random moments. After each kill, the run resumes under another
layout.

The model has the features that make DeepSeek-V3 hard to distribute: multi-latent attention, a dense layer before the
expert layers, sigmoid scores with a bias, expert groups, a shared expert and multi-token prediction. The run saves in
the background and keeps the last two checkpoints. At a random moment, a random rank receives SIGKILL. The other ranks
are either also killed or left to exit on their own. The run then starts again with a different layout and sharding
strategy, and must load the newest complete checkpoint. In fp64, every logged loss and gradient norm and every tensor of
the final checkpoint must equal those of a run on one process to within 1e-9 of the largest value.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.path_kind import read_latest
from megatron.core.parallel_state import Axis
from megatron.training.checkpoints.loading import choose_checkpoint
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
    "--mtp-loss-scaling-factor 0.3 --moe-token-dispatcher-type alltoall --global-batch-size 4 "
    "--lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2 --clip-grad 1 --log-interval 1 --eval-iters 0 --num-workers 0 "
    "--save-interval 2 --keep-last 2"
).split()
LAYOUTS = (
    "--tp 2 --sequence-parallel --etp 1 --pp 2 --ep 2 --pipeline-schedule zb-v",
    "--cp 2 --ep 2 --recompute-granularity full --recompute-method uniform",
    "--pp 2 --ep 2 --data-parallel-sharding-strategy optim_grads_params",
    "--tp 2 --sequence-parallel --etp 1 --ep 2 --data-parallel-sharding-strategy optim_grads",
    "--pp 4 --data-parallel-sharding-strategy no_shard",
)
LOGGED = (
    *("iteration", "consumed_samples", "consumed_tokens", "lm_loss", "mtp_loss_1", "moe_aux_loss", "grad_norm"),
    "learning_rate",
)


def logged(save: Path, more: Sequence[str] = ()) -> list[list[float]]:
    path = save / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the text after the last newline is incomplete
    found = [[json.loads(line)[name] for name in (*LOGGED, *more)] for line in lines]
    return [[nan if value is None else value for value in values] for values in found]


def reaches(steps: int, share: float, ranks: list[Any], screen: Path) -> bool:
    """Wait until this start has trained `steps` steps, and then for another `share` of the time that these steps took.
    Return False if the run ends before that."""
    began = time.monotonic()
    while len(re.findall(r" iteration +\d+/", screen.read_text())) < steps and all(
        process.exitcode is None for process in ranks
    ):
        assert time.monotonic() < began + HANG, screen.read_text()[-4000:]
        time.sleep(0.005)
    time.sleep(share * (time.monotonic() - began) / steps if steps else share)
    return all(process.exitcode is None for process in ranks)


def assert_resumed(said: str, latest: int) -> None:
    """Assert that a run loaded the newest complete checkpoint, unless it was killed before it loaded a checkpoint."""
    assert "skipped checkpoint" not in said
    if found := re.search(r"loaded checkpoint of iteration (\d+)|starting at iteration (0)", said):
        assert int(found[1] or found[2]) == latest


@pytest.mark.grid("size", [(10, 4, 2)], [(10, 4, 2), (30, 4, 8)])
def test_a_run_killed_and_resumed_under_other_layouts_equals_one_process(
    tmp_path: Path, size: tuple[int, int, int]
) -> None:
    check_kills(tmp_path, size, ["--mock-data"])


def check_kills(folder: Path, size: tuple[int, int, int], data: Sequence[str], more: Sequence[str] = ()) -> None:
    """Kill ranks of a run, and compare its result with that of an undisturbed run.

    Args:
        folder: folder that contains the folders `save` and `alone` of the two runs.
        size: numbers of iterations, ranks and kills. The first kill happens after the first checkpoint. Later kills may
            happen during startup.
        data: flags of the data.
        more: names of further metrics to compare.
    """
    (iterations, ranks, kills), moments = size, random.Random(5)
    save, alone, screen = (folder / name for name in ("save", "alone", "screen"))
    layouts, latest = itertools.cycle(LAYOUTS), 0

    def flags(place: Path, layout: str = "") -> list[str]:
        files = ["--save", str(place), "--load", str(place), "--sample-log", str(place / "samples.jsonl")]
        return [*MODEL, *layout.split(), "--train-iters", str(iterations), *files, *data]

    for number in range(kills):
        steps, share, victim = moments.randrange(4) if number else 5, moments.random(), moments.randrange(ranks)
        with forked_ranks(ranks, flags(save, next(layouts)), screen) as processes:
            runs = reaches(steps, share, processes, screen)
            newest = read_latest(save) or 0
            if runs:
                os.kill(processes[victim].pid, signal.SIGKILL)
            if not runs or (steps and number % 2):
                join(processes)  # the other ranks must detect the lost rank and exit
        assert_resumed(screen.read_text(), latest)
        latest = read_latest(save) or 0
        assert latest >= newest > 0
        if not runs:  # the run completed before it was killed
            assert latest == iterations, screen.read_text()[-4000:]
            break
    assert_resumed(run_forked(ranks, flags(save, next(layouts)), screen), latest)
    run_forked(1, flags(alone), screen)
    for found, expected in zip(logged(save, more), logged(alone, more), strict=True):
        assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)
    assert (save / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()
    one, other = (choose_checkpoint(place, Axis()) for place in (save, alone))
    assert one is not None and other is not None and one.tensors.keys() == other.tensors.keys()
    assert one.payload["iteration"] == other.payload["iteration"] == iterations
    for key in other.tensors:
        whole = other.read(key).double()
        assert (one.read(key).double() - whole).abs().max() <= 1e-9 * whole.abs().max().clamp_min(1e-12), key
    assert not [path for path in save.iterdir() if path.suffix in (".tmp", ".old")]
