"""What benchmarks share: contestants in processes of their own that take turns, medians, a record of the machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Round = Callable[[], float]
"""Does one round of a contestant's work and returns what is compared."""


@dataclass(frozen=True)
class Contestant:
    """`build(*args)` gives the function that does one round. It is called in a fresh process, where it may import
    what the others must not see and set what they must not have."""

    name: str
    build: Callable[..., Round]
    args: tuple[Any, ...] = ()
    threads: int = 1
    environ: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Spread:
    """Of several rounds: the middle one and the two ends."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} - {self.high:{spec}})"


def interleaved(contestants: Sequence[Contestant], rounds: int, warm_up: int = 1) -> dict[str, list[float] | str]:
    """Each contestant's rounds, taken in turns A B C A B C, so that what slows the machine down hits all of them.

    A contestant that fails has the last line of its error instead.
    """
    found: dict[str, list[float] | str] = {c.name: [] for c in contestants}
    workers = {c.name: _Worker(c) for c in contestants}
    try:
        for number in range(-warm_up, rounds):
            for name, worker in workers.items():
                values = found[name]
                if isinstance(values, str):
                    continue
                result = worker.round()
                if isinstance(result, str):
                    found[name] = result
                elif number >= 0:
                    values.append(result)
    finally:
        for worker in workers.values():
            worker.close()
    return found


class _Worker:
    """A process that builds a contestant and then does a round whenever it is told to."""

    def __init__(self, contestant: Contestant) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        changed = {"OMP_NUM_THREADS": str(contestant.threads), **dict(contestant.environ)}
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        self._process = spawn.Process(target=_serve, args=(contestant, theirs), daemon=False)
        self._process.start()
        theirs.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        self._ready = False

    def round(self) -> float | str:
        try:
            if not self._ready:
                self._ready = True
                built = self._pipe.recv()
                if isinstance(built, str):
                    return built
            self._pipe.send("round")
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            return f"its process ended with code {self._process.exitcode}"

    def close(self) -> None:
        self._pipe.close()  # the process reads the end of the pipe and leaves
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(contestant: Contestant, pipe: Connection) -> None:
    work: Round | None = None
    try:
        work = contestant.build(*contestant.args)
        pipe.send(None)
        while True:
            pipe.recv()
            pipe.send(work())
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])


def machine(*packages: str) -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", *packages)},
        "load": os.getloadavg()[0],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def say_machine(facts: Mapping[str, Any]) -> None:
    """Prints it in two lines."""
    versions = ", ".join(f"{name} {version or 'is not installed'}" for name, version in facts["versions"].items())
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, load {facts['load']:.1f} at the start")
    print(f"Python {facts['python']}, {versions}")


def write_json(path: Path | None, facts: Mapping[str, Any], rows: Sequence[Any]) -> None:
    """The same figures for programs to read."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = [asdict(row) if hasattr(row, "__dataclass_fields__") else row for row in rows]
    path.write_text(json.dumps({"command": sys.argv, "machine": facts, "rows": plain}, indent=1) + "\n")
    print(f"written to {path}")
