"""Estimates about copies in memory for a run's plan: how many hosts can be lost while a copy of each part remains, how
large the copies are, and how long it takes to send them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.operate.peer_copies.flags import PeerCopyConfig
from megatron.extensions.operate.peer_copies.placement import Part, place, sent_bytes, stored_bytes, survivable
from megatron.extensions.plan.planner.failures.expected import Expected, SaveCost
from megatron.extensions.plan.planner.flags import PlannedRun
from megatron.extensions.plan.planner.memory import states_of_rank
from megatron.training.config.batch_size import byte_text
from megatron.training.config.run_config import RunConfig

SLOTS = 2
"""Number of steps for which a host keeps copies: the last complete step, and the step whose copies are being
written."""


def planned_parts(config: RunConfig, world_size: int) -> list[Part]:
    """Return the parts of the training state on all ranks. Tensors that are replicated over tensor-parallel ranks are
    counted once per rank."""
    dims = ParallelDims.from_config(config.parallel, world_size)
    memory = [states_of_rank(config, dims, pp_rank).memory for pp_rank in range(dims.pp)]
    replicas = {rank: group for group in dims.groups("dp", "cp") for rank in group}
    stage = {rank: number for number, group in enumerate(dims.groups("tp", "cp", "dp")) for rank in group}
    parts = []
    for rank in range(world_size):
        held, group = memory[stage[rank]], replicas[rank]
        states = held.main_parameters + held.moments + held.host_states
        weights = 0 if held.main_parameters or held.host_states else held.parameters
        own = states if config.optimizer.use_distributed_optimizer else 0
        own += weights if config.ddp.shards_parameters else 0
        shared = states + weights - own
        parts.append(Part(rank, (rank,), own if len(group) > 1 else states + weights))
        if shared and len(group) > 1:
            parts.append(Part(rank, group, shared // len(group)))
    return parts


def lines(run: PlannedRun) -> Iterator[str]:
    """Yield the lines of the plan section about copies in memory. Each line contains one estimate."""
    options = run.config.options(PeerCopyConfig)
    hosts = -(-run.world_size // run.ranks_per_node)
    host_of = [str(rank // run.ranks_per_node) for rank in range(run.world_size)]
    parts = planned_parts(run.config, run.world_size)
    placed = place(host_of, parts, options.peer_copies)
    copies = min(options.peer_copies, hosts - 1)
    several = "y" if copies == 1 else "ies"
    plural = "" if hosts == 1 else "s"
    yield f"{hosts} host{plural} of {run.ranks_per_node} ranks, {copies} cop{several} of each part on other hosts"
    if copies < options.peer_copies:
        yield f"fewer than --peer-copies {options.peer_copies}, because there are no more hosts"
    if not copies:
        yield "survive the failure of ranks, but not the loss of a host"
    else:
        good, every = survivable(placed, hosts, copies + 1) if hosts > copies + 1 else (0, 1)
        lost = "lost host" if copies == 1 else f"{copies} lost hosts"
        yield f"survive any {lost}, and {good / every:.1%} of the sets of {copies + 1}"
    stored, sent = stored_bytes(parts, placed), sent_bytes(parts, placed)
    most = max(sent.values(), default=0)
    yield f"maximum number of bytes that a rank sends for each copy: {byte_text(most)}"
    yield f"maximum memory on a host for the copies of {SLOTS} steps: {byte_text(SLOTS * max(stored.values()))}"
    given = options.peer_copy_bandwidth
    rate = run.network if given is None else 1e6 * given
    seconds = 0.0
    if rate and most:
        of_host: dict[str, int] = {}
        for rank, nbytes in sent.items():
            of_host[host_of[rank]] = of_host.get(host_of[rank], 0) + nbytes
        seconds = max(of_host.values()) / rate
        source = "network rate of the device file" if given is None else f"--peer-copy-bandwidth {given:g}"
        share = ""
        if run.step_seconds is not None:
            share = f", {seconds / (run.step_seconds * options.peer_copy_interval):.1%} of the time between two copies"
        yield f"a host sends for {seconds:.3g} s at {rate / 1e6:,.0f} MB/s ({source}){share}"
    if run.host and run.expected is not None:
        staged = Counter[int]()
        for part in parts:
            staged.update(dict.fromkeys(part.replicas, part.nbytes))
        most_staged = max(staged.values())
        yield f"maximum number of bytes that a rank copies to its own host: {byte_text(most_staged)}"
        yield goodput_line(run.expected, options.peer_copy_interval, most_staged / run.host, seconds)


def goodput_line(expected: Expected, interval: int, staging: float, sending: float) -> str:
    """Return a line that compares the goodput of a run with and without copies in memory. The estimate with copies
    assumes that every failure leaves a copy of each part, and that a copy delays a step only while the state is copied
    to host memory. A restart is assumed to take the same time with and without copies."""
    copied = replace(expected, save=SaveCost(staging, staging + sending, ""))
    with_copies, without = copied.shares(interval), expected.best()
    return (
        f"goodput {with_copies.goodput:.2%} if every failure leaves a copy of each part; lost to copies "
        f"{with_copies.saves:.2%}, to restarts {with_copies.restarts:.2%}, to repeated steps "
        f"{with_copies.repeated:.2%}; goodput without copies, at the best --save-interval: {without.goodput:.2%}"
    )
