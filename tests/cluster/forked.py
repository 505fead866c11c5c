"""Run `pretrain_gpt.py` on simulated hosts under torchrun's agents, with all ranks forked from this process. Forking
saves the seconds that each process started by torchrun would need to import torch."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import pretrain_gpt
from tests.cluster.hosts import RENDEZVOUS_PORT, Box
from tests.forked import LAUNCHER, _print_to, join


def run_on_hosts(
    box: Box,
    ranks: int,
    argv: Sequence[str],
    folder: Path,
    code: int = 0,
    main: Callable[[list[str]], int] = pretrain_gpt.main,
) -> list[str]:
    """Run `ranks` ranks on each host until they exit, and return the output of each host. The function asserts that the
    torchrun agent of each host exits with `code`, which is 1 if a rank fails."""
    logs = [folder / f"{name}.log" for name in box.names]
    context = mp.get_context("fork")
    agents: list[Any] = [
        context.Process(target=_agent, args=(box, host, ranks, list(argv), log, main)) for host, log in enumerate(logs)
    ]
    for agent in agents:
        agent.start()
    try:
        codes = join(agents)
    finally:
        for agent in agents:
            agent.kill()
            agent.join()
    texts = [log.read_text() for log in logs]
    assert codes == [code] * len(codes), "\n".join([str(codes), *(text[-4000:] for text in texts)])
    return texts


def _agent(box: Box, host: int, ranks: int, argv: list[str], log: Path, main: Callable[[list[str]], int]) -> None:
    gc.freeze()
    _print_to(log, log)
    for name in LAUNCHER:
        os.environ.pop(name, None)
    box.enter(host)
    config = LaunchConfig(
        min_nodes=len(box.names),
        max_nodes=len(box.names),
        nproc_per_node=ranks,
        run_id="box",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{box.names[0]}:{RENDEZVOUS_PORT}",
        local_addr=box.names[host],
        start_method="fork",
        max_restarts=0,
    )
    code = 1
    try:
        elastic_launch(config, _rank)(argv, main)
        code = 0
    except ChildFailedError as error:  # torchrun also prints this error
        print(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _rank(argv: list[str], main: Callable[[list[str]], int]) -> None:
    torch.set_num_threads(1)
    if code := main(argv):
        sys.exit(code)
