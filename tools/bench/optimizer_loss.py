"""Loss of the quickstart's model with Muon beside Adam: several learning rates each, then several seeds at the best.

    OMP_NUM_THREADS=1 python tools/bench/optimizer_loss.py --folder DIR --json FILE

Both are tuned alike: the same learning rates, the first seed, the validation loss at the end decides. The other seeds
have other initial weights and another order of samples. A run that is there already is not run again, so the command
can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.fp8_loss import losses, prepare, run
from tools.bench.side_by_side import machine, write_figures
from tools.plot_loss import VALID_KEY

MODEL = (
    "--cpu --num-layers 4 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 256 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 8 --global-batch-size 8 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.05 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --split 95,5,0 --num-workers 0 "
    "--tokenizer-type SentencePieceTokenizer --log-interval 1 --eval-iters 10 --eval-interval 1000000"
)
OPTIMIZERS = {
    "adam": "--optimizer adam",
    "muon": "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2 "
    "--muon-coefficient-type simple",
}


def validation_loss(folder: Path, data: list[str], name: str, lr: float, seed: int, iterations: int) -> float:
    metrics = folder / f"{name}-{lr:g}-{seed}-{iterations}.jsonl"
    if not metrics.exists() or VALID_KEY not in metrics.read_text():
        metrics.unlink(missing_ok=True)
        own = f"{OPTIMIZERS[name]} --lr {lr:g} --seed {seed} --train-iters {iterations} --metrics-file {metrics}"
        run(metrics.with_suffix(".log"), ["pretrain_gpt.py", *MODEL.split(), *data, *own.split()])
    return losses(metrics)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where corpus, runs and logs go")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1, 2])
    parser.add_argument("--json", type=Path, help="write the losses here as well")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    data = prepare(options.folder, vocab_size=4096)
    head, found = machine(), {}
    print(json.dumps(head))
    print(
        "| optimizer | " + " | ".join(f"lr {lr:g}" for lr in options.rates) + " | seeds at the best | mean | spread |"
    )
    print("|---" * (len(options.rates) + 4) + "|")
    for name in OPTIMIZERS:
        first = options.seeds[0]
        tuned = {lr: validation_loss(options.folder, data, name, lr, first, options.iterations) for lr in options.rates}
        best = min(tuned, key=lambda lr: tuned[lr])
        others = [
            validation_loss(options.folder, data, name, best, seed, options.iterations) for seed in options.seeds[1:]
        ]
        each = [tuned[best], *others]
        found[name] = {"tuned": tuned, "best": best, "seeds": dict(zip(options.seeds, each, strict=True))}
        shown = " | ".join(f"{loss:.3f}" for loss in tuned.values())
        ends = f"{statistics.fmean(each):.3f} | {max(each) - min(each):.3f}"
        print(f"| {name} | {shown} | {' '.join(f'{loss:.3f}' for loss in each)} | {ends} |", flush=True)
    write_figures(options.json, {"machine": head, "model": MODEL, "optimizers": found})


if __name__ == "__main__":
    main()
