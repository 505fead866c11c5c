"""The commands in README.md and docs run unchanged.

A single shell runs all blocks that are fenced as bash, in their order, in a copy of the repository. Commands that take
a long time are fenced as text, and only their flags are validated. Blocks that must not run, such as an sbatch line,
are fenced without a language.

Code blocks that are fenced as python are also executed. If a Python block is only a fragment, a comment before it
contains the rest of the program. The comment consists of a line `<!-- python`, the program with a line BLOCK in place
of the fragment, and a line `-->`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES, build_schedule
from megatron.training.config.arguments import command_line
from megatron.training.config.flags import spelling_table
from megatron.training.config.validation import notices, validate
from megatron.training.reliability.launch import Launch
from tests.apart import ROOT, losses_in, python_apart, run_command
from tests.extensions import installed

README = (ROOT / "README.md").read_text()
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
BASH_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXT_BLOCK = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON_BLOCK = re.compile(
    r"(?:^<!-- python\n((?:(?!-->)[^\n]*\n)*)-->\n\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
"""Pattern of a Python block, with two groups. The first group is the content of the comment before the block, if there
is such a comment. The second group is the content of the block."""
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def blocks(page: str) -> list[str]:
    return BASH_BLOCK.findall((ROOT / page).read_text())


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the repository without the output files of earlier runs."""
    folder = tmp_path_factory.mktemp("clone") / "tree"
    left = (".git", ".venv", ".hypothesis", "runs", "cache", "__pycache__", ".*_cache", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left))
    return folder


def run_blocks(commands: list[str], clone: Path, **environ: str) -> str:
    """Run the blocks of shell commands in `commands`, and return their output."""
    script = "set -euxo pipefail\n" + "\n".join(commands)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    environment |= environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    return run_command(["bash", "-c", script], code=0, cwd=clone, env=environment).stdout


CHECKED = ("README.md", "docs/getting_started.md")
"""Pages whose commands are executed by separate tests, which also check the results."""


def test_the_two_main_commands_of_the_readme_run(clone: Path) -> None:
    # These variables shorten the quickstart. The quickstart then trains for a few iterations on a small text, and runs
    # a single test file.
    short = {"TRAIN_ITERS": "4", "CORPUS_MB": "2", "PYTEST_ADDOPTS": "tests/pure/test_batch_size.py"}
    out = run_blocks(blocks("README.md")[:1], clone, **short)
    assert (clone / "runs/quickstart/loss.png").read_bytes().startswith(b"\x89PNG")
    assert (clone / "runs/quickstart/sample.txt").read_text().strip()
    assert "memory by category, planned and held" in (clone / "runs/quickstart/report.html").read_text()
    assert re.search(r"\d+ passed", out)


def test_the_first_run_of_the_readme_works(clone: Path) -> None:
    (commands,) = blocks("README.md")[1:]
    run_blocks([commands], clone)
    first_run = losses_in(clone / "runs/first/checkpoints/metrics.jsonl")
    assert len(first_run) == 5
    assert first_run[-1] < first_run[0] - 1


def test_the_getting_started_page_runs(clone: Path) -> None:
    out = run_blocks(blocks("docs/getting_started.md"), clone)
    assert "exit code 2" in out
    one, six = losses_in(clone / "runs/one.jsonl"), losses_in(clone / "runs/six.jsonl")
    assert len(one) == 4
    assert six == pytest.approx(one, rel=1e-5)


RUN = [page for page in PAGES if blocks(page) and page not in CHECKED]
LONG_PAGES = "conversion data evaluation extending mixture_of_experts multi_token_prediction planner"
LONG = {f"docs/{page}.md" for page in LONG_PAGES.split()}
"""Documentation pages whose commands are executed only with --whole, because other tests run the same programs."""


@pytest.mark.grid("page", [page for page in RUN if page not in LONG], RUN)
def test_commands_of_a_page_run(page: str, clone: Path) -> None:
    run_blocks(blocks(page), clone)


def text_commands(page: str) -> list[str]:
    """Return all commands that run pretrain_gpt.py in the blocks of a page that are fenced as text. Lines that end with
    a backslash are joined with the next line."""
    text = "\n".join(TEXT_BLOCK.findall((ROOT / page).read_text())).replace("\\\n", " ")
    return [line for line in text.splitlines() if re.match(r"(\w+=\S+ )*(python pretrain_gpt.py|bash scripts/)", line)]


@pytest.mark.parametrize("page", [page for page in PAGES if text_commands(page)])
def test_commands_of_text_blocks_are_valid(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With LAUNCH=echo, the launch scripts print the command line instead of running it."""
    monkeypatch.chdir(ROOT)
    for line in text_commands(page):
        start = line if "bash " in line else f"echo {line.removeprefix('python ')}"
        environment = os.environ | {"PYTHON": "echo"}
        done = run_command(["bash", "-c", start], code=0, env=environment)
        program, *argv = shlex.split(done.stdout.splitlines()[-1])
        command = command_line(argv, Launch())
        assert program == "pretrain_gpt.py" and command.world_size is not None
        assert validate(command.config, command.world_size) == [], line
        assert notices(command.config, command.world_size) == [], line


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_all_links_resolve(page: str) -> None:
    targets = [target for target in LINK.findall((ROOT / page).read_text()) if "://" not in target]
    missing = [target for target in targets if not ((ROOT / page).parent / target).exists()]
    assert not missing


def test_the_site_is_built_from_every_page(tmp_path: Path) -> None:
    """With --strict, mkdocs reports an error for broken links and anchors, for pages that are missing from the
    navigation, and for docstrings that cannot be parsed. The option -q is not used, because mkdocs would then ignore
    warnings."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    build = "-m mkdocs build --strict -f scripts/mkdocs.yml -d".split()
    run_command([sys.executable, *build, tmp_path], code=0)
    pages = {path.stem for path in ROOT.glob("docs/*.md")} - {"README"}
    assert pages == {path.parent.name for path in tmp_path.glob("*/index.html")} - {"search"}


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_flags_and_files_in_text_exist(page: str) -> None:
    """Every flag in backticks is a flag of pretrain_gpt.py, of a tool or of an example, and every path in backticks is
    a file."""
    text = (ROOT / page).read_text()
    patterns = ("megatron/**/*.py", "megatron/**/*.toml", "tools/**/*.py", "research/*.py", "scripts/**/*.sh")
    sources = [path for pattern in patterns for path in ROOT.glob(pattern)]
    known = "".join(source.read_text() for source in sources)
    fields = re.findall(r"^    (\w+): ", "".join(path.read_text() for path in ROOT.glob("examples/*.py")), re.MULTILINE)
    spellings = {*spelling_table(), *(f"--{name.replace('_', '-')}" for name in fields)}
    for flag in re.findall(r"`(--[a-z][a-z0-9-]*)", text):
        assert flag in spellings or flag in known, f"{page} names {flag}"
    for path in re.findall(
        r"`((?:megatron|tools|research|scripts|tests|docs|examples)/(?:[\w/]+\.(?:py|sh|md|txt)|[\w/]*))`", text
    ):
        assert (ROOT / path).exists(), f"{page} names {path}"


def test_the_table_in_contributing_names_existing_files() -> None:
    """Each row of the table in CONTRIBUTING.md names an existing file, and a word that this file contains."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `([\w/.]+)` \| `(\w+)` \|$", text, re.MULTILINE)
    assert len(rows) == text[: text.index("## How to add")].count("\n| ") - 2 >= 12
    for path, word in rows:
        assert re.search(rf"\b{word}\b", (ROOT / path).read_text()), f"{word} is not in {path}"


@pytest.mark.skipif(not installed("planner"), reason="the planner is deleted")
def test_the_bubble_table_matches_the_simulator() -> None:
    from megatron.extensions.plan.planner.time.pipeline import post_validated
    from megatron.extensions.plan.simulator.simulator import StageCosts, simulate

    text = (ROOT / "docs/layouts.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % \| (the same|0) \|$", text, re.MULTILINE)
    assert [schedule for schedule, *_ in rows] == ["1f1b", "zb-h1", "zb-h2", "zb-v"]
    for schedule, *shares, ahead in rows:
        for p, share in zip((4, 8, 16), shares, strict=True):
            chunks = PIPELINE_SCHEDULES.facts(schedule).chunks
            bubble = simulate(build_schedule(schedule, p, 2 * p, chunks), StageCosts()).bubble
            _, alone = post_validated(pipeline_lists(schedule, p, 2 * p, chunks, validates=True))
            assert float(share) == round(100 * bubble, 1)
            assert alone == pytest.approx(0 if ahead == "0" else bubble)
    assert "With p = 4 and m = 8, that is 3/8 instead of 3/11." in " ".join(text.split())
    assert round(300 / 11, 1) == float(rows[0][1])


def python_programs(page: str) -> list[str]:
    """Return a complete Python program for each Python code block of a documentation page."""
    found = PYTHON_BLOCK.findall(page)
    assert len(found) == page.count("```python"), "a comment `<!-- python` ends with `-->`, an empty line and its block"
    programs = [[block if line.strip() == "BLOCK" else line for line in around.splitlines()] for around, block in found]
    return ["\n".join(program) or block for program, (_, block) in zip(programs, found, strict=True)]


PYTHON = [
    pytest.param(program, id=f"{page}-{number}")
    for page in ("CONTRIBUTING.md", *PAGES)
    for number, program in enumerate(python_programs((ROOT / page).read_text()), 1)
]


@pytest.mark.parametrize("program", PYTHON)
def test_python_blocks_of_the_docs_run(program: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(program)
    python_apart(
        "-c", "import os, runpy, sys; os.chdir(sys.argv[1]); runpy.run_path('block.py')", str(tmp_path), code=0
    )


def test_a_wrong_keyword_in_the_docs_is_detected(tmp_path: Path) -> None:
    (program,) = (each.values[0] for each in PYTHON if "suits=" in str(each.values[0]))
    (tmp_path / "block.py").write_text(str(program).replace("suits=", "takes="))
    ended = python_apart(str(tmp_path / "block.py"), code=1)
    assert "unexpected keyword argument 'takes'" in ended.stderr
