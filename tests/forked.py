"""Ranks of `pretrain_gpt.py` on this machine, forked from this process: the launcher's part without its start-up time.

Forking saves importing torch once a rank. Each rank reads its place from the variables that torchrun sets.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it on first use: once here instead of once a rank

import megatron.training.training  # noqa: F401 (the program imports it late)
import pretrain_gpt
from tests.limits import HANG


@contextmanager
def forked_ranks(
    world_size: int, argv: Sequence[str], screen: Path, prepare: Callable[[int], None] = lambda rank: None
) -> Iterator[list[Any]]:
    """Processes that run `pretrain_gpt.py` with `argv`, all printing to the file `screen`; `prepare(rank)` is called
    in each beforehand. Those still there at the end are killed."""
    screen.write_text("")
    port, context = next(PORTS), mp.get_context("fork")
    arguments = (world_size, port, list(argv), screen, prepare)
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def run_forked(world_size: int, argv: Sequence[str], screen: Path, code: int = 0) -> str:
    """Runs all ranks to their end and returns what they printed. Asserts that each exits with `code`."""
    with forked_ranks(world_size, argv, screen) as ranks:
        codes = join(ranks)
    text = screen.read_text()
    assert codes == [code] * world_size, f"{codes}\n{text[-4000:]}"
    return text


def join(ranks: Sequence[Any], seconds: float = HANG) -> list[int]:
    """Exit codes. Raises TimeoutError if a rank has not ended in that time."""
    limit = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, limit - time.monotonic()))
        if process.exitcode is None:
            raise TimeoutError(f"a rank did not end within {seconds} s")
    return [process.exitcode for process in ranks]


def _rank(rank: int, world_size: int, port: int, argv: list[str], screen: Path, prepare: Callable[[int], None]) -> None:
    descriptor = os.open(screen, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    # Under pytest these are objects that write elsewhere.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
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
        code = pretrain_gpt.main(argv)
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ports() -> Iterator[int]:
    """Ports that nothing listens on. Below those that the system hands out, and from a place of this process's own, so
    that nobody takes one before rank 0 does."""
    first = 10_000 + os.getpid() * 101 % 20_000
    for port in itertools.cycle(range(first, first + 100)):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            yield port


PORTS = _ports()
