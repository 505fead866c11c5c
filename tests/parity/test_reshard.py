"""Checkpoints of real models, each saved at one layout and loaded at others: the same bits. All pairs by --whole.

At each layout a model is trained for one step in bf16 and saved: rounding makes each checkpoint different from the
others. Then layouts load them (`megatron.testing.reshard`): parameters, fp32 main parameters, both moments of Adam, the
momentum of Muon and biases of experts must have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from megatron.testing.reshard import Checkpoints, kinds
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig

COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --make-vocab-size-divisible-by 8 "
    "--lr 1e-2 --mock-data --global-batch-size 12 --train-iters 2 --eval-iters 0 --num-workers 0 --bf16 --cpu"
)
INTERLEAVED = "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2"
SP = "--tp 2 --sequence-parallel"
TABLE = yaml.safe_load(Path(__file__).with_name("reshard.yaml").read_text())
MODELS: dict[str, str] = TABLE["models"]
LAYOUTS: dict[str, dict[str, tuple[int, str]]] = TABLE["layouts"]


@pytest.mark.parametrize("family", list(MODELS))
def test_what_one_layout_saves_another_loads(tmp_path: Path, family: str, pytestconfig: pytest.Config) -> None:
    """Each loads what the one before it saved; then the first loads what the last one saved, or all load all."""
    whole, checkpoints = pytestconfig.getoption("--whole"), Checkpoints(tmp_path)
    names = list(LAYOUTS[family])[:: 1 if whole else 3]

    def visit(name: str, sources: list[str], train: bool) -> None:
        world_size, flags = LAYOUTS[family][name]
        config = parse_args(f"{COMMON} {MODELS[family]} {flags}".split())
        assert checkpoints.visit(name, world_size, config, sources, train) == {source: [] for source in sources}

    for before, name in zip([None, *names], names, strict=False):
        visit(name, [before] if before else [], train=True)
    found = kinds(checkpoints.saved[names[0]].truth)
    assert {"weight", "main_param", "exp_avg", "exp_avg_sq"} <= found.keys()
    if family == "muon":
        assert found["exp_avg"] == found["exp_avg_sq"] == found["weight"] - found["momentum_buffer"] > 0
    for name in names if whole else names[:1]:
        visit(name, names if whole else [names[-1]], train=False)


# Twelve runs of one model, each with its sharding strategy, optimizer, formats of states and layout. A pair with the
# same optimizer must load bit-equal states; where the run that loads keeps states in fewer bits than were saved, main
# parameters are bit-equal and moments as near as their format. A pair with different optimizers must be refused with
# the flag, both values and the remedy.

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


def wrong_loads(checkpoints: Checkpoints, name: str, sources: list[str]) -> dict[str, list[str]]:
    """Source -> what is wrong with its load by the run `name`; a refusal that should be is not."""
    target = DOZEN[name]
    bounds = {source: rounded(DOZEN[source], target) for source in sources}
    found = checkpoints.visit(name, target.world_size, target.config, sources, False, bounds)
    for source in sources:
        if DOZEN[source].optimizer != target.optimizer:
            rule = f"--optimizer is {DOZEN[source].optimizer} in the checkpoint and {target.optimizer} in the run: "
            refused = [line for line in found[source] if rule in line and "--no-load-optim" in line]
            found[source] = [] if refused and refused == found[source] else ["not refused", *found[source]]
    return {source: wrong for source, wrong in found.items() if wrong}


def test_strategies_optimizers_and_formats_load_each_other_or_refuse(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Adam's states into fewer bits, and those of another optimizer; all pairs of the dozen by --whole."""
    checkpoints, whole = Checkpoints(tmp_path), pytestconfig.getoption("--whole")
    sources = list(DOZEN) if whole else ["adam-dp2-whole", "sgd-tp2"]
    for name in sources:
        checkpoints.visit(name, DOZEN[name].world_size, DOZEN[name].config, train=True)
    for name in DOZEN if whole else ["adam-fp8-ep2-parameters"]:
        assert wrong_loads(checkpoints, name, sources) == {}, name
    # The remedy of the refusal: weights go on, moments begin anew.
    target = DOZEN["own-dp2-gradients"]
    config = replace(target.config, checkpoint=replace(target.config.checkpoint, load_optim=False))
    wrong = checkpoints.visit("anew", target.world_size, config, ["sgd-tp2"])["sgd-tp2"]
    assert wrong and not [key for key in wrong if key.startswith(("initial weight", "checkpoint"))]
