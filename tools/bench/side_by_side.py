"""Code shared by benchmarks: run contestants alternately in separate processes, compute medians of their results, and
describe the machine."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.training.config.run_config import RunConfig
    from megatron.training.run import TrainingRun

Round = Callable[[], float]
"""Function that runs one round of a contestant and returns the figure to compare, such as tokens per second."""

Found = dict[str, list[float] | str]
"""Dict from the name of each contestant to the results of its rounds or, if the contestant failed, to the last line of
its error."""


@dataclass(frozen=True)
class Contestant:
    """Program variant to benchmark. `build(*args)` returns a function that runs one round and returns its result, such
    as tokens per second. `build` is called in one new process per rank, so it may import packages that conflict with
    those of other contestants. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as by torchrun. With several
    ranks, a round's result is the smallest of the results that the ranks return."""

    name: str
    build: Callable[..., Round]
    args: tuple[Any, ...] = ()
    threads: int = 1
    ranks: int = 1


def positive(text: str) -> int:
    """Parse a number of ranks, rounds or steps, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def bench_parser(about: str | None, rounds: int = 0, **counts: tuple[int, str]) -> argparse.ArgumentParser:
    """Return an argument parser with the flag --json, and a flag with a positive number for each name in `counts`. The
    values of `counts` are the default and the help text of a flag. If `rounds` is not 0, the parser also has the flag
    --rounds, whose default is `rounds`. This function loads the built-in extensions, as every program does before it
    reads flags."""
    from megatron.extensions import (
        load,
    )  # imported here, because contestants of other programs use this module without megatron

    load()
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        parser.add_argument("--rounds", type=positive, default=rounds)
    for name, (default, text) in counts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=default, help=text)
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


def timed(step: Callable[[], Any], steps: int, tokens: int, clock: Callable[[], float] = time.perf_counter) -> Round:
    """Return a function that runs `steps` steps and returns the tokens per second. `clock` measures the time."""

    def one_round() -> float:
        start = clock()
        for _ in range(steps):
            step()
        return steps * tokens / (clock() - start)

    return one_round


def own_run(config: RunConfig) -> TrainingRun:
    """Build a training run on this rank as pretrain_gpt.py does. Environment variables such as RANK identify the
    rank."""
    from megatron.training.initialize import StartupPhases, initialize
    from megatron.training.reliability.launch import Launch
    from megatron.training.setup import build_run

    return build_run(config, initialize(config, Launch.from_environment(), StartupPhases()))


def own_step(flags: Sequence[str]) -> Callable[[], None]:
    """Return a function that runs one training step of this program with the given flags. The step includes the
    callbacks, as in a normal run. Call this function only in the process of a contestant, because it imports this
    program and sets the number of threads. Raises ValueError if the flags are invalid."""
    from megatron.training.reliability.launch import choose_allocators

    choose_allocators(os.environ)
    import torch

    from megatron.extensions import load
    from megatron.training.config.arguments import parse_args
    from megatron.training.config.validation import resolve_legal
    from megatron.training.train_step import train_step

    load()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run = own_run(resolve_legal(parse_args(list(flags)), int(os.environ["WORLD_SIZE"])))
    for callback in run.callbacks:
        callback.on_start(run)

    def step() -> None:
        train_step(run)
        for callback in run.callbacks:
            callback.on_step_end(run)

    return step


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of the results of several rounds."""

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
    note: Callable[[Found], object] = lambda found: None,
) -> Found:
    """Run the rounds of contestants in the order A B C A B C, so that a temporary slowdown of the machine affects all
    contestants.

    If a contestant fails, its result is the last line of the error. After each round of a contestant, `note` is called
    with the results of all rounds so far.
    """
    found: Found = {c.name: [] for c in contestants}
    workers = {c.name: _Worker(c) for c in contestants}
    try:
        for number in range(-warm_up, rounds):
            for name, worker in workers.items():
                values = found[name]
                if isinstance(values, str):
                    continue
                try:
                    result = worker.round()
                    values += [result] if number >= 0 else []
                except Exception as error:
                    found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                note(found)
    finally:
        for worker in workers.values():
            worker.close()
    return found


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within a `with` block, so that processes started in the block inherit them."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Worker:
    """Processes of one contestant, one per rank. The processes build the contestant in a temporary folder, and then run
    rounds on request."""

    def __init__(self, contestant: Contestant) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        environ = {"OMP_NUM_THREADS": str(contestant.threads), "WORLD_SIZE": str(contestant.ranks)}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        self._pools = []
        self._pids = []
        self._built = []
        for rank in map(str, range(contestant.ranks)):
            pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            with _environment(environ | {"RANK": rank, "LOCAL_RANK": rank}):
                self._pids.append(pool.submit(os.getpid))
            self._built.append(pool.submit(_build, contestant, self._folder.name))
            self._pools.append(pool)

    def round(self) -> float:
        """Return the result of the slowest rank. If a rank has failed, raise the error of this rank."""
        _results(self._built)
        return min(_results([pool.submit(_one_round) for pool in self._pools]))

    def close(self) -> None:
        """Kill the processes, because a process that exits normally would wait for the other ranks of its process
        group."""
        for pid, pool in zip(self._pids, self._pools, strict=True):
            with suppress(Exception):
                os.kill(pid.result(), signal.SIGKILL)
            pool.shutdown()
        self._folder.cleanup()


def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    """Return the results of all ranks. If a rank fails, raise its error without waiting for the other ranks, which may
    themselves be waiting for the failed rank."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failed = [future for future in done if future.exception() is not None]
    return [future.result() for future in failed or futures]


_rounds: list[Round] = []
"""List with the round function of this process. The list is empty until the process has built its contestant."""


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _build(contestant: Contestant, folder: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.chdir(folder)  # Files that a run writes to its working folder are written to `folder`.
    try:
        _rounds.append(contestant.build(*contestant.args))
    except Exception:
        traceback.print_exc()
        raise


def _one_round() -> float:
    result = _rounds[0]()
    sys.stdout.flush()
    return result


def _free_port() -> int:
    """Return a port below the ephemeral range. The system could assign a port in the ephemeral range to another
    connection before the contestant uses it."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port among 100 between 20000 and 32000")


@dataclass(frozen=True)
class Row:
    """Result of a contestant, and its speed relative to other contestants. A relative speed is the median of the ratios
    in all rounds."""

    contestant: str
    result: Spread | None
    failed: str | None
    times: dict[str, float]


def compared(found: Found, beside: Callable[[str], Iterator[str]]) -> list[Row]:
    """Return one row per contestant. The row contains the speed of the contestant `name` relative to each contestant
    that `beside(name)` yields."""
    spreads = {name: Spread.of(values) for name, values in found.items() if not isinstance(values, str) and values}
    rows = []
    for name, values in found.items():
        spread, failed = spreads.get(name), values if isinstance(values, str) else None
        others = [other for other in beside(name) if other in spreads and other != name] if spread else []
        if spread or failed:
            times = {other: _median_ratio(values, found[other]) for other in others}
            rows.append(Row(name, spread, failed, times))
    return rows


def _median_ratio(ours: Sequence[float] | str, others: Sequence[float] | str) -> float:
    """Return the median of the ratios ours / others over the rounds that both contestants have run. The load of the
    machine hardly affects this median."""
    assert not isinstance(ours, str) and not isinstance(others, str)
    return statistics.median(one / other for one, other in zip(ours, others, strict=False))


def forget(*packages: str) -> None:
    """Unload packages that were imported from this checkout. The next import finds them in another folder of
    `sys.path`."""
    root = Path(__file__).resolve().parents[2]
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != root]
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


DIGITS = {"tokens/s": "9,.0f", "tokens/CPU s": "9,.0f", "s": "9.3f"}


def say_rows(rows: Sequence[Row], head: str = "", unit: str = "tokens/s") -> None:
    """Print the lines of a table."""
    for row in rows:
        times = "".join(f"  {ratio:.3f} x {other}" for other, ratio in row.times.items())
        result = f"failed: {row.failed}" if row.failed else f"{row.result:{DIGITS[unit]}} {unit} {times}"
        print(f"{head}{row.contestant:<26} {result}", flush=True)


def machine(*packages: str) -> dict[str, Any]:
    """Print a two-line description of the machine, and return the description."""
    from tools.common import processor_name  # imported here, because contestants may use another `megatron`

    versions = {name: _version(name) for name in ("torch", *packages)}
    facts = {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "load": os.getloadavg()[0],
    }
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, load {facts['load']:.1f} at the start")
    named = ", ".join(f"{name} {version or 'is not installed'}" for name, version in versions.items())
    print(f"Python {facts['python']}, {named}")
    return facts


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_json(path: Path | None, facts: Mapping[str, Any], rows: Sequence[Any], ended: bool = True) -> None:
    """Write figures as JSON for other programs, if a file is given.

    Pass `ended=False` to write intermediate figures. The file is complete even if the program is killed at any time.
    Print the figures before calling this function, because it may exit. If the file cannot be written, print an error
    that names the file. The program then exits with code 1 if `ended` is true; otherwise, it continues.
    """
    if path is None:
        return
    figures = {"command": sys.argv, "machine": facts, "rows": rows}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(figures, indent=1, default=asdict) + "\n")
    except OSError as error:
        problem = f"not written: {path}: {error.strerror or error}"
        if ended:
            sys.exit(problem)
        print(problem, file=sys.stderr)
        return
    if ended:
        print(f"written to {path}")


def replace_text(path: Path, text: str) -> None:
    """Replace the contents of a file atomically. If writing raises OSError, the file is unchanged."""
    from megatron.core.fsync import whole_file  # imported here, because contestants may use another `megatron`

    with whole_file(path) as new:
        new.write_text(text)
