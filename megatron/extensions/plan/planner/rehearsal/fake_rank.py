"""Rehearsal of one rank of a larger world: the training program with fake process groups and fake tensors.

A rehearsal calls the same functions as a run to build the process groups, the model, the gradient buffers, the
optimizer and the schedule, and to take one training step. Tensors have shapes but no values, so a rank needs no device
memory and no GPU. Numbers read from tensors are 0, and tokens are routed evenly over experts. Ranks run in forked
processes, several at a time. Each process starts with a copy of this process's state. Changes to the copy do not affect
this process.
"""

from __future__ import annotations

import gc
import io
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import Axis, ParallelState, build_groups
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.core.torch_private import FakeTensorMode, fake_store
from megatron.extensions.plan.planner.as_on_gpus import (
    PlannedFunctions,
    PlannedGPU,
    PlannedHardware,
    PlannedRegions,
    plans_fused_dropout,
)
from megatron.extensions.plan.planner.fake_stage import NoValues
from megatron.extensions.plan.planner.live_memory import LiveMemory
from megatron.extensions.plan.planner.rehearsal.collective_log import CollectiveLog, call_site, places_of
from megatron.extensions.plan.planner.rehearsal.matching import Box, Failure, Holder, RankRecord, coords_of
from megatron.extensions.plan.planner.time.pipeline import Schedule
from megatron.extensions.plan.simulator.simulator import StageCosts, held_at_peak
from megatron.testing.local_world import die_with_parent
from megatron.training.config.batch_size import microbatches_of
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Parts
from megatron.training.initialize import Runtime, StartupPhases, set_determinism
from megatron.training.plan import plan_of
from megatron.training.reliability.launch import Launch
from megatron.training.run import TrainingRun
from megatron.training.setup import build_run
from megatron.training.train_step import train_step

NAMED_BYTES = 2**20
"""Size in bytes below which a tensor is omitted from the list of tensors that hold memory."""

HOLDERS = 8


class RankMode(LiveMemory):
    """Dispatch mode that records collectives and counts memory. The mode raises OutOfMemoryError if more than `limit`
    bytes are allocated."""

    def __init__(self, log: CollectiveLog, limit: int | None) -> None:
        super().__init__()
        self.log = log
        self.limit = limit
        self.peak_phase = ""
        self.sites: dict[int, str] = {}
        self.on_host: list[list[int]] = []
        """Sizes in bytes of the buffers of each host pool."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.record(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _made(self, key: int, size: int) -> None:
        if size >= NAMED_BYTES:
            self.sites[key] = call_site()
        super()._made(key, size)

    def _note_peak(self) -> None:
        """Update the peak memory. Raises OutOfMemoryError if the limit is exceeded."""
        if self._inside or self.now <= self.peak:
            return
        self.peak, self.peak_phase = self.now, self.log.phase()[0]
        if self.limit is not None and self.now > self.limit:
            raise torch.OutOfMemoryError(f"{self.now:,} bytes are needed, but the device has {self.limit:,}")

    def holders(self) -> tuple[Holder, ...]:
        """Return the code locations whose tensors currently hold the most memory."""
        found: dict[str, list[int]] = {}
        for key, size in self.sizes.items():
            if size >= NAMED_BYTES:
                found.setdefault(self.sites.get(key, ""), []).append(size)
        most = sorted(found.items(), key=lambda item: -sum(item[1]))[:HOLDERS]
        return tuple(Holder(sum(sizes), len(sizes), site) for site, sizes in most)

    def count_host_pool(self, run: TrainingRun) -> None:
        """Count the buffers of offloaded activations as host memory."""
        store = next((model.decoder.offload for model in run.stages.values()), None)
        if store is not None:
            self.on_host.append(self.count_apart(store.reset(pinned=False)))


class EveryRank(Axis):
    """Axis that spans all ranks of a rehearsal. Collectives over this axis do not communicate with other processes.
    Every rank of a rehearsal also does the work that, in a real run, only the first rank does."""

    @property
    def first(self) -> bool:
        return True


T = TypeVar("T")


class Lost(NamedTuple):
    """Job whose process ended without a result."""

    job: int
    how: str
    """Text that describes how the process ended, such as `SIGKILL` or `exit code 1`."""


def forked(jobs: Mapping[int, Callable[[], T]], workers: int) -> Iterator[T | Lost]:
    """Run each job in a forked process, and yield the results as the jobs end. For a job whose process dies without a
    result, yield `Lost`.

    If the system cannot start another process, fewer processes run at a time. Raises OSError if no process can be
    started. The results of jobs must be picklable.
    """
    context, waiting = mp.get_context("fork"), list(jobs)[::-1]
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    workers = max(1, workers)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_send_result, args=(sender, jobs[waiting[-1]], os.getpid()))
                try:
                    process.start()
                except OSError:
                    receiver.close()
                    if not running:
                        raise
                    workers = len(running)
                    break
                finally:
                    sender.close()
                running[receiver] = waiting.pop(), process
            for receiver in cast("list[Connection]", wait(list(running))):
                job, process = running[receiver]
                try:
                    result = receiver.recv()
                except (EOFError, ConnectionResetError):
                    process.join()
                    code = process.exitcode or 0
                    result = Lost(job, signal.Signals(-code).name if code < 0 else f"exit code {code}")
                process.join()
                receiver.close()
                del running[receiver]
                yield result
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _send_result(sender: Connection, job: Callable[[], object], parent: int) -> None:
    """Run a job in a forked process, and send its result to the parent process.

    Ctrl-C sends a signal to all processes of a terminal, so only the parent handles it. SIGTERM has its default action,
    which ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)
    gc.freeze()  # otherwise, garbage collection would copy the memory pages of inherited objects
    sender.send(job())
    sender.close()


def without_inputs(parts: Parts) -> Parts:
    """Return the components of a run without the callbacks that define `on_setup`, because these callbacks may read
    inputs."""
    kept = [callback for callback in parts.callbacks if type(callback).on_setup is Callback.on_setup]
    return Parts(kept, parts.metrics)


@dataclass(frozen=True)
class Rehearsal:
    """Settings of a rehearsal, which all rehearsed ranks share."""

    config: RunConfig
    """Configuration with the rehearsed number of micro-batches and with mock data."""

    world_size: int
    microbatches: int
    """Number of micro-batches in a step of the real run."""

    rehearsed: int
    """Number of rehearsed micro-batches."""

    device_memory: int | None = None
    """Memory limit of a rank in bytes."""

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims.from_config(self.config.parallel, self.world_size)


def rehearsal_of(
    config: RunConfig, world_size: int, device_memory: int | None = None, whole: bool = False
) -> Rehearsal:
    """Return the settings for rehearsing a resolved and validated configuration.

    Unless `whole` is True, the rehearsal uses the smallest number of micro-batches with which every stage holds as many
    micro-batches in flight as in a full step.
    """
    config = plan_of(config).longest.config
    dims, training = ParallelDims.from_config(config.parallel, world_size), config.training
    microbatches = microbatches_of(config, dims)
    number = microbatches if whole else enough_microbatches(config, microbatches)
    small = replace(
        training,
        global_batch_size=number * training.micro_batch_size * dims.dp,
        eval_iters=0,
        full_validation=False,
    )
    paths = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "valid")
    none = dict.fromkeys(paths)
    data = replace(config.data, **none, mock_data=True, num_workers=0, multiple_validation_sets=False)  # type: ignore[arg-type]
    if data.dataset_type == "gpt":
        data = replace(data, dataset_type=None)
    config = replace(
        config.without("cuda_graph_impl").without("data_args_path").without("rampup_batch_size"),
        training=small,
        data=data,
        parallel=replace(config.parallel, compile=config.parallel.compiles(device_of(config))),
        checkpoint=replace(config.checkpoint, save=None, load=None),
    )
    return Rehearsal(config, world_size, microbatches, number, device_memory)


def device_of(config: RunConfig) -> str:
    """Return the device type whose memory and kernels a rehearsal uses."""
    return "cpu" if config.parallel.cpu else "cuda"


def enough_microbatches(config: RunConfig, microbatches: int) -> int:
    """Return the smallest number of micro-batches (at least 3) for which each pipeline rank holds as many micro-batches
    at once as in a full step."""
    layout = pipeline_layout(config.model, config.parallel)
    schedule, step = Schedule.of(config.parallel, layout), layout.pp if layout.chunks > 1 else 1

    def held(number: int) -> list[dict[int, int]]:
        try:
            return [held_at_peak(actions, StageCosts())[1] for actions in schedule.lists(number, messages=True)]
        except ValueError:  # the schedule needs a larger number of micro-batches
            return []

    most = held(microbatches)
    first = -(-min(3, microbatches) // step) * step
    return next((n for n in range(first, microbatches, step) if held(n) == most), microbatches)


class _Phases:
    """Callable that returns the current phase of the rank and the micro-batch number."""

    def __init__(self) -> None:
        self.name = "start"
        self.run: TrainingRun | None = None

    def __call__(self) -> tuple[str, int]:
        action = self.run.pipeline.executor.current if self.run is not None else None
        return (self.name, -1) if action is None else (str(action), action.microbatch)

    def begin(self, name: str) -> None:
        self.name = name

    def watch(self, run: TrainingRun) -> None:
        """Register a callback on the timers of `run`, so that this object tracks the phases of a training step."""
        self.run = run

        @contextmanager
        def named(part: str) -> Iterator[None]:
            before, self.name = self.name, part
            yield
            self.name = before

        run.timers.watchers.append(named)


def rehearse_rank(rehearsal: Rehearsal, rank: int) -> RankRecord | Lost:
    """Rehearse one rank, and return its record.

    An exception raised by the program is recorded as a `Failure`. If this machine runs out of memory, the function
    returns `Lost`. Call this function in a separate process, because the library and its extensions may keep global
    state.
    """
    began = time.process_time()
    phases = _Phases()
    log = CollectiveLog(phases)
    record, mode = RankRecord(rank, coords_of(rank, rehearsal.dims)), RankMode(log, rehearsal.device_memory)
    try:
        with redirect_stdout(io.StringIO()), ExitStack() as stack:
            _run(rehearsal, record, mode, phases, stack)
    except MemoryError:
        return Lost(rank, "MemoryError")
    except (Exception, SystemExit) as error:
        notes = "\n".join([str(error), *getattr(error, "__notes__", ())])
        memory = isinstance(error, torch.OutOfMemoryError)
        sites = tuple(places_of(error.__traceback__))
        record.failure = Failure(type(error).__name__, notes, phases()[0], sites, mode.holders() if memory else ())
    record.collectives, record.axes = log.collectives, log.axes
    record.peak = mode.peak
    record.peak_phase = mode.peak_phase
    record.host = sum(map(sum, mode.on_host))
    record.seconds = time.process_time() - began
    return record


def _run(rehearsal: Rehearsal, record: RankRecord, mode: RankMode, phases: _Phases, stack: ExitStack) -> None:
    config = rehearsal.config
    rank = record.rank
    size = rehearsal.world_size
    on_gpu = device_of(config) == "cuda"
    set_determinism(config)
    state = ParallelState()
    if size > 1:
        dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=size)
        stack.callback(dist.destroy_process_group)
        phases.begin("process groups")
        state = build_groups(config.parallel, backend="nccl" if on_gpu else "gloo")
        mode.log.name_groups({**state.axes, "world": state.world})
    launch = Launch(rank, size, rank % 8)
    device = torch.device("cpu")
    hardware = PlannedHardware()
    if on_gpu:
        hardware = PlannedGPU(fused_dropout=plans_fused_dropout(config.model, config.parallel))
    state = replace(state, world=EveryRank(**vars(state.world)))
    runtime = Runtime(launch, device, state, StartupPhases(phases.begin), hardware=hardware)
    for context in (
        FakeTensorMode(allow_non_fake_inputs=True),
        NoValues(),
        mode,
        mode.log.objects(),
        PlannedFunctions(mode) if on_gpu else PlannedRegions(mode),
    ):
        stack.enter_context(context)
    run = build_run(config, runtime, without_inputs(Parts().with_registered(config)))
    mode.count_host_pool(run)
    stack.callback(run.data.close)
    record.built = mode.now
    phases.begin("step")
    phases.watch(run)
    train_step(run)
    phases.begin("checkpoint")
    tensors, _ = run.saver.checkpoint.contents(run.progress)
    record.boxes = [
        Box(key, tuple(tensor.shape), tuple(offset), tuple(data.shape), data.itemsize)
        for key, tensor in tensors.items()
        if tensor.writes
        for offset, data in dict(reversed(tensor.boxes)).items()
    ]


def rehearse_ranks(rehearsal: Rehearsal, ranks: Sequence[int], workers: int) -> Iterator[RankRecord | Lost]:
    """Yield the records of ranks in the order in which they finish. Each record comes from a forked process; `workers`
    processes run at a time."""
    return forked({rank: partial(rehearse_rank, rehearsal, rank) for rank in ranks}, workers)
