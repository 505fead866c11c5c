"""Checkpoints of real models, each saved at one layout and loaded at every other: the same bits, all pairs.

    python -m tests.parity.reshard            all pairs of layouts, a line for each layout loaded at
    python -m tests.parity.reshard --list     the layouts

At each layout a model is trained for one step in bf16 and saved: its own rounding makes each checkpoint different from
the others. Then each layout loads them all into memory filled with NaN. What lies in memory after that (parameters,
fp32 main parameters, both moments of Adam, biases of experts) is compared with what lay in memory where it was saved,
neither of them read through the code of checkpoints. CI loads each layout's checkpoint at one other, see
test_reshard.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron.testing.local_world import run_world
from megatron.testing.snapshot import Fragment, Label, Snapshot, assemble, state_fragments
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from megatron.training.initialize import local_runtime
from megatron.training.setup import TrainingRun, build_run
from megatron.training.training import Interval, train_step

COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --make-vocab-size-divisible-by 8 "
    "--lr 1e-2 --mock-data --global-batch-size 12 --train-iters 2 --eval-iters 0 --num-workers 0 --bf16 --cpu"
)
INTERLEAVED = "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2"
SP = "--tp 2 --sequence-parallel"

MODELS = {
    "dense": "--num-layers 6",
    "experts": "--num-layers 5 --moe-layer-freq ([0]+[1]*4) --num-experts 8 --moe-router-topk 2 --disable-bias-linear "
    "--moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16 --swiglu --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --untie-embeddings-and-output-weights",
}
LAYOUTS: dict[str, dict[str, tuple[int, str]]] = {
    "dense": {
        "one": (1, ""),
        "tp2": (2, SP),
        "tp4": (4, "--tp 4"),
        "pp2": (2, "--pp 2"),
        "pp3": (3, "--pp 3"),
        "pp4-vpp2": (4, f"--pp 4 {INTERLEAVED}"),
        "pp2-zb-v": (2, "--pp 2 --pipeline-schedule zb-v"),
        "dp2-whole": (2, "--no-use-distributed-optimizer"),
        "dp3": (3, ""),
        "dp4-buckets": (4, "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"),
        "cp2": (2, "--cp 2"),
        "pp2-dp3": (6, "--pp 2"),
        "tp2-pp2-dp2": (8, f"{SP} --pp 2"),
        "tp2-pp2-cp2": (8, f"{SP} --pp 2 --cp 2"),
    },
    "experts": {
        "one": (1, ""),
        "ep2": (2, "--ep 2"),
        "ep4": (4, "--ep 4 --moe-token-dispatcher-type alltoall"),
        "etp2": (2, "--etp 2"),
        "etp2-ep2": (4, "--etp 2 --ep 2"),
        "tp2": (2, SP),
        "tp2-etp1-ep2": (2, f"{SP} --etp 1 --ep 2"),
        "tp2-etp1-ep4": (4, f"{SP} --etp 1 --ep 4"),
        "pp2-ep2": (4, "--pp 2 --ep 2"),
        "pp2-vpp2-ep2": (4, f"--pp 2 --ep 2 {INTERLEAVED}"),
        "pp2-zb-v": (2, "--pp 2 --pipeline-schedule zb-v"),
        "dp3": (3, ""),
        "dp2-whole": (2, "--no-use-distributed-optimizer"),
        "cp2-ep2": (4, "--cp 2 --ep 2"),
        "pp2-ep2-dp3": (6, "--pp 2 --etp 1"),
    },
}

NOW = Label(0)
Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(key, offset, shape) of what a rank holds."""


@dataclass
class Visit:
    """What one rank saw at one layout."""

    trained: list[Fragment] = field(default_factory=list)
    """What was saved, as it lay in memory."""

    wrong: dict[str, list[str]] = field(default_factory=dict)
    """Source -> what was not as it was saved."""

    boxes: list[Box] = field(default_factory=list)
    """What was looked at, of every source."""


def argv_of(family: str, name: str) -> list[str]:
    return f"{COMMON} {MODELS[family]} {LAYOUTS[family][name][1]}".split()


def visit(
    rank: int, world_size: int, argv: list[str], home: Path | None, sources: Mapping[str, tuple[Path, Snapshot]]
) -> Visit:
    """Trains and saves into `home`, if given, and then loads the sources, one after another."""
    config = resolve(parse_args([*argv, *(["--save", str(home)] if home else [])]), world_size)
    assert not validate(config, world_size), validate(config, world_size)
    found = Visit()
    with ExitStack() as resources:
        run = build_run(config, local_runtime(config, rank, world_size))
        resources.callback(run.data.close)
        if home is not None:
            train_step(run, Interval())
            save_checkpoint(config, run.runtime.state, run.stages, run.optimizer, run.progress)
            found.trained = state_fragments(run, NOW)
        for name, (folder, truth) in sources.items():
            forget(run)
            options = replace(config, checkpoint=replace(config.checkpoint, load=str(folder)))
            progress = load_checkpoint(
                options, run.runtime.state, run.stages, run.optimizer, data_fingerprint=run.data.fingerprint
            )
            fragments = state_fragments(run, NOW)
            found.wrong[name] = [f.key for f in fragments if not torch.equal(f.values, part_of(truth, f))]
            if (progress.iteration, progress.consumed_samples, run.optimizer.step_count) != (1, 12, 1):
                found.wrong[name].append(f"{progress}")
            found.boxes = [(f.key, f.offset, tuple(f.values.shape)) for f in fragments]
    return found


def forget(run: TrainingRun) -> None:
    """Fills everything that a checkpoint holds with NaN."""
    run.optimizer.finish_param_sync()
    with torch.no_grad():
        for stage in run.stages.values():
            for param in stage.parameters():
                param.fill_(torch.nan)
        for piece in run.optimizer.sharded_state():
            piece.data.fill_(torch.nan)
    run.optimizer.step_count = -1


def part_of(truth: Snapshot, fragment: Fragment) -> torch.Tensor:
    place = tuple(slice(o, o + n) for o, n in zip(fragment.offset, fragment.values.shape, strict=True))
    return truth[fragment.key][place]


def uncovered(truth: Snapshot, boxes: Sequence[Box]) -> list[str]:
    """Tensors of which some element was on no rank."""
    seen = {key: torch.zeros(value.shape, dtype=torch.bool) for key, value in truth.tensors.items()}
    for key, offset, shape in boxes:
        seen[key][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = True
    return [key for key, mask in seen.items() if not mask.all()]


class Grid:
    """The checkpoints of one family, below `root`."""

    def __init__(self, family: str, root: Path) -> None:
        self.family, self.root = family, root
        self.saved: dict[str, tuple[Path, Snapshot]] = {}

    def visit(self, name: str, sources: Sequence[str], train: bool) -> dict[str, list[str]]:
        """Source -> what was wrong when it was loaded at the layout `name`, after training there if asked."""
        world_size, home = LAYOUTS[self.family][name][0], self.root / self.family / name
        wanted = {source: self.saved[source] for source in sources}
        visits: list[Visit] = run_world(world_size, visit, argv_of(self.family, name), home if train else None, wanted)
        if train:
            truth = assemble([fragment for each in visits for fragment in each.trained])
            assert not truth.replica_errors, truth.replica_errors
            self.saved[name] = (home, truth)
        wrong: dict[str, list[str]] = {}
        boxes = [box for each in visits for box in each.boxes]
        for source in sources:
            missing = [f"{key} is on no rank" for key in uncovered(self.saved[source][1], boxes)]
            wrong[source] = missing + sorted({key for each in visits for key in each.wrong[source]})
        return wrong


def kinds(truth: Snapshot) -> dict[str, int]:
    """How many tensors of each kind a snapshot has."""
    counts: dict[str, int] = {}
    for key in truth.tensors:
        kind = key.split()[1]
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the layouts and run nothing")
    parser.add_argument("--family", choices=list(MODELS), nargs="+", default=list(MODELS))
    args = parser.parse_args(argv)
    pairs, failures, began = 0, 0, time.perf_counter()
    for family in args.family:
        names = list(LAYOUTS[family])
        if args.list:
            print("\n".join(f"{family} {name}: {world} {flags}" for name, (world, flags) in LAYOUTS[family].items()))
            continue
        with tempfile.TemporaryDirectory(prefix="reshard-") as root:
            grid = Grid(family, Path(root))
            for name in names:
                grid.visit(name, [], train=True)
            said: Any = ", ".join(f"{n} {kind}" for kind, n in kinds(grid.saved[names[0]][1]).items())
            print(f"{family}: saved at {len(names)} layouts; tensors of each: {said}", flush=True)
            for name in names:
                wrong = grid.visit(name, names, train=False)
                bad = {source: keys for source, keys in wrong.items() if keys}
                pairs, failures = pairs + len(wrong), failures + len(bad)
                print(f"{family}: all {len(wrong)} at {name}: {bad or 'bit-equal'}", flush=True)
    if not args.list:
        print(f"{pairs} pairs, {failures} not bit-equal, {time.perf_counter() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
