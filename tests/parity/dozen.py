"""Twelve runs of one model, each with its sharding strategy, optimizer, formats of states and layout: all pairs.

    python -m tests.parity.dozen              saves by each, and loads by each what all have saved
    python -m tests.parity.dozen --list       the twelve

A pair with the same optimizer must load bit-equal states (`megatron.testing.reshard`); where the run that loads keeps
states in fewer bits than were saved, main parameters are bit-equal and moments as near as their format. A pair with
different optimizers must be refused with the flag, both values and the remedy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.testing.reshard import Checkpoints
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from tests.parity.reshard import COMMON, INTERLEAVED, MODELS, SP

STRATEGY = "--data-parallel-sharding-strategy"
PARAMETERS, GRADIENTS = f"{STRATEGY} optim_grads_params", f"{STRATEGY} optim_grads"
AWARE = "--use-precision-aware-optimizer"
OWN = f"--extension {Path(__file__).resolve().parents[2] / 'examples' / 'ademamix.py'}"
BOUNDS = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-9, "fp8": 2**-3}
"""Largest relative change of an element by a format; the second moment is stored as its root in fp16 and fp8."""


@dataclass(frozen=True)
class Point:
    """One of the twelve. `moments` are the formats of `exp_avg` and `exp_avg_sq`."""

    world_size: int
    optimizer: str
    flags: str
    moments: tuple[str, str] = ("fp32", "fp32")

    @property
    def config(self) -> RunConfig:
        own = OWN if self.optimizer == "ademamix" else ""
        formats = f"{AWARE} --exp-avg-dtype {self.moments[0]} --exp-avg-sq-dtype {self.moments[1]}"
        formats = "" if self.moments == ("fp32", "fp32") else formats
        optimizer = f"--optimizer {self.optimizer} {own} {formats}"
        return parse_args(f"{COMMON} {MODELS['experts']} {optimizer} {self.flags}".split())


DOZEN = {
    "adam-dp2-whole": Point(2, "adam", f"{STRATEGY} no_shard"),
    "adam-tp2-dp2-gradients": Point(4, "adam", f"{SP} {GRADIENTS}"),
    "adam-pp2-zb-v-parameters": Point(4, "adam", f"--pp 2 --pipeline-schedule zb-v {PARAMETERS}"),
    "adam-bf16-pp2-gradients": Point(4, "adam", f"--pp 2 {INTERLEAVED} {GRADIENTS}", ("bf16", "bf16")),
    "adam-fp8-ep2-parameters": Point(4, "adam", f"--ep 2 {PARAMETERS}", ("fp8", "fp16")),
    "muon-dp3": Point(3, "muon", ""),
    "muon-ep2-gradients": Point(4, "muon", f"--ep 2 {GRADIENTS}"),
    "muon-tp2-pp2-parameters": Point(8, "muon", f"{SP} --pp 2 {PARAMETERS}"),
    "sgd-tp2": Point(2, "sgd", SP),
    "sgd-instances-parameters": Point(4, "sgd", f"{PARAMETERS} --num-distributed-optimizer-instances 2"),
    "own-dp2-gradients": Point(2, "ademamix", GRADIENTS),
    "own-pp2-parameters": Point(4, "ademamix", f"--pp 2 {PARAMETERS}"),
}


def rounded(source: Point, target: Point) -> dict[str, float]:
    """Kinds of state that `target` may round when it loads what `source` has saved, and by how much."""
    if source.moments == target.moments:
        return {}
    bounds = dict(zip(("exp_avg", "exp_avg_sq"), (BOUNDS[name] for name in target.moments), strict=True))
    # Parameters halfway between two numbers of bf16 are rounded away from zero where remainders are stored.
    ties = {"weight": 2**-7} if ("fp32", "fp32") in (source.moments, target.moments) else {}
    return ties | {kind: bound for kind, bound in bounds.items() if bound}


def visit(checkpoints: Checkpoints, name: str, sources: Sequence[str], train: bool = False) -> dict[str, list[str]]:
    """Source -> what is wrong with its load by the run `name`; a refusal that should be is not."""
    target = DOZEN[name]
    bounds = {source: rounded(DOZEN[source], target) for source in sources}
    found = checkpoints.visit(name, target.world_size, target.config, sources, train, bounds)
    for source in sources:
        if DOZEN[source].optimizer != target.optimizer:
            rule = f"--optimizer is {DOZEN[source].optimizer} in the checkpoint and {target.optimizer} in the run: "
            told = [line for line in found[source] if rule in line and "--no-load-optim" in line]
            found[source] = (
                [] if len(told) == len(found[source]) == 1 else ["not refused as it should be", *found[source]]
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the twelve and run nothing")
    if parser.parse_args(argv).list:
        print(
            "\n".join(
                f"{name}: {point.world_size} ranks, {point.optimizer} {point.flags}" for name, point in DOZEN.items()
            )
        )
        return 0
    failures, began = 0, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dozen-") as root:
        checkpoints = Checkpoints(Path(root))
        for name in DOZEN:
            visit(checkpoints, name, [], train=True)
        for name, point in DOZEN.items():
            wrong = {source: keys for source, keys in visit(checkpoints, name, list(DOZEN)).items() if keys}
            same = sum(other.optimizer == point.optimizer for other in DOZEN.values())
            failures += len(wrong)
            print(f"{name}: {same} loaded, {len(DOZEN) - same} refused: {wrong or 'as it should be'}", flush=True)
    print(f"{len(DOZEN) ** 2} pairs, {failures} wrong, {time.perf_counter() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
