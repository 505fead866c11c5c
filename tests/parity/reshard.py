"""Checkpoints of real models, each saved at one layout and loaded at every other: the same bits, all pairs.

    python -m tests.parity.reshard            all pairs of layouts, a line for each layout loaded at
    python -m tests.parity.reshard --list     the layouts

At each layout a model is trained for one step in bf16 and saved: rounding makes each checkpoint different from the
others. Then each layout loads them all (`megatron.testing.reshard`): parameters, fp32 main parameters, both moments of
Adam, the momentum of Muon and biases of experts must have the same bits. CI loads each layout's checkpoint at one
other, see test_reshard.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.testing.reshard import Checkpoints, Saved, kinds
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig

COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --make-vocab-size-divisible-by 8 "
    "--lr 1e-2 --mock-data --global-batch-size 12 --train-iters 2 --eval-iters 0 --num-workers 0 --bf16 --cpu"
)
INTERLEAVED = "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2"
SP = "--tp 2 --sequence-parallel"

MODELS = {
    "dense": "--num-layers 6 --mtp-num-layers 1",
    "experts": "--num-layers 5 --moe-layer-freq ([0]+[1]*4) --num-experts 8 --moe-router-topk 2 --disable-bias-linear "
    "--moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16 --swiglu --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --untie-embeddings-and-output-weights",
}
MODELS["muon"] = f"{MODELS['experts']} --optimizer muon"
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
        "dp2-gradients": (2, "--data-parallel-sharding-strategy optim_grads"),
        "pp2-dp2-parameters": (4, "--pp 2 --data-parallel-sharding-strategy optim_grads_params"),
        "dp4-instances": (
            4,
            "--data-parallel-sharding-strategy optim_grads_params --num-distributed-optimizer-instances 2",
        ),
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
        "dp2-whole": (2, "--data-parallel-sharding-strategy no_shard"),
        "ep2-dp4-parameters": (4, "--ep 2 --data-parallel-sharding-strategy optim_grads_params"),
        "cp2-ep2": (4, "--cp 2 --ep 2"),
        "pp2-ep2-dp3": (6, "--pp 2 --etp 1"),
    },
}
LAYOUTS["muon"] = {
    name: LAYOUTS["experts"][name]
    for name in ("one", "dp3", "tp2-etp1-ep2", "pp2-zb-v", "etp2-ep2", "dp2-whole", "pp2-ep2-dp3")
}


def config_of(family: str, name: str) -> RunConfig:
    return parse_args(f"{COMMON} {MODELS[family]} {LAYOUTS[family][name][1]}".split())


class Grid:
    """The checkpoints of one family, below `root`."""

    def __init__(self, family: str, root: Path) -> None:
        self.family = family
        self.checkpoints = Checkpoints(root / family)

    @property
    def saved(self) -> dict[str, Saved]:
        return self.checkpoints.saved

    def visit(self, name: str, sources: Sequence[str], train: bool) -> dict[str, list[str]]:
        """Source -> what was wrong when it was loaded at the layout `name`, after training there if asked."""
        world_size = LAYOUTS[self.family][name][0]
        return self.checkpoints.visit(name, world_size, config_of(self.family, name), sources, train)


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
            said: Any = ", ".join(f"{n} {kind}" for kind, n in kinds(grid.saved[names[0]].truth).items())
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
