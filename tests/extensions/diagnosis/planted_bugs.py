"""Bugs that a loss hardly shows, planted in small training runs, and what --log-layer-stats says of them.

    python -m tests.extensions.diagnosis.planted_bugs --iterations 120 --at 60

Each run trains the same small model from its initial weights on the documentation's text, twice over the same samples:
once as it is, and once with a bug from iteration `--at` on. A line tells the alarms of both, after how many steps the
bug was named, and what it did to the loss. Nothing may be said of the runs without a bug.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from megatron.training.hooks import Callback, RunView
from megatron.training.run import TrainingRun
from megatron.training.tasks import start_run
from megatron.training.training import train
from tests.harness import local_run, run_world
from tools.train_tokenizer import main as train_tokenizer

ROOT = Path(__file__).parents[2]
MODEL = (
    "--cpu --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --lr 2e-3 "
    "--untie-embeddings-and-output-weights --lr-warmup-fraction 0.1 --micro-batch-size 8 --global-batch-size 8 "
    "--eval-iters 0 --num-workers 0 --log-interval 1 --log-layer-stats 1 "
)
LAYER, RATE, SCALE = 2, 1.05, 1.5


Plant = Callable[[TrainingRun, int], object]


@dataclass(frozen=True)
class Bug:
    ranks: int
    plant: Plant
    """Called before the first step with the iteration from which on the bug acts."""

    names: str
    """What an alarm must contain."""


class EachStep(Callback):
    """Calls a function after each step from the one before iteration `first` on."""

    def __init__(self, run: TrainingRun, first: int, function: Callable[[], object]) -> None:
        super().__init__(run.config)
        self.first, self.function = first, function
        run.callbacks = (*run.callbacks, self)

    @torch.no_grad()
    def on_step_end(self, run: RunView) -> None:
        if run.progress.iteration >= self.first - 1:
            self.function()


def _layer(run: TrainingRun) -> Any:
    return next(layer for stage in run.stages.values() for layer in stage.decoder.layers if layer.number == LAYER)


def growing_weight(run: TrainingRun, first: int) -> None:
    """The gain of the norm before the MLP grows by `RATE` a step."""
    weight = _layer(run).pre_mlp_layernorm.weight
    EachStep(run, first, lambda: weight.mul_(RATE))


def growing_output(run: TrainingRun, first: int) -> None:
    """The output of a layer is multiplied by one more `RATE` in each step; all weights stay as they are."""

    def scaled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * RATE ** max(0, run.progress.iteration - first + 2)

    _layer(run).register_forward_hook(scaled)


def scaled_embeddings(run: TrainingRun, first: int) -> None:
    """Tensor-parallel rank 1 multiplies its rows of the embedding by `SCALE`, once."""
    embedding = next(iter(run.stages.values())).embedding
    assert embedding is not None
    weight, factors = embedding.word_embeddings.weight, iter([SCALE] if run.runtime.state.tp.rank == 1 else [])
    EachStep(run, first, lambda: weight.mul_(next(factors, 1.0)))


def scaled_lookup(run: TrainingRun, first: int) -> None:
    """What tensor-parallel rank 1 looks up is multiplied by `SCALE`, and so is its gradient; weights are not."""
    embedding = next(iter(run.stages.values())).embedding
    assert embedding is not None
    table, tp = embedding.word_embeddings, run.runtime.state.tp

    def scaled(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
        """args: tokens [b, s]; out [s/tp, b, h]"""
        if run.progress.iteration < first - 1:
            return out
        own = args[0].t().chunk(tp.size)[tp.rank]
        return out * torch.where(own >= table.vocab_rows // tp.size, SCALE, 1.0)[..., None]

    # Before the hook of the statistics, as if the table did it.
    table.register_forward_hook(scaled, prepend=True)


def shared_seed(run: TrainingRun, first: int) -> None:
    """All tensor-parallel ranks begin with the same values in their parts of the matrices, as drawn from one seed."""
    with torch.no_grad():
        for stage in run.stages.values():
            for parameter, meta in stage.named_metas().values():
                if "tp" in meta.sharded:
                    dist.broadcast(parameter.data, 0)


BUGS = {
    "gain of a norm grows": Bug(1, growing_weight, f"layer {LAYER} is out of line"),
    "output of a layer grows": Bug(1, growing_output, f"layer {LAYER} is out of line"),
    "embeddings of TP rank 1 scaled": Bug(2, scaled_embeddings, "rank 1 is out of line: the weight_norm of its part"),
    "lookups of TP rank 1 scaled": Bug(
        2, scaled_lookup, "tensor-parallel rank 1 is out of line: the output_norm of its part"
    ),
    "TP ranks share a seed": Bug(2, shared_seed, "Do the ranks draw from one seed?"),
}


def corpus(folder: Path) -> str:
    """Writes the documentation's text and a tokenizer of it; the flags that name them."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in text.split("\n## ")))
    flags = f"--input {folder}/a.jsonl --output-prefix {folder}/tok --vocab-size 1024"
    assert train_tokenizer(flags.split()) == 0
    tokenizer = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {folder}/tok.model --vocab-size 1024"
    return f"--data-path {folder}/a.jsonl --split 100,0,0 {tokenizer} --make-vocab-size-divisible-by 8"


def trained(rank: int, world_size: int, flags: str, plant: Plant, first: int) -> None:
    config = resolve_legal(parse_args(flags.split()), world_size)
    with local_run(config, rank, world_size) as run, ExitStack() as resources:
        plant(run, first)
        start_run(run, resources)
        train(run)


def records(path: Path, ranks: int, flags: str, plant: Plant, first: int) -> list[dict[str, Any]]:
    """Trains, and returns the records that are written to `path`."""
    layout = f"--tp {ranks} --sequence-parallel" if ranks > 1 else ""
    run_world(ranks, trained, f"{flags} {layout} --metrics-file {path}", plant, first)
    return [json.loads(line) for line in path.read_text().splitlines()]


def nothing(run: TrainingRun, first: int) -> None:
    """No bug."""


def alarms(found: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """(iteration, line) of each alarm."""
    return [(record["iteration"], line) for record in found for line in record.get("layer_alarms", ())]


def loss(found: list[dict[str, Any]]) -> float:
    """Mean loss of the last ten iterations."""
    last = [record["lm_loss"] for record in found if "lm_loss" in record][-10:]
    return sum(last) / len(last)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--at", type=int, default=60)
    parser.add_argument("--only", nargs="+", choices=BUGS, default=list(BUGS))
    parser.add_argument("--keep", type=Path, help="folder for the metrics of all runs")
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        kept = args.keep or Path(name)
        flags = f"{MODEL} {corpus(Path(name))} --train-iters {args.iterations}"
        plain = {
            ranks: records(kept / f"{ranks}_ranks.jsonl", ranks, flags, nothing, 0)
            for ranks in sorted({BUGS[bug].ranks for bug in args.only})
        }
        for ranks, found in plain.items():
            print(f"no bug, {ranks} ranks: loss {loss(found):.4f}, alarms: {alarms(found) or 'none'}", flush=True)
            failed |= bool(alarms(found))
        for bug in args.only:
            path = kept / f"{bug.replace(' ', '_')}.jsonl"
            found = records(path, BUGS[bug].ranks, flags, BUGS[bug].plant, args.at)
            first = 1 if BUGS[bug].plant is shared_seed else args.at
            named = [(at, line) for at, line in alarms(found) if BUGS[bug].names in line]
            failed |= not named or any(at < first for at, _ in alarms(found))
            change = f"loss {loss(found):.4f} beside {loss(plain[BUGS[bug].ranks]):.4f}"
            steps = f"named after {named[0][0] - first + 1} steps: {named[0][1]}" if named else "NOT NAMED"
            print(f"{bug}: {change}; {steps}; {len(alarms(found))} alarms", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
