"""Tests of loading extensions, of flags that extensions register, and of error messages about faulty extensions.

Registries cannot be emptied, so each test case runs in a separate process, usually a fork.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apart import run_command
from tests.forked import ROOT, run_program

TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 50 --lr 1e-3 --mock-data "
    "--train-iters 4 --dry-run"
).split()

FLAGS = '''
from dataclasses import dataclass
from megatron.core.config.norms import NORMALIZATIONS
from megatron.training.extensions import Problem, extension_flags

NORMALIZATIONS.register("OwnNorm", "nowhere:OwnNorm")

def rules(config, world_size):
    share = config.options(Options).own_share
    if share > 1:
        yield Problem("--own-share", share, f"must be at most 1 on {world_size} ranks", "nearest: 1")

@extension_flags("of the test", rules=rules)
@dataclass(frozen=True)
class Options:
    own_share: float = 0.5
    """Share that is kept."""
    own_words: tuple[str, ...] | None = None
    """Words."""
    own_switch: bool = False
    """Switch."""
'''


def run(tmp_path: Path, source: str, *argv: str, code: int | None = None) -> subprocess.CompletedProcess[str]:
    (tmp_path / "own.py").write_text(source)
    flags = (*TINY, "--extension", tmp_path / "own.py", *argv)
    return run_program(ROOT / "pretrain_gpt.py", *flags, cwd=tmp_path, code=code)


def test_flags_of_an_extension_are_in_the_help(tmp_path: Path) -> None:
    done = run(tmp_path, FLAGS, "--help", "all", code=0)
    assert "\nof the test:\n" in done.stdout and "Share that is kept. (default: 0.5)" in done.stdout
    assert "--normalization {LayerNorm,RMSNorm,OwnNorm}" in done.stdout


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--own-share 2", "--own-share 2.0: must be at most 1 on 1 ranks; nearest: 1"),
        ("--own-share x", "--own-share x: must be a number; for example 0.1 or 1e-4"),
        ("--own-shar 0.1", "--own-shar 0.1: unknown flag; did you mean --own-share?"),
        (
            "--normalization OwnNor",
            "--normalization OwnNor: must be one of LayerNorm, RMSNorm, OwnNorm; nearest: OwnNorm",
        ),
    ],
)
def test_flags_are_validated(argv: str, problem: str, tmp_path: Path) -> None:
    done = run(tmp_path, FLAGS, *argv.split(), code=2)
    assert problem in done.stderr


BUGGY = """
import torch
from megatron.core.config.activations import ACTIVATIONS

def helper(x):
    {bug}

@ACTIVATIONS.register("buggy")
def build_buggy(name, config, ctx):
    def buggy(x):
        helper(x)
        return x
    return buggy
"""
NOPE, PLAN = BUGGY.format(bug="x.nope()"), "--json --activation-func buggy"
LACKS_NOPE = "AttributeError: 'FakeTensor' object has no attribute 'nope'"
RAISES = BUGGY.format(bug="raise ValueError('deep')")
ALONE = BUGGY.format(bug="torch.distributed.get_rank()")
WITHOUT_GROUP = "ValueError: Default process group has not been initialized"
RULE = FLAGS.replace("config.options(Options).own_share", "config.options(Options).nope")
RULE = RULE.replace("rules=rules", "rules=rules, always=True")
RULE_LINE = 1 + FLAGS[: FLAGS.index("share = config")].count("\n")
TWICE = "from megatron.core.config.optimizers import OPTIMIZERS\n\nOPTIMIZERS.register('adam', object)\n"
WRONG_FORM = (
    "from megatron.core.config.activations import ACTIVATIONS\n\n@ACTIVATIONS.register('mine')\ndef mine(x): ...\n"
)
UNWRITTEN = {
    "optimizer": (
        "from megatron.core.config.optimizers import OPTIMIZERS\n\n\n"
        "@OPTIMIZERS.register('mine')\ndef mine(config): ...\n",
        "--optimizer mine: must accept (config, meta), but accepts (config)",
    ),
    "metric": (
        "from megatron.training.hooks import Callback\n\nclass Mine(Callback):\n    def metric(self): ...\n",
        "callback Mine: metric is never called; nearest: metrics",
    ),
    "loss": (
        "from megatron.core.models.gpt.loss import TokenLoss\nfrom megatron.core.config.losses import LOSSES\n\n"
        "@LOSSES.register('mine')\nclass Mine(TokenLoss):\n    def forward(self): ...\n",
        "--loss-func mine: has no __call__() of its own",
    ),
    "callback": (
        "from megatron.training.hooks import Callback\n\nclass Mine(Callback):\n    def on_stepend(self, run): ...\n",
        "callback Mine: on_stepend is no event; nearest: on_step_end",
    ),
}
KNOWN_FLAG = """
from dataclasses import dataclass
from megatron.training.extensions import extension_flags
@extension_flags("t")
@dataclass(frozen=True)
class Own:
    lr: float = 1.0
"""
METHOD = KNOWN_FLAG.replace("lr: float = 1.0", "own: float = 1.0\n    def validate(self, config, world_size): ...")
WRONG = "--swiglu --unknown-flag"
FAILS: dict[str, tuple[str, str, int, str]] = {
    "import": (
        "import math\nimport no_such_module\n",
        WRONG,
        2,
        "ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "raises": ("x = 1\ndef f():\n    raise KeyError('deep')\nf()\n", WRONG, 3, "KeyError: 'deep'"),
    "syntax": ("x = (\n", WRONG, 1, "SyntaxError: '(' was never closed"),
    "twice": (TWICE, WRONG, 3, "--optimizer adam is registered twice: at "),
    "wrong form": (
        WRONG_FORM,
        WRONG,
        3,
        "--activation-func mine: must accept (name, config, ctx), but accepts (x); correct",
    ),
    **{
        f"unwritten {kind}": (source, WRONG, 3 if kind in ("callback", "metric") else 4, said)
        for kind, (source, said) in UNWRITTEN.items()
    },
    "known flag": (KNOWN_FLAG, WRONG, 4, "--lr is a flag already; rename Own.lr"),
    "method of rules": (METHOD, WRONG, 4, "the flags 't': Own.validate is never called; register it as rules="),
    "rule": (RULE, "", RULE_LINE, "AttributeError: 'Options' object has no attribute 'nope'; correct"),
    "rule beside a wrong flag": (
        RULE,
        "--swiglu 1",
        RULE_LINE,
        "AttributeError: 'Options' object has no attribute 'nope'",
    ),
    "plan": (NOPE, PLAN, 6, LACKS_NOPE),
    "plan without a process group": (ALONE, PLAN, 6, WITHOUT_GROUP),
    "plan of a device": (RAISES, f"{PLAN} --device h100", 6, "ValueError: deep"),
    "search": (NOPE, f"{PLAN} --device h100 --suggest", 6, LACKS_NOPE),
}
"""Test cases of faulty extensions. Each case consists of the source code of the extension, the flags, and the line
number and the text of the only expected message."""


@pytest.mark.parametrize(("source", "flags", "line", "what"), FAILS.values(), ids=FAILS.keys())
def test_a_failing_extension_gives_one_message_with_file_and_line(
    source: str, flags: str, line: int, what: str, tmp_path: Path
) -> None:
    done = run(tmp_path, source, *flags.split(), code=2)
    assert "Traceback" not in done.stderr, done.stderr
    (told,) = [each for each in done.stderr.splitlines() if "--extension: " in each]
    place = f"--extension: {tmp_path / 'own.py'}:{line}: "
    assert told.startswith(f"  {place}") and what in told, done.stderr
    if PLAN in flags:
        (problem,) = json.loads(done.stdout)["problems"]
        assert problem["text"].startswith(place) and problem["flag"] == "--extension"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "", "--extension", "absent.py", code=2)
    assert "--extension: absent.py: there is no such file" in done.stderr


def test_an_incomplete_schedule_is_refused(tmp_path: Path) -> None:
    source = (
        "from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES, gpipe\n"
        "@PIPELINE_SCHEDULES.register('lazy')\ndef lazy(p, m):\n    return [each[:-1] for each in gpipe(p, m)]\n"
    )
    flags = "--pp 2 --world-size 2 --global-batch-size 4 --pipeline-schedule".split()
    done = run(tmp_path, source, *flags, "lazy", code=2)
    assert "--pipeline-schedule lazy: with 4 micro-batches on 2 ranks" in done.stderr
    assert run(tmp_path, source.replace("[:-1]", ""), *flags, "lazy").returncode == 0


def test_extensions_named_in_a_file_are_loaded_even_if_moved(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("extension: [gone/own.py]\nown_share: 0.25\nown_words: [a, b]\n")
    done = run(tmp_path, FLAGS, "--config", str(config), code=0)
    code = (
        "import sys\nfrom megatron.training.config.arguments import parse_args, save_config\n"
        "config = parse_args(sys.argv[1:])\nsave_config(config, 'saved.yaml')\n"
        "again = parse_args(['--config', 'saved.yaml'])\nassert again == config, (again, config)\n"
        "(options,) = (each for each in again.extension_options if type(each).__module__ == 'extension_own')\n"
        "assert again.optimizer.options(type(options)) is options\n"
        "print(options, again.extensions.extension)"
    )
    argv = ["--config", str(config), "--extension", "own.py", "--own-switch"]
    path = {"PYTHONPATH": str(ROOT)}
    done = run_command([sys.executable, "-c", code, *argv], code=0, cwd=tmp_path, env=path)
    assert done.stdout == (
        f"Options(own_share=0.25, own_words=('a', 'b'), own_switch=True) ('{tmp_path.resolve() / 'own.py'}',)\n"
    )
