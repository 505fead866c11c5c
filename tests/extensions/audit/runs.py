"""Train with audits on local ranks, and flip bits at chosen steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.distributed.param_and_grad_buffer import Bucket
from megatron.core.tensor_parallel import linear_gemms
from megatron.extensions.operate.audit.outcome import AuditError
from megatron.extensions.operate.audit.verdict import Finding
from megatron.testing.local_run import local_run
from megatron.training import training
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.run import TrainingRun
from megatron.training.tasks import start_run
from tests.harness import run_world
from tests.tiny import TINY

AUDITED = f"{TINY} --audit-interval 2 --hidden-dropout 0.1 --log-interval 1"

LONGEST = 7200.0
"""Time limit in seconds for a campaign of many steps."""


@dataclass(frozen=True)
class Flip:
    """Bit flip that occurs on one rank, in a weight, a gradient bucket, a message, or a GEMM output."""

    kind: str
    rank: int
    steps: tuple[int, ...] = (2,)
    bit: int = 30


@dataclass(frozen=True)
class Audited:
    """Results of an audited run."""

    findings: list[tuple[int, Finding]]
    audits: int
    ended: str
    """Message of the error that ended the run, or "" if there was no error."""

    losses: list[tuple[float, float]]
    """One tuple (loss, gradient norm) per step."""

    seconds: float
    """CPU seconds that the first rank used between its second log line and its last log line."""


def flip(x: Tensor, bit: int, place: int = 0) -> None:
    """Flip a bit of one element in place. `bit` counts from the lowest bit. In a 16-bit element, `bit` 16 is the lowest
    bit, as in the upper half of an fp32 number."""
    size = x.element_size()
    with torch.no_grad():
        flat = x.detach().view(-1)
        bits = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
        lower = bit - (16 if size == 2 else 0)
        bits[place] ^= 1 << lower if lower < 8 * size - 1 else -(1 << lower)


def audited(flags: str, world_size: int, flips: Sequence[Flip] = (), exact: bool = True) -> Audited:
    """Train with faults, assert that all ranks received the same findings, and return the results of rank 0. If `exact`
    is True, the run uses --deterministic-mode."""
    words = f"{AUDITED} {'--deterministic-mode' if exact else ''} {flags}".split()
    config = resolve_legal(parse_args(words), world_size)
    found = run_world(world_size, _train, config, tuple(flips), timeout=LONGEST)
    assert all(each.findings == found[0].findings for each in found)
    return found[0]


def _train(rank: int, world_size: int, config: RunConfig, flips: Sequence[Flip]) -> Audited:
    with local_run(config, rank, world_size) as run, ExitStack() as resources:
        (callback,) = [each for each in run.callbacks if each.name.startswith("audit")]
        start_run(run, resources)
        findings: list[tuple[int, Finding]] = []
        outcome = callback.outcome  # type: ignore[attr-defined]
        add = outcome.add

        def note(run: TrainingRun, iteration: int, finding: Finding | None) -> None:
            if finding is not None:
                findings.append((iteration, finding))
            add(run, iteration, finding)

        outcome.add = note
        losses: list[tuple[float, float]] = []
        clock: list[float] = []

        def on_log(run: TrainingRun, record: dict[str, float]) -> None:
            losses.append((record["lm_loss"], record["grad_norm"]))
            clock.append(time.process_time())

        callback.on_log = on_log  # type: ignore[assignment]
        for each in flips:
            if each.rank == rank:
                plant(each, run, callback)
        ended = ""
        try:
            training.train(run)
        except AuditError as error:
            ended = str(error)
        return Audited(findings, outcome.values()["audits"], ended, losses, clock[-1] - clock[min(1, len(clock) - 1)])


def plant(fault: Flip, run: TrainingRun, callback: Any) -> None:
    """Inject `fault` into the audited computation of the steps `fault.steps`. The reference computation runs before the
    fault and is not affected."""
    (task,) = [task for task in run.tasks if task.name == "audit"]
    begin = task.run
    state = {"left": 0}

    def begun() -> None:
        begin()
        if callback._step is not None and callback._step.iteration in fault.steps:
            state["left"] = 1
            if fault.kind == "weight":
                params = dict(run.ddp.modules[0].named_parameters())
                flip(params["decoder.layers.0.mlp.linear_fc1.weight"], fault.bit)

    def hit() -> bool:
        now = state["left"] > 0
        state["left"] = 0
        return now

    object.__setattr__(task, "run", begun)
    if fault.kind in PLANTS:
        PLANTS[fault.kind](fault, hit)


def _bucket(fault: Flip, hit: Callable[[], bool]) -> None:
    whole = Bucket.start_grad_sync

    def broken(bucket: Bucket) -> None:
        if hit():
            flip(bucket.grads, fault.bit)
        whole(bucket)

    Bucket.start_grad_sync = broken  # type: ignore[method-assign]


def _reduced(fault: Flip, hit: Callable[[], bool]) -> None:
    whole = Bucket.finish_grad_sync

    def broken(bucket: Bucket) -> None:
        whole(bucket)
        if hit():
            flip(bucket.owned_grads, fault.bit)

    Bucket.finish_grad_sync = broken  # type: ignore[method-assign]


def _message(fault: Flip, hit: Callable[[], bool]) -> None:
    """Flip a bit in a message. Tensor-parallel messages have four dims, and pipeline messages have three."""
    wait, coming = dist.Work.wait, dict[int, tuple[object, Tensor]]()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(result: Tensor, *args: Any, **kwargs: Any) -> Any:
            work = function(result, *args, **kwargs)
            if result.dim() >= 3:
                coming[id(work)] = work, result
            return work

        return noted

    def broken(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
        done = wait(work, *args, **kwargs)
        found = coming.pop(id(work), None)
        if found is not None and hit():
            flip(found[1], fault.bit)
        return done

    for name in ("all_to_all_single", "irecv"):
        setattr(dist, name, noting(getattr(dist, name)))
    dist.Work.wait = broken  # type: ignore[method-assign]


def _product(fault: Flip, hit: Callable[[], bool]) -> None:
    whole = linear_gemms.LinearGemms.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        out = whole(*args, **kwargs)
        if hit():
            flip(out, fault.bit, -1)
        return out

    linear_gemms.LinearGemms.forward = broken  # type: ignore[method-assign]


PLANTS = {"bucket": _bucket, "reduced": _reduced, "message": _message, "product": _product}
