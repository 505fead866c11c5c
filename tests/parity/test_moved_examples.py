"""Run each example in examples/ once with --extension and once as a built-in extension. The plan, the losses, the
checkpoint and the converted checkpoint must be the same.

In addition, code must not be trusted merely because its file is in the library's folder.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ROOT
from tests.limits import HANG
from tests.parity.test_examples import EXAMPLES
from tests.tiny import TINY

FLAGS = {
    **EXAMPLES,
    "disk_space.py": "--disk-space-interval 2",
    "early_stopping.py": "--patience 3 --eval-interval 2 --eval-iters 1",
    "token_accuracy.py": "--accuracy-interval 2 --eval-iters 1",
    "trained_share.py": "",
    "mlp_output_rms.py": "",
    "memory_storage.py": "",
}

# Program that runs in the folder of a library and imports the library once. The program prints the plan, trains, and
# converts the result.
TRIAL = """
import io, json, multiprocessing, os, runpy, sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

sys.path.insert(0, folder)
os.chdir(folder)
import megatron, megatron.extensions.plan.planner.dry_run, megatron.training.training
from pretrain_gpt import main

assert megatron.__path__ == [f"{folder}/megatron"]


def said(function, *arguments):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code = function(*arguments)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()


def trial(flags, extension, save):
    found = {"plan": said(main, [*flags, *extension, "--dry-run"])}
    found["run"] = said(main, [*flags, *extension, "--save", save, "--metrics-file", f"{save}.jsonl"])[::2]
    sys.argv = ["convert_checkpoint.py", "--input", save, "--output", f"{save}.hf", "--to", "hf", *extension]
    found["conversion"] = said(runpy.run_path, "tools/convert_checkpoint.py", None, "__main__")
    Path(f"{save}.json").write_text(json.dumps(found))


for case in cases:
    process = multiprocessing.get_context("fork").Process(target=trial, args=case)
    process.start()
    process.join()
    assert process.exitcode == 0, case
"""
SERVER = mp.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "torch._dynamo"])


def moved_library(folder: Path) -> Path:
    """Create a copy of the library with all examples as built-in extensions."""
    for name in ("megatron", "tools"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pretrain_gpt.py", folder)
    source = folder / "megatron" / "extensions" / "__init__.py"
    lines = []
    for example in FLAGS:
        own = f"moved/{Path(example).stem}_example"
        (source.parent / own).mkdir(parents=True)
        (source.parent / own / "__init__.py").write_text('"""An example."""\n')
        shutil.copy(ROOT / "examples" / example, source.parent / own / "flags.py")
        lines.append(f'    BuiltIn("{own}", "an example"),\n')
    begin = "BUILT_IN: tuple[BuiltIn, ...] = (\n"
    text = source.read_text()
    assert begin in text
    source.write_text(text.replace(begin, begin + "".join(lines)))
    return folder


def tried(library: Path, results: Path, *, built_in: bool) -> dict[str, dict[str, Any]]:
    """Run all examples, and return the output of the commands, the losses and the saved tensors of each example."""
    results.mkdir()
    saves = {example: results / Path(example).stem for example in FLAGS}
    cases = []
    for example, save in saves.items():
        extension = [] if built_in else ["--extension", str(ROOT / "examples" / example)]
        own = FLAGS[example]
        tiny = TINY.replace("--mock-data", "") if "--dataset-type" in own else TINY
        cases.append(([*tiny.split(), *own.split()], extension, str(save)))
    with ProcessPoolExecutor(1, SERVER) as process:
        process.submit(exec, TRIAL, {"folder": str(library), "cases": cases}).result(len(cases) * HANG)
    return {example: _result(save) for example, save in saves.items()}


def _result(save: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(f"{save}.json").read_text().replace(str(save), "SAVE"))
    assert found["run"][0] == 0, found["run"]
    records = [json.loads(line) for line in Path(f"{save}.jsonl").read_text().splitlines()]
    found["losses"] = [record["lm_loss"] for record in records if "lm_loss" in record]
    found["tensors"] = [path.read_bytes() for path in sorted(save.rglob("*.distcp"))]
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("moved")
    (folder / "library").mkdir()
    library = moved_library(folder / "library")
    return tried(ROOT, folder / "given", built_in=False), tried(library, folder / "built_in", built_in=True)


@pytest.mark.parametrize("example", FLAGS)
def test_examples_work_the_same_as_built_in_extensions(
    example: str, both: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    given, built_in = (each[example] for each in both)
    assert given["losses"] and given["tensors"]
    for what in ("losses", "tensors", "plan", "conversion"):
        assert given[what] == built_in[what], what
