"""After `pip install .` into a new virtual environment, modules and commands work outside the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron
from tests.apart import ROOT, run_command

COMMANDS = """
import sys
from importlib.metadata import distribution
from pathlib import Path

import paritrain
import megatron

assert paritrain.SOURCE.is_relative_to(sys.prefix) and Path(megatron.__file__).is_relative_to(paritrain.SOURCE)
for entry in distribution("paritrain").entry_points:
    sys.argv = [entry.name, "--help"]
    try:
        entry.load()()
    except SystemExit as done:
        print(entry.name, done.code)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a virtual environment in which this tree is installed. The dependencies come from the environment in which
    the tests run."""
    folder = tmp_path_factory.mktemp("package")
    source, home = folder / "source", folder / "environment"
    source.mkdir()  # install from a copy, because building leaves files behind
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "pretrain_gpt.py"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron", "paritrain", "tools"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    venv.create(home, symlinks=True)
    (site_of(home) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-compile", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "install", *options, "."]
    run_command(command, code=0, cwd=source)
    return home


def site_of(home: Path) -> Path:
    (site,) = home.glob("lib/python*/site-packages")
    return site


def run(environment: Path, folder: Path, *command: str | Path) -> str:
    """Run a program that is installed in the virtual environment, and return its output. The working directory is
    outside the repository."""
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    words = [environment / "bin" / command[0], *command[1:]]
    return run_command(words, code=0, cwd=folder, env=environ | {"OMP_NUM_THREADS": "1"}).stdout


def test_every_module_and_data_file_is_installed(environment: Path) -> None:
    site, inside = site_of(environment), Path("paritrain/_src")
    here = {inside / path.relative_to(ROOT) for path in [*ROOT.glob("megatron/**/*.py"), ROOT / "pretrain_gpt.py"]}
    tools = [*ROOT.glob("tools/*.py"), *ROOT.glob("tools/common/*.py"), *ROOT.glob("tools/pictures/*.py")]
    here |= {inside / "megatron_tools" / path.relative_to(ROOT / "tools") for path in tools}
    here |= {path.relative_to(ROOT) for path in ROOT.glob("paritrain/*.py")}
    there = {path.relative_to(site) for path in site.rglob("*.py")}
    assert len(here) > 100
    assert here - there == set()
    assert {path.parts[0] for path in there} == {"paritrain"}

    kinds = ("toml", "json", "yaml", "typed", "txt")
    here = {path.relative_to(ROOT) for kind in kinds for path in ROOT.glob(f"megatron/**/*.{kind}")}
    assert len(here) >= 6
    assert [path for path in here if not (site / inside / path).exists()] == []


def test_each_command_prints_its_usage(environment: Path, tmp_path: Path) -> None:
    out = run(environment, tmp_path, "python", "-c", COMMANDS)
    names = [path.stem for path in ROOT.glob("tools/*.py") if path.stem not in ("__init__", "common", "jsonl")]
    assert len(names) > 8
    for command in ("pretrain_gpt", *(f"megatron-{name.replace('_', '-')}" for name in names)):
        assert command == "pretrain_gpt" or f"usage: {command} " in out, command
        assert f"\n{command} 0\n" in out, command


BOTH = """
import megatron.core
print(megatron.core.__file__)
try:
    import paritrain
except ImportError as error:
    print(error)
"""


@pytest.fixture
def other_megatron(environment: Path) -> Iterator[Path]:
    """Add the package `megatron.core` of a different distribution to the environment. As in megatron-core, `megatron`
    is a namespace package."""
    other = site_of(environment) / "megatron"
    (other / "core").mkdir(parents=True)
    (other / "core/__init__.py").write_text("__version__ = 'of the other'\n")
    yield other
    shutil.rmtree(other)


def test_two_distributions_with_a_megatron_package_do_not_mix(
    environment: Path, other_megatron: Path, tmp_path: Path
) -> None:
    """Each distribution is imported as a whole. Importing modules of both distributions in one process is an error."""
    mixed = run(environment, tmp_path, "python", "-c", BOTH)
    assert mixed.startswith(f"{other_megatron / 'core/__init__.py'}\n")
    assert "import paritrain first, or use the other one in a process of its own" in mixed
    ours = run(environment, tmp_path, "python", "-c", "import paritrain, megatron.core; print(megatron.core.__file__)")
    assert ours == f"{site_of(environment) / 'paritrain/_src/megatron/core/__init__.py'}\n"
    assert run(environment, tmp_path, "pretrain_gpt", "--version").startswith("pretrain_gpt ")
    assert [path.name for path in other_megatron.rglob("*.py")] == ["__init__.py"]


def test_torchrun_starts_the_package(environment: Path, other_megatron: Path, tmp_path: Path) -> None:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paritrain"]
    run(environment, tmp_path, "python", *ranks, *TINY.split(), "--mock-data", "--tp", "2", "--save", "saved")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert "iter_0000002" in run(environment, tmp_path, "megatron-inspect-checkpoint", "saved")


TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --cpu --tokenizer-type ByteTokenizer "
    "--train-iters 2 --lr 1e-3 --eval-iters 0 --log-interval 1 --num-workers 0 --metrics-file metrics.jsonl"
)


def test_installed_commands_prepare_data_and_train(environment: Path, tmp_path: Path) -> None:
    documents = "".join(json.dumps({"text": f"{n} " * 40}) + "\n" for n in range(30))
    (tmp_path / "text.jsonl").write_text(documents)
    data = "--input text.jsonl --output-prefix data --tokenizer-type ByteTokenizer --append-eod --workers 2"
    run(environment, tmp_path, "megatron-preprocess-data", *data.split())
    run(environment, tmp_path, "pretrain_gpt", *TINY.split(), "--data-path", "data_text_document")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_installed_commands_are_the_tools() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    programs = [path for pattern in ("tools/*.py", "tools/pictures/*.py") for path in ROOT.glob(pattern)]
    names = {path.stem.replace("_", "-") for path in programs if "run_tool(main)" in path.read_text()}
    assert len(names) > 20
    assert set(project["scripts"]) == {"pretrain_gpt", "megatron-lm-eval", *(f"megatron-{name}" for name in names)}


def test_pinned_versions_satisfy_the_package_requirements() -> None:
    files = [ROOT / "requirements.txt", ROOT / "requirements-dev.txt"]
    pinned = set(re.findall(r"^([\w.-]+)==", "".join(file.read_text() for file in files), re.MULTILINE))
    asked = set(re.findall(r'"([\w.-]+)>=', (ROOT / "pyproject.toml").read_text()))
    # these packages are only tested manually, by tests/extensions/object_storage/emulators.py
    without_tests = {"adlfs", "gcsfs"}
    assert asked - {"setuptools"} - without_tests <= pinned
    assert "\ntorch==2.13.0\n" in (ROOT / "requirements.txt").read_text()


def test_the_citation_names_the_version() -> None:
    assert f"\nversion: {megatron.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{megatron.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
