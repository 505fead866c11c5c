"""Write one page of tables from the measurements of a GPU: `python tools/bench/gpu_page.py FOLDER`.

The tool reads every JSON file in FOLDER that tools/bench/gpu.py or tools/bench/micro.py wrote, the output of pytest in
tests.txt, and the commands of scripts/gpu_first_hour.sh in calls.jsonl. The tool writes FOLDER/page.md. The page lists
missing or unreadable files, which do not cause an error."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.side_by_side import replace_text

Figures = Mapping[str, Any]

EXPECTED = {
    "nccl.txt": "ranks that share the GPU over NCCL",
    "tests.txt": "tests/gpu",
    "llama-bf16.json": "layers of Llama 3.1 8B in bf16",
    "llama-fp8.json": "layers of Llama 3.1 8B in fp8",
    "headline-bf16.json": "as many layers as fit, bf16",
    "headline-fp8.json": "as many layers as fit, fp8",
    "compile.json": "compiled regions compared with uncompiled ones",
    "curves.jsonl": "losses compared with those of transformers",
    "device.yaml": "rates of this GPU, measured by tools/calibrate.py",
    "tiny.json": "a tiny model",
    "micro.json": "parts one by one",
    "gpt-bf16.json": "GPT of 1.3B parameters in bf16",
    "gpt-graphs.json": "GPT of 1.3B parameters in bf16, with CUDA graphs",
    "recipes.json": "fp8 recipes compared",
}
"""Files that scripts/gpu_first_hour.sh writes, with their descriptions."""

MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
"""Exceptions that can occur when a JSON file does not have the expected structure."""


@dataclass
class Found:
    """Contents of a folder with measurements."""

    machines: dict[str, Figures] = field(default_factory=dict)
    """Description of the device on which each file was measured, keyed by file."""

    runs: list[tuple[str, Figures]] = field(default_factory=list)
    """Pairs of file name and measured figures, one for each model."""

    compared: dict[str, list[Figures]] = field(default_factory=lambda: defaultdict(list))
    parts: dict[str, list[Figures]] = field(default_factory=lambda: defaultdict(list))
    tests: str | None = None
    calls: list[Figures] = field(default_factory=list)
    """One record for each command of scripts/gpu_first_hour.sh, with its exit code, duration and time limit, and
    whether a signal stopped it."""

    unreadable: list[str] = field(default_factory=list)

    def source(self, file: str) -> str:
        return f"{file}, {self.device(file)}"

    def device(self, file: str) -> str:
        """Return the name of the GPU on which the figures in a file were measured, or "CPU"."""
        return self.machines[file].get("gpu") or "CPU"


def read_folder(folder: Path) -> Found:
    found = Found()
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text())
            found.machines[path.name] = dict(document["machine"])
            for row in document["rows"]:
                if "milliseconds" in row:
                    found.parts[path.name].append(row)
                elif "layers" in row:
                    found.runs.append((path.name, row))
                elif "contestant" in row:
                    found.compared[path.name].append(row)
        except (OSError, *MALFORMED) as error:
            found.unreadable.append(f"{path.name}: {type(error).__name__}: {error}")
    _read_calls(folder / "calls.jsonl", found)
    tests = folder / "tests.txt"
    found.tests = tests.read_text(errors="replace") if tests.is_file() else None
    return found


OF_CALLS = ("part", "code", "seconds", "limit", "stopped", "command")


def _read_calls(path: Path, found: Found) -> None:
    """Read calls.jsonl, which contains one command per line. Incomplete lines are skipped and listed as unreadable."""
    try:
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    except OSError as error:
        found.unreadable.append(f"calls.jsonl: {type(error).__name__}: {error}")
        return
    for number, line in enumerate(lines, 1):
        try:
            call = json.loads(line) if line.strip() else None
            found.calls += [{name: call[name] for name in OF_CALLS}] if call is not None else []
        except MALFORMED:
            found.unreadable.append(f"calls.jsonl: line {number} is not a complete record: {line[:60]}")


def page(found: Found, missing: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from ("# Figures of a GPU", "")
    yield from _machines(found)
    runs = [(file, found.device(file), row) for file, row in found.runs]
    yield from training(runs)
    yield from planner(runs)
    for file, row in found.runs:
        yield from groups(found.source(file), row)
    for file, rows in found.compared.items():
        yield from _table(
            f"Compared in turns ({found.source(file)})", ("flags", "tokens/s", "ratio"), map(_compared, rows)
        )
    parts = "group", "part", "ms", "TFLOP/s", "GB/s"
    for file, rows in found.parts.items():
        yield from _table(f"Parts one by one ({found.source(file)})", parts, map(_part, rows))
    yield from _tests(found)
    yield from _table("Commands", ("part", "exit code", "seconds", "command"), map(_call, found.calls))
    if missing or found.unreadable:
        yield from ("", "## Missing", "")
        yield from (f"- {line}" for line in (*missing, *found.unreadable))


def _machines(found: Found) -> Iterator[str]:
    """Yield a line that describes the machine. If the files come from several machines, yield one line for each
    machine, with the names of its files."""
    files = defaultdict[str, list[str]](list)
    for file, machine in found.machines.items():
        versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items() if version)
        python = f"Python {machine.get('python')}, {versions}"
        facts = found.device(file), machine.get("cpu"), machine.get("system"), python
        files["; ".join(str(fact) for fact in facts if fact)].append(file)
    if len(files) < 2:
        yield from files or ["No figures."]
        return
    yield from (f"**Figures of {len(files)} machines:**", "")
    yield from (f"- {', '.join(names)}: {line}" for line, names in files.items())


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]], about: str = "") -> Iterator[str]:
    """Yield the lines of a section with a table. Yield nothing if the table has no rows."""
    lines = [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]
    if lines:
        yield from ("", f"## {title}", *(("", about) if about else ()), "")
        yield from (f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |", *lines)


Run = tuple[str, str, Figures]
"""Benchmark of one model: file name, device name, and measured figures."""

RUN = "file|device|model|layers|batch|tokens/s|TFLOP/s|MFU|of the products|plan|peak|peak/plan".split("|")


def training(runs: Sequence[Run]) -> Iterator[str]:
    about = "TFLOP/s and MFU count causal attention. Memory is in GiB; the plan is the dry run's."
    rows = []
    for file, device, row in runs:
        planned, peak = sum(row["planned"]), row.get("allocated")
        mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
        batch = f"{row['micro_batches']} x {row['micro_batch_size']}"
        memory = ["", ""] if peak is None else [f"{peak / 2**30:.2f}", f"{peak / planned:.3f}"]
        speed = _spread(row["tokens_per_second"], ",.0f"), f"{row['tflops']:.1f}", mfu, f"{row['of_products']:.1%}"
        model = f"{row['config']} {row['precision']}", row["layers"], batch
        rows.append([file, device, *model, *speed, f"{planned / 2**30:.2f}", *memory])
    yield from _table("Training", RUN, rows, about)


def planner(runs: Sequence[Run]) -> Iterator[str]:
    head = ("file", "device file", "predicted TFLOP/s", "measured TFLOP/s", "ratio")
    rows = [
        [file, known, f"{guess:.4g}", f"{row['tflops']:.4g}", f"{row['tflops'] / guess:.3f}"]
        for file, _, row in runs
        for known, guess in row.get("planner", {}).items()
    ]
    yield from _table("Measured and planned (--dry-run --device)", head, rows)


def groups(source: str, row: Figures) -> Iterator[str]:
    title = f"Where a step goes: {row['config']} {row['precision']}, {row['layers']} layers ({source})"
    rows = [
        [
            *(group["name"], f"{group['microseconds'] / 1e3:.2f}", f"{group['share']:.1%}", group["count"]),
            "; ".join(name[:60] for name in group["longest"]),
        ]
        for group in row.get("groups", ())
    ]
    yield from _table(title, ("group", "ms", "share", "kernels", "longest"), rows)


def _compared(row: Figures) -> list[Any]:
    if row.get("failed"):
        return [row["contestant"], f"failed: {row['failed']}", ""]
    ratio = next(iter(row["times"].values()), 1.0)
    return [row["contestant"], _spread(row["result"], ",.0f"), f"{ratio:.3f}"]


def _part(row: Figures) -> list[Any]:
    if row["milliseconds"] is None:
        return [row["group"], row["name"], f"failed: {row['failed']}", "", ""]
    seconds = row["milliseconds"]["median"] / 1e3
    rate = f"{row['tflop'] / seconds:,.1f}" if row["tflop"] else ""
    bandwidth = f"{row['gigabytes'] / seconds:,.0f}" if row["gigabytes"] else ""
    return [row["group"], row["name"], _spread(row["milliseconds"], ",.3f"), rate, bandwidth]


def _call(call: Figures) -> list[Any]:
    code = f"**{call['code']}**" if call["code"] else "0"
    late = ", out of time" if call["code"] in (124, 137) and call["seconds"] >= call["limit"] else ""
    late = ", stopped from outside" if call["stopped"] else late
    command = call["command"]
    short = command if len(command) <= 160 else f"{command[:50]} ... {command[-105:]}"
    return [call["part"], code + late, f"{call['seconds']} of {call['limit']}", f"`{short}`"]


OUTCOMES = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
ENDED = (
    re.compile(rf"(?P<test>\S*::.*?) (?P<outcome>{OUTCOMES})(?: \(.*)?(?: +\[ *\d+%\])$"),
    re.compile(rf"\[gw\d+\] \[ *\d+%\] (?P<outcome>{OUTCOMES}) (?P<test>\S*::.*)"),
)
"""Pattern of the line that `pytest -v` prints for a finished test, with or without pytest-xdist."""

BEGUN = re.compile(r"(?P<test>[\w/.-]*::\S.*)")
REASON = re.compile(r"(FAILED|ERROR) \S+")
"""Pattern of a failure line in pytest's summary or from tests/failure_lines.py."""


def _tests(found: Found) -> Iterator[str]:
    if found.tests is None:
        return
    outcomes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    summary = ""
    for line in map(str.strip, found.tests.splitlines()):
        if ended := next(filter(None, (form.fullmatch(line) for form in ENDED)), None):
            outcomes[ended["test"]] = ended["outcome"]
        elif begun := BEGUN.fullmatch(line):
            outcomes.setdefault(begun["test"], "running")
        elif REASON.match(line):
            reasons.setdefault(line.partition(" - ")[0], line)
        elif re.fullmatch(r"=* ?\d+ [a-z]+\b.* in [\d.]+s.*", line):
            summary = line.strip("= ")
    counts = Counter(outcome.lower() for outcome in outcomes.values())
    known = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    yield from ("", "## Tests", "", summary or f"The tests did not end: {known or 'none began'}.")
    for test, outcome in outcomes.items():
        if outcome in ("FAILED", "ERROR") or (outcome == "running" and not summary):
            reasons.setdefault(f"{outcome} {test}", f"{outcome} {test}")
    if reasons:
        yield ""
        yield from (f"- {line[:300]}" for line in reasons.values())


def _spread(spread: Figures, spec: str) -> str:
    return f"{spread['median']:{spec}} ({spread['low']:{spec}} to {spread['high']:{spec}})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quiet", action="store_true", help="write the page without printing it")
    args = parser.parse_args(argv)
    missing = [f"{name}: {what}" for name, what in EXPECTED.items() if not (args.folder / name).is_file()]
    text = "\n".join(page(read_folder(args.folder), missing)) + "\n"
    if not args.quiet:
        print(text, flush=True)
    target = args.folder / "page.md"
    try:
        replace_text(target, text)
    except OSError as error:
        print(f"not written: {target}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
