"""Tests of parameter groups with separate learning rates or weight decays, and of frozen parameters. The parity matrix
(tests/parity) tests parameter groups under parallel layouts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.param_groups import ParamGroup
from megatron.core.param_meta import ParamMeta
from megatron.extensions.optim.optimizers.flags import NamedParameterFlags
from megatron.extensions.optim.optimizers.named_parameters import group_rule
from megatron.testing.snapshot import Snapshot, train_in_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from tests.forked import run_program
from tests.tiny import TINY

MODEL = f"{TINY} --fp64 --attention-dropout 0 --hidden-dropout 0 --weight-decay 0.3 --qk-layernorm".split()
GROUPS = [
    *("--param-group", r"layers\.0\..*weight lr_mult=0.1 weight_decay=0"),
    *("--param-group", "linear_fc1 lr_mult=3 wd_mult=2"),
    *("--weight-decay-on", "matrices", "biases", "--apply-wd-to-qk-layernorm"),
]


@pytest.fixture(scope="module")
def changes() -> dict[str, dict[str, torch.Tensor]]:
    """Return the change of each weight in the first step, with and without parameter groups."""
    runs = {"plain": train_in_world(1, MODEL), "own": train_in_world(1, MODEL + GROUPS)}
    return {name: _changes(run) for name, run in runs.items()} | {"initial": _initial(runs["own"])}


def _initial(run: Snapshot) -> dict[str, torch.Tensor]:
    start = "initial weight "
    return {key.removeprefix(start): value for key, value in run.tensors.items() if key.startswith(start)}


def _changes(run: Snapshot) -> dict[str, torch.Tensor]:
    return {name: run.tensors[f"step 1 weight {name}"] - before for name, before in _initial(run).items()}


UPDATES = [
    ("decoder.layers.0.self_attention.linear_qkv.weight", 0.1, 0.0),
    ("decoder.layers.0.mlp.linear_fc1.weight", 3.0, 0.6),  # if several expressions match, the last one applies
    ("decoder.layers.1.mlp.linear_fc1.bias", 3.0, 0.6),
    ("decoder.layers.1.mlp.linear_fc2.weight", 1.0, 0.3),
    ("decoder.layers.1.mlp.linear_fc2.bias", 1.0, 0.3),
    ("decoder.layers.1.self_attention.q_layernorm.weight", 1.0, 0.3),
    ("decoder.layers.1.input_layernorm.weight", 1.0, 0.0),
    ("embedding.word_embeddings.weight", 1.0, 0.0),
]


@pytest.mark.parametrize(("name", "lr_mult", "decay"), UPDATES)
def test_updates_follow_their_parameter_group(
    changes: dict[str, dict[str, torch.Tensor]], name: str, lr_mult: float, decay: float
) -> None:
    """The test compares first updates, because Adam's first update is the learning rate times a direction that depends
    only on the gradient."""
    lr, weight = 1e-2, changes["initial"][name]
    usual = OptimizerConfig().weight_decay_on
    kind = "embeddings" if "embed" in name else "biases" if name.endswith("bias") else "matrices"
    kind = "norms" if "norm" in name else kind
    direction = changes["plain"][name] / lr + (0.3 if kind in usual else 0.0) * weight
    torch.testing.assert_close(changes["own"][name], lr * lr_mult * (direction - decay * weight), rtol=1e-9, atol=1e-12)


def test_groups_are_printed_and_a_resumed_run_reports_differences(tmp_path: Path) -> None:
    files = ["--save", str(tmp_path), "--load", str(tmp_path), "--lr-decay-style", "constant", "--eval-iters", "0"]
    done = run_program("pretrain_gpt.py", *MODEL, *GROUPS, *files, "--train-iters", "2")
    assert "parameter group (lr x 0.1, no weight decay): 7 parameters, " in done.stdout, done.stdout + done.stderr
    assert "parameter group (lr x 3, weight decay x 2): 4 parameters, " in done.stdout
    done = run_program("pretrain_gpt.py", *MODEL, *GROUPS[2:], *files, "--train-iters", "4")
    said = "7 parameters are in a different group than in the checkpoint; decoder.layers.0."
    assert said in done.stdout and ": lr x 0.1, no weight decay there, lr, " in done.stdout, done.stdout


NORMS = ("final_layernorm", "layers.0.input_layernorm")


def test_rules_are_parsed() -> None:
    assert group_rule(r"fc1\.weight lr_mult=2 weight_decay=0").settings == {"lr_mult": 2.0, "weight_decay": 0.0}
    flags = NamedParameterFlags(param_group=("norm weight_decay=0.2", "final wd_mult=1"))
    config = OptimizerConfig(extension_options=(flags,))
    last, first = (ParamMeta(f"decoder.{of}.weight", (4,), role="norm") for of in NORMS)
    assert config.group_of(last) == ParamGroup(wd_mult=1.0)
    assert config.group_of(first).decay(7.0) == 0.2


UNREADABLE = [
    ("norm", "at least one key=value"),
    ("( lr_mult=1", "cannot be read as a regular expression"),
    ("norm lr=1", "'lr' is not one of lr_mult, wd_mult, weight_decay"),
    ("norm lr_mult=fast", "lr_mult needs a number, not 'fast'"),
    ("norm lr_mult=-1", "lr_mult must be finite and not negative"),
    ("norm wd_mult=1 weight_decay=0", "sets the weight decay twice"),
]


@pytest.mark.parametrize(("text", "rule"), UNREADABLE)
def test_unreadable_rules_are_refused(text: str, rule: str) -> None:
    config = resolve(parse_args([*MODEL, "--param-group", text]), 1)
    (problem,) = validate(config, 1)
    assert str(problem).startswith(f"--param-group {text}: ") and rule in str(problem)


def test_frozen_parameters_keep_their_values_and_have_no_state() -> None:
    flags = ["--num-layers", "4", "--freeze", "embedding", "--freeze", r"layers\.[01]\.", "--freeze", "layers.2.*fc1"]
    tensors = train_in_world(1, [*MODEL, *flags]).tensors
    frozen = [key.removeprefix("initial state ") for key in tensors if key.startswith("initial state ")]
    assert "embedding.word_embeddings.weight" in frozen and "decoder.layers.0.mlp.linear_fc2.bias" in frozen
    for name in frozen:
        assert tensors[f"initial state {name}"].equal(tensors[f"step 2 state {name}"])
        assert not [key for key in tensors if key.endswith(f"exp_avg {name}") or key.endswith(f"gradient {name}")]
    trained = [key.removeprefix("initial weight ") for key in tensors if key.startswith("initial weight ")]
    assert "decoder.layers.3.mlp.linear_fc1.weight" in trained and not set(trained) & set(frozen)
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    assert not tensors[f"initial weight {name}"].equal(tensors[f"step 2 weight {name}"])


NOTHING_OR_ALL = [
    (
        r"--param-group 'mlp\.linear_fc3 lr_mult=2' --pp 2",
        "mlp\\.linear_fc3 lr_mult=2: matches no parameter; the nearest names are decoder.layers.0.mlp.linear_fc1.",
    ),
    ("--freeze layer.7", "--freeze layer.7: matches no parameter; the nearest names are decoder."),
    ("--freeze . --pp 2", "leaves nothing to train; names are for example decoder.final_layernorm"),
]


@pytest.mark.parametrize(("flags", "message"), NOTHING_OR_ALL)
def test_an_expression_that_matches_nothing_or_all_is_refused(flags: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        train_in_world(2, [*MODEL, *shlex.split(flags)])


def test_frozen_parameters_have_no_states_and_restart_from_zero(tmp_path: Path) -> None:
    base = ("pretrain_gpt.py", *TINY.split(), "--bf16", "--lr-decay-style", "constant")
    save = ("--save", str(tmp_path), "--load", str(tmp_path))
    freeze = ("--freeze", r"layers\.0\.", "--freeze", "embedding")
    for iterations, flags, said in (("2", (), ""), ("4", freeze, ""), ("6", freeze, ""), ("8", (), "start at zero")):
        done = run_program(*base, *save, "--train-iters", iterations, *flags, code=0)
        assert ("start at zero" in done.stdout) == bool(said), done.stdout
        assert iterations == "2" or "loaded checkpoint of iteration" in done.stdout
