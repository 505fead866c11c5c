"""Each built-in extension can be deleted: its flags disappear, errors for these flags name the extension, and the
results of runs stay bit-identical.

Each trial deletes several extensions. For all extensions A and B such that A does not need B, one trial deletes B and
keeps A. In this trial, A fails if it imports or registers something of B without declaring B in `needs`. --whole tests
each deletion separately.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from megatron import extensions
from tests.limits import HANG
from tests.tiny import TINY

ROOT = Path(__file__).parents[2]

RUN = f"{TINY} --tp 2 --pp 2 --num-layers 4 --hidden-size 32 --seq-length 16 --micro-batch-size 1 --train-iters 3"

# Program that runs in the copy of the library without the deleted extensions. The program writes the flags that --help
# all shows, the errors for the given flags, and the losses of 3 steps.
TRIAL = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

sys.path.insert(0, folder)
os.chdir(folder)

import megatron
from megatron.extensions import load
from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.training.config.arguments import command_line, parse_args
from megatron.training.config.validation import resolve_legal
from megatron.training.reliability.launch import Launch


def said(*argv):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err, suppress(SystemExit):
        command_line(argv, Launch())
    return out.getvalue() + err.getvalue()


def losses(rank, world_size, flags):
    from megatron.training.train_step import train_step

    with local_run(resolve_legal(parse_args(flags), world_size), rank, world_size) as run:
        for _ in range(3):
            train_step(run)
        return [loss.tolist() for loss in run.interval.losses]


load()
assert megatron.__path__ == [f"{folder}/megatron"]
found = {"help": said("--help", "all"), "refused": {flag: said(*run, flag) for flag in given}}
Path(answer).write_text(json.dumps(found | {"losses": run_world(4, losses, run)}))
"""
SERVER = mp.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "torch._dynamo"])


def tried(folder: Path, given: list[str]) -> dict[str, Any]:
    """Run a trial in a separate process that has already imported torch but no module of this library."""
    with TemporaryDirectory() as name, ProcessPoolExecutor(1, SERVER) as process:
        answer = Path(name) / "answer"
        told = {"folder": str(folder), "run": RUN.split(), "given": given, "answer": str(answer)}
        process.submit(exec, TRIAL, told).result(HANG)
        found: dict[str, Any] = json.loads(answer.read_text())
    return found


@cache
def whole() -> dict[str, Any]:
    return tried(ROOT, [])


def with_users(names: Iterable[str]) -> frozenset[str]:
    """Return the given extensions together with all extensions that depend on them."""
    gone = frozenset(names)
    while more := {each.name for each in extensions.BUILT_IN if gone & set(each.needs)} - gone:
        gone |= more
    return gone


NAMES = [extension.name for extension in extensions.BUILT_IN]


def deleted_together() -> Iterator[frozenset[str]]:
    """Yield sets of extensions. Each trial deletes one set. Each set is chosen so that its trial covers as many new
    pairs of a deleted extension and a remaining extension as possible."""
    draw = Random(0)
    sets = [with_users(draw.sample(NAMES, count)) for count in (1, 2, 3, 4, 5, 6, 8, 10) for _ in range(150)]
    sets += [with_users([name]) for name in NAMES]
    # maps each extension to the extensions that have not yet been tested without it
    untried = {name: frozenset(NAMES) - with_users([name]) for name in NAMES}
    while any(untried.values()):
        best = max(sets, key=lambda gone: sum(len(untried[name] - gone) for name in gone))
        yield best
        untried |= {name: untried[name] & best for name in best}


TOGETHER = list(deleted_together())


def without(gone: frozenset[str], folder: Path) -> None:
    """Copy the library without the given extensions."""
    # compiled modules are also copied, and they stay valid because copytree preserves modification times
    shutil.copytree(ROOT / "megatron", folder / "megatron")
    source = folder / "megatron" / "extensions" / "__init__.py"
    text = source.read_text()
    for place in [each.place for each in extensions.BUILT_IN if each.name in gone]:
        shutil.rmtree(folder / "megatron" / "extensions" / place)
        text, count = re.subn(rf'    BuiltIn\(\s*"{place}",.*?\),\n(?=    BuiltIn|\))', "", text, flags=re.DOTALL)
        assert count == 1, place
    source.write_text(text)


def listed(text: str) -> set[str]:
    """Return the flags that a help text lists, without flags that are only mentioned in the texts of other flags."""
    usages = [line[2:].split("  ")[0] for line in text.splitlines() if line.startswith("  --")]
    return {flag for usage in usages for flag in re.findall(r"--[\w-]+", usage)}


def test_each_extension_runs_without_each_that_it_does_not_need() -> None:
    for name in NAMES:
        for other in set(NAMES) - with_users([name]):
            assert any(name in gone and other not in gone for gone in TOGETHER)


@pytest.mark.grid("which", range(len(TOGETHER)), NAMES)
def test_the_library_runs_without_an_extension(which: int | str, tmp_path: Path) -> None:
    """Over all trials, the flags of each extension are passed once."""
    gone = with_users([which]) if isinstance(which, str) else TOGETHER[which]
    asked = gone if isinstance(which, str) else gone.difference(*TOGETHER[:which])
    without(gone, tmp_path)
    index = dict(line.split(": ") for line in extensions.INDEX.read_text().splitlines())
    flags = {name: index.get(name, "").split() for name in gone}
    values = {name: [flag for flag in flags[name] if "=" in flag] for name in asked}
    some = {name: [*sorted({*flags[name]} - {*values[name]})[:3], *values[name]] for name in asked}
    found = tried(tmp_path, [flag for given in some.values() for flag in given])
    for name in gone:
        assert not listed(found["help"]) & {*flags[name]}
    for name, given in some.items():
        assert {*flags[name]} & listed(whole()["help"]) or flags[name] == values[name]
        for flag in given:
            what = f"{flag}: is a flag" if "=" not in flag else f"{flag.replace('=', ' ')}: is a value"
            owners = [each for each in gone if flag in flags[each]]
            told = [f"{what} of the extension {owner}, which is not installed" for owner in owners]
            assert any(text in found["refused"][flag] for text in told), flag
    assert found["losses"] == whole()["losses"]
