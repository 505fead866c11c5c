"""Save checkpoints of trained models under one layout, and load them bit for bit under other layouts. --whole tests all
pairs of layouts.

Under each layout, a model is trained for one step in bf16 and saved. The saved values differ between layouts because of
rounding. Each checkpoint is then loaded under other layouts (`megatron.testing.reshard`). The loaded parameters, fp32
main parameters, both moments of Adam, the momentum of Muon and expert biases must be bit-identical to the saved values.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron.testing.reshard import Checkpoints, kinds
from megatron.training.config.arguments import parse_args

COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --make-vocab-size-divisible-by 8 "
    "--lr 1e-2 --mock-data --global-batch-size 12 --train-iters 2 --eval-iters 0 --num-workers 0 --bf16 --cpu"
)
TABLE = yaml.safe_load(Path(__file__).with_name("reshard.yaml").read_text())
MODELS: dict[str, str] = TABLE["models"]
LAYOUTS: dict[str, dict[str, tuple[int, str]]] = TABLE["layouts"]
STATES = {"sgd": ["momentum_buffer"], "own": ["exp_avg", "exp_avg_sq", "exp_avg_slow"]}
"""Names of the optimizer states of optimizers other than Adam and Muon, keyed by optimizer."""


@pytest.mark.parametrize("family", list(MODELS))
def test_checkpoints_load_under_other_layouts(tmp_path: Path, family: str, pytestconfig: pytest.Config) -> None:
    """Each layout loads the checkpoint of the previous layout. The first layout in the list loads the checkpoint that
    the last layout saved. With --whole, every layout loads every checkpoint."""
    whole, checkpoints = pytestconfig.getoption("--whole"), Checkpoints(tmp_path)
    names = list(LAYOUTS[family])
    names = names if whole or len(names) < 3 else names[::3]

    def visit(name: str, sources: list[str], train: bool) -> None:
        world_size, flags = LAYOUTS[family][name]
        config = parse_args(f"{COMMON} {MODELS[family]} {flags}".split())
        assert checkpoints.visit(name, world_size, config, sources, train) == {source: [] for source in sources}

    for before, name in zip([None, *names], names, strict=False):
        visit(name, [before] if before else [], train=True)
    found = kinds(checkpoints.saved[names[0]].truth)
    assert {"weight", "main_param", *STATES.get(family, ["exp_avg", "exp_avg_sq"])} <= found.keys()
    if family == "muon":
        assert found["exp_avg"] == found["exp_avg_sq"] == found["weight"] - found["momentum_buffer"] > 0
    for name in names if whole else names[:1]:
        visit(name, names if whole else [names[-1]], train=False)


def test_states_load_into_lower_precision(tmp_path: Path) -> None:
    """After loading, main parameters are bit-identical, and moments are as close to the saved values as their number
    formats allow. The second moment is stored as its square root. If main parameters are stored as bf16 parameters and
    remainders, parameters halfway between two bf16 numbers are rounded away from zero."""
    checkpoints, model = Checkpoints(tmp_path), f"{COMMON} {MODELS['experts']}"
    checkpoints.visit("whole", 2, parse_args(model.split()), train=True)
    formats = "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"
    config = parse_args(f"{model} --ep 2 --data-parallel-sharding-strategy optim_grads_params {formats}".split())
    bounds = {"weight": 2**-7, "exp_avg": 2**-3, "exp_avg_sq": 2**-9}
    assert checkpoints.visit("few", 4, config, ["whole"], False, {"whole": bounds}) == {"whole": []}
