"""What benchmarks share: contestants in processes of their own that take turns, medians, a record of the machine."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import random
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.training.run import TrainingRun

Round = Callable[[], float]
"""Does one round of a contestant's work and returns what is compared."""


@dataclass(frozen=True)
class Contestant:
    """`build(*args)` gives the function that does one round. It is called in a fresh process, or in as many as
    `ranks`, where it may import what the others must not see. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set
    as torchrun does. Of several ranks the smallest result counts."""

    name: str
    build: Callable[..., Round]
    args: tuple[Any, ...] = ()
    threads: int = 1
    ranks: int = 1
    environ: tuple[tuple[str, str], ...] = ()


def positive(text: str) -> int:
    """A number of ranks, rounds or steps, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def bench_parser(about: str | None, rounds: int = 0) -> argparse.ArgumentParser:
    """A parser of --json, and of --rounds with this default where measurements are repeated."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        parser.add_argument("--rounds", type=positive, default=rounds)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser


def timed(step: Callable[[], Any], steps: int, tokens: int, clock: Callable[[], float] = time.perf_counter) -> Round:
    """Tokens per second of so many steps."""

    def one_round() -> float:
        start = clock()
        for _ in range(steps):
            step()
        return steps * tokens / (clock() - start)

    return one_round


def own_step(flags: Sequence[str]) -> Callable[[], None]:
    """A training step of this program with such flags, as its users run it: see `own_run`."""
    run = own_run(flags)
    from megatron.training.train_step import train_step

    return lambda: train_step(run)


def own_run(flags: Sequence[str]) -> TrainingRun:
    """A run of this program with such flags; imports it and sets threads, so it is to be called in a contestant's
    process. ValueError if the flags do not fit."""
    from megatron.training.reliability.launch import Launch, choose_allocators

    choose_allocators(os.environ)
    import torch

    from megatron.training.config.arguments import parse_args
    from megatron.training.config.validation import resolve, validate
    from megatron.training.initialize import StartupPhases, initialize
    from megatron.training.setup import build_run

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    launch = Launch.from_environment()
    config = resolve(parse_args(list(flags)), launch.world_size)
    problems = validate(config, launch.world_size)
    if problems:
        raise ValueError("; ".join(map(str, problems)))
    return build_run(config, initialize(config, launch, StartupPhases()))


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


def interleaved(
    contestants: Sequence[Contestant],
    rounds: int,
    warm_up: int = 1,
    note: Callable[[Mapping[str, list[float] | str]], object] | None = None,
) -> dict[str, list[float] | str]:
    """Each contestant's rounds, taken in turns A B C A B C, so that what slows the machine down hits all of them.

    A contestant that fails has the last line of its error instead. `note` sees what has been found so far, each time
    that there is more.
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
                if note is not None:
                    note(found)
    finally:
        for worker in workers.values():
            worker.close()
    return found


class _Worker:
    """The processes that build a contestant and then do a round whenever they are told to, in a folder of their own."""

    def __init__(self, contestant: Contestant) -> None:
        spawn = multiprocessing.get_context("spawn")
        shared = {
            "OMP_NUM_THREADS": str(contestant.threads),
            "WORLD_SIZE": str(contestant.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            **dict(contestant.environ),
        }
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(contestant.ranks):
            ours, theirs = spawn.Pipe()
            with _environ(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}):
                process = spawn.Process(target=_serve, args=(contestant, theirs, self._folder.name))
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._ready = False

    def round(self) -> float | str:
        """The slowest rank's result, or what went wrong."""
        if not self._ready:
            self._ready = True
            built = [error for error in self._all() if error is not None]
            if built:
                return str(built[0])
        for pipe in self._pipes:
            try:
                pipe.send("round")
            except OSError:
                return self._ended()
        results = self._all()
        wrong = [result for result in results if not isinstance(result, float)]
        return str(wrong[0]) if wrong else min(results)  # type: ignore[type-var]

    def _all(self) -> list[float | str | None]:
        """What every rank answers; an error is waited for no further, as the others may wait for its rank."""
        answers: list[float | str | None] = []
        waiting = list(self._pipes)
        while waiting:
            for pipe in multiprocessing.connection.wait(waiting):
                assert isinstance(pipe, Connection)
                waiting.remove(pipe)
                try:
                    answers.append(pipe.recv())
                except (EOFError, OSError):
                    answers.append(self._ended())
                if isinstance(answers[-1], str):
                    return answers
        return answers

    def _ended(self) -> str:
        codes = []
        for process in self._processes:
            process.join(1)
            codes.append(process.exitcode)
        return f"a process ended early: codes {codes}"

    def close(self) -> None:
        """A process reads the end of its pipe and leaves; one that does not is killed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


@contextmanager
def _environ(changed: Mapping[str, str]) -> Iterator[None]:
    """For the children that are started within."""
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_port() -> int:
    """Below the range that connections get theirs from, one of which may take it before the contestant does."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port among 100 between 20000 and 32000")


def _serve(contestant: Contestant, pipe: Connection, folder: str) -> None:
    try:
        os.chdir(folder)  # for what a run writes into its working folder
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
    sys.stdout.flush()
    os._exit(0)  # groups whose peers are gone would wait for them


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


def write_json(path: Path | None, facts: Mapping[str, Any], rows: Sequence[Any], ended: bool = True) -> None:
    """The same figures for programs to read, in rows. `write_figures` says how."""
    plain = [asdict(row) if hasattr(row, "__dataclass_fields__") else row for row in rows]
    write_figures(path, {"command": sys.argv, "machine": facts, "rows": plain}, ended)


def write_figures(path: Path | None, figures: Mapping[str, Any], ended: bool = True) -> None:
    """Writes figures as JSON, if to a file. Before a program has `ended`, it may write those that it has: whenever it
    is killed, the file is whole. Print figures first: a file that cannot be written is named, and ends a program that
    has `ended` with code 1, and no other."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        problem = f"not written: {path}: {error.strerror or error}"
        if ended:
            sys.exit(problem)
        print(problem, file=sys.stderr)
        return
    if ended:
        print(f"written to {path}")


def replace_text(path: Path, text: str) -> None:
    """Writes a file as a whole: where that fails with OSError, the file is as it was."""
    from megatron.core.fsync import whole_file  # contestants may have another megatron

    with whole_file(path) as new:
        new.write_text(text)
