"""The loss of training in fp8, by each recipe, beside that in bf16: the same model, text, order and seed.

    OMP_NUM_THREADS=1 python tools/bench/fp8_loss.py --folder DIR --json FILE

The text is the source of the Python standard library, as in scripts/quickstart.sh, cut into tokens by a tokenizer that
is trained on it. bf16 runs a second time with other samples and initial weights (another seed): what is within that
distance cannot be told apart. The table has the loss at some iterations, a mean over those before, and the validation
loss at the end. A run that is there already is not run again, so the command can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.side_by_side import machine, write_figures
from tools.pictures.run_folder import read_metrics
from tools.plot_loss import TRAIN_KEY, VALID_KEY

ROOT = Path(__file__).parents[2]
MEAN_OVER = 20
"""Iterations that a loss in the table is the mean of."""

FP8 = "--fp8-format hybrid --fp8-recipe"
RUNS = {
    "bf16": "",
    "bf16, another seed": "--seed 4321",
    "tensorwise, hybrid": f"{FP8} tensorwise",
    "tensorwise, e4m3": "--fp8-format e4m3 --fp8-recipe tensorwise",
    "delayed, hybrid": f"{FP8} delayed",
    "delayed, hybrid, max of 16 steps": f"{FP8} delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "rowwise, hybrid": f"{FP8} rowwise",
    "blockwise, e4m3": "--fp8-format e4m3 --fp8-recipe blockwise",
}
MODEL = (
    "--cpu --bf16 --num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 --seq-length 128 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 8 --global-batch-size 16 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.05 --adam-beta2 0.95 --weight-decay 0.1 --split 95,5,0 --num-workers 0 --log-interval 1 "
    "--tokenizer-type SentencePieceTokenizer --eval-iters 10 --eval-interval 1000000"
)


def prepare(folder: Path, vocab_size: int = 2048) -> list[str]:
    """Corpus, tokenizer and token ids in `folder`, as far as they are not there; the flags that name them."""
    corpus, tokenizer, data = (folder / name for name in ("corpus.jsonl", "tokenizer.model", "stdlib_text_document"))
    steps = [
        (corpus, f"build_corpus.py --output {corpus}"),
        (
            tokenizer,
            f"train_tokenizer.py --input {corpus} --output-prefix {folder}/tokenizer --vocab-size {vocab_size}",
        ),
        (
            data.with_suffix(".idx"),
            f"preprocess_data.py --input {corpus} --output-prefix {folder}/stdlib --append-eod "
            f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {tokenizer}",
        ),
    ]
    for made, command in steps:
        if not made.exists():
            run(folder / f"{made.stem}.log", f"tools/{command}".split())
    return ["--data-path", str(data), "--tokenizer-model", str(tokenizer)]


def run(log: Path, command: list[str]) -> float:
    """Runs a program of this repository, and returns its seconds. SystemExit with the end of its output if it fails."""
    start = time.perf_counter()
    with log.open("w") as file:
        done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n" + log.read_text()[-2000:])
    return time.perf_counter() - start


def losses(metrics: Path) -> tuple[list[float], float]:
    """(training loss of every iteration, validation loss at the end)"""
    run = read_metrics(metrics)
    return [loss for _, loss in run.values(TRAIN_KEY)], run.values(VALID_KEY)[-1][1]


def mean_before(values: list[float], iteration: int) -> float:
    """Of the last `MEAN_OVER` iterations up to this one."""
    return statistics.fmean(values[max(0, iteration - MEAN_OVER) : iteration])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where corpus, runs and logs go")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the losses here as well")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    data, shown = prepare(options.folder), [options.iterations * part // 6 for part in (1, 2, 3, 4, 5, 6)]
    head = machine()
    print(json.dumps(head))
    print(f"| run | {' | '.join(f'loss at {at}' for at in shown)} | validation | against bf16 |")
    print("|---" * (len(shown) + 3) + "|")
    found = {}
    for name, flags in RUNS.items():
        metrics = options.folder / f"{name.replace(', ', '-').replace(' ', '-')}-{options.iterations}.jsonl"
        if not metrics.exists() or VALID_KEY not in metrics.read_text():
            metrics.unlink(missing_ok=True)
            length = ["--train-iters", str(options.iterations), "--metrics-file", str(metrics)]
            run(metrics.with_suffix(".log"), ["pretrain_gpt.py", *MODEL.split(), *data, *flags.split(), *length])
        training, validation = losses(metrics)
        found[name] = {"training": training, "validation": validation}
        columns = [f"{mean_before(training, at):.3f}" for at in shown]
        against = validation - found["bf16"]["validation"]
        print(f"| {name} | {' | '.join(columns)} | {validation:.4f} | {against:+.4f} |", flush=True)
    write_figures(options.json, {"machine": head, "model": MODEL, "runs": found})


if __name__ == "__main__":
    main()
