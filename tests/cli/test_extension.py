"""A run with parts of a user's own: trained, stopped by a callback, resumed, and used for generation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "tests" / "fixtures" / "own_parts.py"
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 257 --lr 1e-2 --cpu "
    "--tokenizer-type ByteTokenizer --train-iters 8 --global-batch-size 4 --log-interval 2 --save-interval 4 "
    "--eval-interval 4 --eval-iters 1 --dataset-type own_data --normalization own_norm "
    "--activation-func own_activation --loss-func own_loss --optimizer own_optimizer --lr-decay-style own_schedule"
).split()


def run(*command: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    start = [sys.executable] if ranks == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    start = start if ranks == 1 else [sys.executable, *start]
    return subprocess.run([*start, *command], capture_output=True, text=True, timeout=280, cwd=ROOT)


def records(folder: Path) -> dict[int, dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["iteration"]: line for line in lines if "lm_loss" in line}


def test_a_run_of_own_parts_is_stopped_resumed_and_used(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train = ("pretrain_gpt.py", *FLAGS, "--extension", str(EXTENSION))
    done = run(*train, "--save", str(whole))
    assert done.returncode == 0, done.stderr
    assert "callback: start" in done.stdout and "callback: checkpoint 8" in done.stdout
    assert done.stdout.rstrip().endswith("callback: end")

    # Rank 1 of two asks for the end; both stop after the same step.
    done = run(*train, "--save", str(cut), "--own-patience", "5", "--pp", "2", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exiting at iteration 6: patience is over" in done.stdout and "callback: checkpoint 6" in done.stdout

    # The saved configuration brings the extension along; the states of its optimizer go on at another layout.
    done = run("pretrain_gpt.py", "--config", str(cut / "run_config.yaml"), "--load", str(cut), "--own-patience", "0",
               "--pp", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "loaded checkpoint of iteration 6" in done.stdout
    one, two = records(whole), records(cut)
    assert one.keys() == two.keys() == {2, 4, 6, 8}
    for iteration in one:
        assert abs(one[iteration]["lm_loss"] - two[iteration]["lm_loss"]) < 1e-4
        assert one[iteration]["share_of_threes"] == two[iteration]["share_of_threes"]
        assert 0.2 < one[iteration]["share_of_threes"] < 0.5

    done = run("tools/generate_text.py", "--load", str(cut), "--prompt", "ab", "--max-new-tokens", "2")
    assert done.returncode == 0, done.stderr


def test_states_of_frozen_parameters_are_left_out_and_begin_at_zero_when_trained_again(tmp_path: Path) -> None:
    base = ("pretrain_gpt.py", *FLAGS[: FLAGS.index("--dataset-type")], "--mock-data", "--bf16")
    save = ("--save", str(tmp_path), "--load", str(tmp_path))
    freeze = ("--freeze", r"layers\.0\.", "--freeze", "embedding")
    for iterations, flags, said in (("2", (), ""), ("4", freeze, ""), ("6", freeze, ""), ("8", (), "start at zero")):
        done = run(*base, *save, "--train-iters", iterations, "--lr-decay-style", "constant", *flags)
        assert done.returncode == 0, done.stderr
        assert ("start at zero" in done.stdout) == bool(said), done.stdout
        assert iterations == "2" or "loaded checkpoint of iteration" in done.stdout
