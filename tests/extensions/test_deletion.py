"""Each built-in extension can be deleted: its flags are gone and name it when given, and a run has the same bits."""

from __future__ import annotations

import json
import multiprocessing as mp
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from megatron import extensions
from tests.limits import HANG
from tests.tiny import TINY

ROOT = Path(__file__).parents[2]

RUN = f"{TINY} --tp 2 --pp 2 --num-layers 4 --hidden-size 32 --seq-length 16 --micro-batch-size 1 --train-iters 3"

# Run in the copy: writes the flags that --help all shows, what becomes of the flags given, and the losses of 3 steps.
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
    """In a process of its own, which has imported torch already, and nothing of this library."""
    with TemporaryDirectory() as name, ProcessPoolExecutor(1, SERVER) as process:
        answer = Path(name) / "answer"
        told = {"folder": str(folder), "run": RUN.split(), "given": given, "answer": str(answer)}
        process.submit(exec, TRIAL, told).result(HANG)
        found: dict[str, Any] = json.loads(answer.read_text())
    return found


@cache
def whole() -> dict[str, Any]:
    return tried(ROOT, [])


def without(name: str, folder: Path) -> set[str]:
    """Copies the library without an extension and those that need it. Returns their names."""
    shutil.copytree(ROOT / "megatron", folder / "megatron")  # compiled modules too, which times of change keep valid
    gone = {name}
    while more := {each.name for each in extensions.BUILT_IN if gone & set(each.needs)} - gone:
        gone |= more
    source = folder / "megatron" / "extensions" / "__init__.py"
    text = source.read_text()
    for place in [each.place for each in extensions.BUILT_IN if each.name in gone]:
        shutil.rmtree(folder / "megatron" / "extensions" / place)
        text, count = re.subn(rf'    BuiltIn\(\s*"{place}",.*?\),\n(?=    BuiltIn|\))', "", text, flags=re.DOTALL)
        assert count == 1, place
    source.write_text(text)
    return gone


def listed(text: str) -> set[str]:
    """The flags that a help lists, apart from those that it mentions in the texts of others."""
    usages = [line[2:].split("  ")[0] for line in text.splitlines() if line.startswith("  --")]
    return {flag for usage in usages for flag in re.findall(r"--[\w-]+", usage)}


@pytest.mark.parametrize("name", [extension.name for extension in extensions.BUILT_IN])
def test_the_rest_runs_without_it(name: str, tmp_path: Path) -> None:
    gone = without(name, tmp_path)
    index = dict(line.split(": ") for line in extensions.INDEX.read_text().splitlines())
    flags = {flag: each for each in gone for flag in index.get(each, "").split()}
    values = [flag for flag in flags if "=" in flag]
    found = tried(tmp_path, [*sorted(flags.keys() - values)[:3], *values])
    assert not listed(found["help"]) & flags.keys()
    assert flags.keys() & listed(whole()["help"]) or flags.keys() == {*values}
    for flag, text in found["refused"].items():
        what = f"{flag}: is a flag" if flag not in values else f"{flag.replace('=', ' ')}: is a value"
        assert f"{what} of the extension {flags[flag]}, which is not installed" in text
    assert found["losses"] == whole()["losses"]
