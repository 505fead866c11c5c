"""Programs and ranks of `pretrain_gpt.py` that are forked from the test process. The forks are used in place of
processes that a shell or a launcher starts, which saves the two seconds that importing torch takes.

Each rank reads its rank and world size from the environment variables that torchrun sets.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import itertools
import logging
import multiprocessing as mp
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # torch.optim imports this module on first use; import it once here instead of in every rank

import megatron.training.training  # noqa: F401 (the program imports it late)
import pretrain_gpt
from tests.apart import LAUNCHER, ROOT, checked
from tests.limits import HANG


def run_program(
    *argv: object, cwd: Path = ROOT, code: int | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a script, or `-m MODULE`, as `python ARGV...` does in the folder `cwd`. `environ` adds environment variables,
    and variables of launchers are removed. Return the exit code, standard output and standard error. If `code` is not
    None, assert that the exit code is `code`.

    Modules that the test process has imported are already imported in the program. To test that a script finds its
    modules, use a separate process.
    """
    words = [str(word) for word in argv]
    with tempfile.TemporaryDirectory(prefix="program-") as name:
        out, err = Path(name) / "out", Path(name) / "err"
        process: Any = mp.get_context("fork").Process(target=_program, args=(words, cwd, environ, out, err))
        process.start()
        try:
            (found,) = join([process])
        finally:
            process.kill()
            process.join()
        return checked(subprocess.CompletedProcess(words, found, out.read_text(), err.read_text()), code)


def _program(words: list[str], cwd: Path, environ: Mapping[str, str], out: Path, err: Path) -> None:
    gc.freeze()  # otherwise, garbage collection would copy the memory pages that are shared with the parent
    _print_to(out, err)
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ |= environ
    os.chdir(cwd)
    torch.set_num_threads(1)
    if words[0] == "-m":
        sys.argv[:], sys.path[:0] = words[1:], [str(cwd)]
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        script = Path(words[0]).resolve()
        sys.argv[:], sys.path[:0] = words, [str(script.parent)]
        main = ModuleType("__main__")
        main.__file__ = str(script)
        # the second name is used by pickled objects that child processes send back
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        exec(compile(script.read_text(), script, "exec"), main.__dict__)


def _print_to(out: Path, err: Path) -> None:
    """Redirect standard output, standard error, logging and warnings, which pytest has replaced, so that they behave as
    in a new process."""
    for standard, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), standard)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(STACKS, all_threads=True)
    logging.getLogger().handlers.clear()
    warnings.showwarning = lambda *about, **_: sys.stderr.write(warnings.formatwarning(*about[:4]))


STACKS = signal.SIGRTMAX - 1
"""Signal that makes a process print the stacks of its threads."""


@contextmanager
def forked_ranks(
    world_size: int,
    argv: Sequence[str],
    screen: Path,
    prepare: Callable[[int], None] = lambda rank: None,
    main: Callable[[list[str]], int] = pretrain_gpt.main,
) -> Iterator[list[Any]]:
    """Fork processes that run `pretrain_gpt.py`, or another program's `main`, with `argv`, and yield the processes. The
    output of all processes goes to the file `screen`. Each forked process calls `prepare(rank)` before it runs the
    program. Processes that are still running at the end are killed."""
    screen.write_text("")
    port, context = next(PORTS), mp.get_context("fork")
    arguments = (world_size, port, list(argv), screen, prepare, main)
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def run_forked(
    world_size: int,
    argv: Sequence[str],
    screen: Path,
    code: int = 0,
    main: Callable[[list[str]], int] = pretrain_gpt.main,
    prepare: Callable[[int], None] = lambda rank: None,
) -> str:
    """Run all ranks until they exit, assert that each exit code is `code`, and return the ranks' output."""
    with forked_ranks(world_size, argv, screen, prepare, main) as ranks:
        codes = join(ranks)
    text = screen.read_text()
    assert codes == [code] * world_size, f"{codes}\n{text[-4000:]}"
    return text


def join(ranks: Sequence[Any], seconds: float = HANG) -> list[int]:
    """Wait until all processes have exited, and return their exit codes. Raises TimeoutError with a description of all
    ranks that still run if a rank does not exit within `seconds`."""
    limit = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, limit - time.monotonic()))
        if process.exitcode is None:
            told = "\n".join(doings([each.pid for each in ranks if each.is_alive()]))
            raise TimeoutError(f"a rank did not end within {seconds} s\n{told}")
    return [process.exitcode for process in ranks]


def doings(pids: Sequence[int]) -> Iterator[str]:
    """Yield a text for each process and its descendants, with the process state, the CPU seconds and the end of the
    output. Processes of this module also dump the stacks of their threads to the output."""
    screens = list[str]()
    for pid in pids:
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            yield f"process {pid}: state {fields[0]}, {(int(fields[11]) + int(fields[12])) / 100:.1f} s of a processor"
            caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
            if int(caught.split()[1], 16) >> (STACKS - 1) & 1:
                os.kill(pid, STACKS)
            screens.append(os.readlink(f"/proc/{pid}/fd/2"))
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            yield from doings([int(child) for child in children])
    time.sleep(1.0)
    for screen in sorted(set(screens)):
        with suppress(OSError):
            yield f"{screen} ends with\n{Path(screen).read_text(errors='replace')[-8000:]}"


def _rank(
    rank: int,
    world_size: int,
    port: int,
    argv: list[str],
    screen: Path,
    prepare: Callable[[int], None],
    main: Callable[[list[str]], int],
) -> None:
    gc.freeze()
    _print_to(screen, screen)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    prepare(rank)
    code = 1
    try:
        code = main(argv)
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ports() -> Iterator[int]:
    """Yield ports on which nothing listens. The ports are below the system's ephemeral ports and below those of SLURM
    jobs and daemons, which begin at 20,000. Each test process uses a separate range of a hundred ports, so that no
    other process takes a port before rank 0 opens it. If another process took the port, ranks could connect to rank 0
    of a different world."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    wanted = worker % 10 * 10 + os.getpid() % 10
    for hundred in [*range(wanted, 100), *range(wanted)]:
        name = Path(tempfile.gettempdir()) / f"test-ports-{os.getuid()}-{hundred}"
        # the file stays open and locked until the last process of these tests ends
        lock = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        os.close(lock)
    first = 10_000 + hundred * 100
    for port in itertools.cycle(range(first, first + 100)):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            yield port


PORTS = _ports()
