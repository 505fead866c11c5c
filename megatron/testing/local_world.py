"""Local worlds: run a function on 1 to 8 forked ranks and return every rank's result.

    results = run_world(4, train_two_steps, config)     # train_two_steps(rank, world_size, config) on each rank

A world starts in about 0.1 s, because it forks instead of importing torch again. Ranks rendezvous through a file, so
concurrent worlds need no free port. An exception on any rank is raised here with that rank's traceback. A world that
hangs is killed after `timeout` seconds, and the error contains the stack of every rank. Tests and the tools that
compare layouts use this module. The backend is gloo, or nccl for ranks that share the first GPU (`share_a_gpu`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.core.torch_private import preload_compiler

R = TypeVar("R")


@dataclass(frozen=True)
class World:
    """Settings with which the ranks of a local world are launched."""

    size: int
    folder: Path
    """Folder for the rendezvous file and for the results, errors and stacks of all ranks."""

    timeout: float
    """Timeout in seconds."""

    backend: str


def run_world(
    world_size: int, fn: Callable[..., R], *args: object, timeout: float = 600.0, backend: str = "gloo"
) -> list[R]:
    """Return [fn(rank, world_size, *args) for each rank].

    Args:
        world_size: Number of ranks.
        fn: Function to run on each rank; its results must be picklable.
        args: Further arguments of `fn`.
        timeout: Seconds after which the world counts as hanging.
        backend: "gloo" for ranks on the CPU, or "nccl" for ranks that share the first GPU.

    Raises:
        RuntimeError: A rank failed. The message contains the traceback of the first rank that failed.
        TimeoutError: The world hangs. The message contains the stacks of all ranks.
    """
    assert not torch.cuda.is_initialized(), "a process that has touched CUDA cannot fork"
    preload_compiler()
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        world = World(world_size, Path(folder), timeout, backend)
        jobs = [partial(fn, rank, world_size, *args) for rank in range(world_size)]
        ranks = [
            context.Process(target=_rank_main, args=(rank, world, os.getpid(), job)) for rank, job in enumerate(jobs)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, Path(folder), timeout)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _wait(ranks: Sequence[BaseProcess], folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode not in (None, 0) for process in ranks):
            time.sleep(0.2)  # wait, because another rank may report the error that caused this failure
            break
        if time.monotonic() > deadline:
            for process in ranks:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
            stacks = "\n".join(path.read_text() for path in sorted(folder.glob("stack-*")))
            raise TimeoutError(f"world of {len(ranks)} did not end within {timeout} s\n{stacks}")
        time.sleep(0.01)
    killed = [
        f"rank {rank} of {len(ranks)}: ended by {signal.Signals(-process.exitcode).name}"
        for rank, process in enumerate(ranks)
        if process.exitcode is not None and process.exitcode < 0
    ]
    failures = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    if killed or failures:
        raise RuntimeError("\n".join([*killed, *(path.read_text() for path in failures)]))
    codes = [process.exitcode for process in ranks]
    if any(codes):
        raise RuntimeError(f"ranks ended with exit codes {codes} and no traceback")


def die_with_parent(parent: int) -> None:
    """Make Linux kill this forked process when its parent, the process `parent`, ends for any reason.

    On systems other than Linux, the function has no effect, and this process may outlive its parent until the timeout
    expires.
    """
    set_death_signal = 1  # PR_SET_PDEATHSIG
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # The parent ended before the death signal was set.


def share_a_gpu(rank: int, environ: MutableMapping[str, str]) -> None:
    """Let several processes on a host share its first GPU and communicate through NCCL. Call this function before NCCL
    starts.

    NCCL refuses two ranks on one GPU of a host. If each rank has a different value of NCCL_HOSTID, NCCL treats the
    ranks as separate hosts and sends over sockets. `scripts/rank_as_host.sh` does the same for ranks that a launcher
    starts.
    """
    environ["NCCL_HOSTID"] = f"rank-{rank}"
    environ["NCCL_SOCKET_IFNAME"] = "lo"
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_MAX_NCHANNELS"):
        environ[name] = "1"


def _rank_main(rank: int, world: World, parent: int, job: Callable[[], object]) -> None:
    die_with_parent(parent)
    gc.freeze()  # otherwise, garbage collection would copy pages that are shared with the parent
    stack_file = open(world.folder / f"stack-{rank}", "w")  # noqa: SIM115 (stays open for the signal handler)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    torch.set_num_threads(1)
    code = 0
    try:
        device = None
        if sys.platform == "linux":  # otherwise, gloo resolves the host name for each group, which may take seconds
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if world.backend == "nccl":
            share_a_gpu(rank, os.environ)
            device = torch.device("cuda", 0)
            torch.cuda.set_device(device)
        dist.init_process_group(
            world.backend,
            init_method=f"file://{world.folder}/rendezvous",
            rank=rank,
            world_size=world.size,
            timeout=timedelta(seconds=world.timeout),
            device_id=device,
        )
        (world.folder / f"result-{rank}").write_bytes(pickle.dumps(job()))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (world.folder / f"error-{rank}").write_text(f"rank {rank} of {world.size}:\n{traceback.format_exc()}")
        code = 1
    os._exit(code)
