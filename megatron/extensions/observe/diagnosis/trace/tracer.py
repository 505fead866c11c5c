"""Tracer that records some steps of all ranks and writes them to one file (--trace).

Clock offsets between hosts are measured with ping-pong messages over the rendezvous store. Processes of one host share
a clock, which is CLOCK_MONOTONIC on Linux. Therefore, one rank of each host compares its clock with rank 0's clock.
This rank reads its clock, sends a message to rank 0, and reads its clock again when rank 0 answers. Rank 0 reads its
own clock before it answers. If the message and the answer take the same time, rank 0 reads its clock exactly in the
middle between the two readings of the other rank. Rank 0 always reads its clock between the two other readings, so the
error is at most half of the round trip. Several round trips are made, and the shortest one is used (NTP, RFC 5905,
section 10). The message and the answer of a round trip each pass through the store once.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import threading
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.collectives import gather_objects
from megatron.core.parallel_state import SINGLE_AXES
from megatron.core.pipeline_parallel.actions import Action, Lists
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.torch_private import default_store
from megatron.extensions.observe.diagnosis.flags import DiagnosisConfig
from megatron.extensions.observe.diagnosis.profiler import output_folder
from megatron.extensions.observe.diagnosis.trace.pipeline_timeline import PIPELINE, RankTrace, assemble
from megatron.extensions.observe.diagnosis.trace.recorder import CollectiveTaps, Recorder
from megatron.extensions.observe.diagnosis.trace.trace_file import write_trace
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Meter, RunView
from megatron.training.progress import STEP_PARTS
from megatron.training.reliability.untrusted import parse_integer
from megatron.training.run import TrainingRun

ROUND_TRIPS = 24
MALFORMED = (IndexError, KeyError, RecursionError, TypeError, ValueError, zlib.error)
"""Exceptions that are raised if a dump contains unexpected bytes or types."""

Clock = Callable[[], int]


@dataclass(frozen=True)
class Offset:
    """Difference between rank 0's clock and a host's clock, measured at the time `at` of the host's clock."""

    at: int
    nanoseconds: int = 0
    round_trip: int = 0
    """Shortest measured round trip in nanoseconds. The error of the offset is at most half of the round trip."""


def host_identity() -> tuple[str, str]:
    """Return the name of this host and an identifier of its clock. Ranks that share a clock have the same
    identifier."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return socket.gethostname(), socket.gethostname()
    spaces = Path("/proc/self/ns/time")
    space = os.readlink(spaces) if spaces.exists() else ""
    return socket.gethostname(), boot.read_text().strip() + space


def measure(
    store: dist.Store, rank: int, identities: Sequence[str], meeting: str, clock: Clock = time.perf_counter_ns
) -> Offset:
    """Return the offset between rank 0's clock and the clock of this rank's host. Only the first rank of each host
    measures the offset, which applies to all ranks of the host. Other ranks return an offset of 0.

    This function is a collective over the first ranks of all hosts.

    Args:
        store: Rendezvous store.
        rank: Global rank.
        identities: Host identities of all ranks, in rank order. This argument must be equal on all ranks.
        meeting: Prefix of the store keys. Each call must use a new prefix.
        clock: Function that returns the current time in nanoseconds.
    """
    firsts = [identities.index(identity) for identity in dict.fromkeys(identities)]
    if rank == 0:
        for other in firsts[1:]:
            _answer(store, f"{meeting}/{other}", clock)
        return Offset(clock())
    if rank in firsts:
        return _ask(store, f"{meeting}/{rank}", clock)
    return Offset(clock())


def _answer(store: dist.Store, key: str, clock: Clock) -> None:
    times = []
    for number in range(ROUND_TRIPS):
        store.wait([f"{key}/ping/{number}"])
        times.append(clock())
        store.set(f"{key}/pong/{number}", "")
    store.set(f"{key}/times", " ".join(map(str, times)))


def _ask(store: dist.Store, key: str, clock: Clock) -> Offset:
    sent, returned = [], []
    for number in range(ROUND_TRIPS):
        sent.append(clock())
        store.set(f"{key}/ping/{number}", "")
        store.wait([f"{key}/pong/{number}"])
        returned.append(clock())
    try:
        answered = [int(time) for time in store.get(f"{key}/times").split()]
    except ValueError:  # invalid text, written to the store by another process
        answered = []
    if len(answered) != ROUND_TRIPS:
        return Offset(sent[0])
    trips = zip(sent, returned, answered, strict=True)
    round_trip, middle, there = min((back - out, (out + back) // 2, there) for out, back, there in trips)
    return Offset(middle, there - middle, round_trip)


@dataclass(frozen=True)
class Alignment:
    """Conversion from a host's clock to rank 0's clock, interpolated linearly between two measurements."""

    first: Offset
    last: Offset

    def __call__(self, time_ns: int) -> int:
        elapsed = self.last.at - self.first.at
        share = (time_ns - self.first.at) / elapsed if elapsed > 0 else 0.0
        return time_ns + self.first.nanoseconds + round(share * (self.last.nanoseconds - self.first.nanoseconds))

    def as_json(self) -> dict[str, object]:
        """Return the clock offset at the start of the trace, the drift of the offset until the end of the trace, and
        the error bound, in microseconds."""
        return {
            "offset_us": self.first.nanoseconds / 1e3,
            "drift_us": (self.last.nanoseconds - self.first.nanoseconds) / 1e3,
            "residual_us": max(self.first.round_trip, self.last.round_trip) / 2e3,
        }


DENSE_AXES = ("tp", "cp", "dp", "pp")

PIECE = 2**22
"""Maximum size in bytes of a value in the rendezvous store."""

PART_NAMES = {"grad_sync": "end of the gradient reduction"}


class Tracer(Callback):
    """Callback that traces the steps from --trace-step-start to --trace-step-end. All methods are collective.

    During the traced steps, the callback observes pipeline actions, the parts of the step, saves and evaluations, and
    wraps torch.distributed. Afterwards, all wrappers are removed.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.options = config.options(DiagnosisConfig)
        self._first = 0
        """Number of the first traced iteration."""

        self._recorder: Recorder | None = None
        self._taps = ExitStack()
        self._writer: threading.Thread | None = None
        self._iteration: int | None = None
        self._step: AbstractContextManager[None] | None = None

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        self.runtime = run.runtime
        self.pipeline = run.pipeline
        self.timers = run.timers
        return ()

    def on_start(self, run: RunView) -> None:
        iteration, options = run.progress.iteration, self.options
        if iteration >= options.trace_step_end:
            run.say(
                f" no trace: the run resumes at iteration {iteration}, --trace-step-end is {options.trace_step_end}"
            )
        elif iteration >= options.trace_step_start:
            self._start(run)

    def on_step_end(self, run: RunView) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = self._iteration = None
        self._turn(run)

    def on_end(self, run: RunView) -> None:
        """Write the trace if the run ends early, and wait until the file is written."""
        if run.progress.iteration < self.options.trace_step_start:
            run.say(f" no trace: the run has ended before --trace-step-start {self.options.trace_step_start}")
        self._stop(run)
        if self._writer is not None:
            self._writer.join()

    def _turn(self, run: RunView) -> None:
        if run.progress.iteration == self.options.trace_step_start:
            self._start(run)
        elif run.progress.iteration == self.options.trace_step_end:
            self._stop(run)

    def _start(self, run: RunView) -> None:
        state = self.runtime.state
        self._first = run.progress.iteration + 1
        self._hosts = gather_objects(host_identity(), state.world)
        self._offset = self._measure("start")
        self._recorder = recorder = Recorder(self.runtime.device)
        self._progress = run.progress
        taps = self._taps
        taps.enter_context(CollectiveTaps(recorder, state).installed())
        self.pipeline.executor.watchers.append(self._action)
        taps.callback(self.pipeline.executor.watchers.remove, self._action)
        self.timers.watchers.insert(0, self._part)
        taps.callback(self.timers.watchers.remove, self._part)
        collections: list[AbstractContextManager[None]] = []

        def collected(phase: str, facts: Mapping[str, object]) -> None:
            if phase == "start":
                collections.append(recorder.span("garbage collection", "host", {"generation": facts["generation"]}))
                collections[-1].__enter__()
            elif collections:
                collections.pop().__exit__(None, None, None)

        gc.callbacks.append(collected)
        taps.callback(gc.callbacks.remove, collected)

    @contextmanager
    def _part(self, part: str) -> Iterator[None]:
        """Record a span for a part of a step, or for work between steps. The part `data`, which is the first part of a
        step, also starts the span of the whole step."""
        assert self._recorder is not None
        if part == "data" and self._step is None:
            self._iteration = self._progress.iteration + 1
            self._step = self._recorder.span(f"step {self._iteration}", "step", {"iteration": self._iteration})
            self._step.__enter__()
        args = {} if part in STEP_PARTS else {"iteration": self._progress.iteration}
        with self._recorder.span(PART_NAMES.get(part, part), "step", args):
            yield

    def _action(self, action: Action) -> AbstractContextManager[None]:
        """Return a context manager that records a pipeline action."""
        assert self._recorder is not None
        kind, stage, microbatch = action
        args: dict[str, object] = {"kind": kind.value, "stage": stage, "microbatch": microbatch}
        if self._iteration is not None:
            args["iteration"] = self._iteration
        return self._recorder.span(str(action), PIPELINE, args)

    def _measure(self, when: str) -> Offset:
        """Return the clock offset of this rank's host, which the first rank of the host measures."""
        launch, identities = self.runtime.launch, [identity for _, identity in self._hosts]
        if len(set(identities)) == 1:
            return Offset(time.perf_counter_ns())
        meeting = f"trace/{self._first}/{when}"
        own = measure(default_store(), launch.rank, identities, meeting)
        first = identities.index(identities[launch.rank])
        return gather_objects(own, self.runtime.state.world)[first]

    def _stop(self, run: RunView) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        self._taps.close()
        spans = recorder.take()
        alignment = Alignment(self._offset, self._measure("stop"))
        state = self.runtime.state
        shown = SINGLE_AXES if state.axis("ep").size > 1 else DENSE_AXES
        facts = {
            "host": self._hosts[state.rank][0],
            "coords": {axis: at for axis, (at, size) in state.coords.items() if size > 1 and axis in shown},
            "clock": alignment.as_json(),
            "memory": held_bytes(run),
        }
        dump = {"spans": spans, "in_flight": recorder.in_flight, "facts": facts}
        dumps = self._collect(dump, alignment, run.say)
        if not dumps:
            return
        self._writer = threading.Thread(target=self._write, args=(dumps, run.progress.iteration, run.say))
        self._writer.start()

    def _write(self, dumps: list[RankTrace], last: int, say: Callable[[str], None]) -> None:
        """Write the trace file while training continues."""
        path = output_folder(self.config, "trace") / f"iterations-{self._first}-{last}.json.gz"
        try:
            write_trace(assemble(dumps, self._facts(last), self._lists()), path)
        except OSError as error:
            say(f" the trace of iterations {self._first} to {last} cannot be written: {error}")
        else:
            say(f" trace of iterations {self._first} to {last}: {path}")

    def _collect(self, dump: Mapping[str, object], alignment: Alignment, say: Callable[[str], None]) -> list[RankTrace]:
        """Return the recordings of all ranks on rank 0, and an empty list on other ranks. Ranks send their packed
        recordings one after another through the store. Therefore, rank 0 holds the packed recording of only one rank at
        a time, and no collective uses device memory.
        """
        packed = zlib.compress(json.dumps([dump, [vars(alignment.first), vars(alignment.last)]]).encode(), 1)
        launch = self.runtime.launch
        if launch.world_size == 1:
            return [_unpacked(packed)]
        store, key = default_store(), f"trace/{self._first}/dump"
        if launch.rank:
            store.wait([f"{key}/{launch.rank}/wanted"])
            text = b64encode(packed).decode()
            cuts = range(0, len(text), PIECE)
            for number, at in enumerate(cuts):
                store.set(f"{key}/{launch.rank}/{number}", text[at : at + PIECE])
            store.set(f"{key}/{launch.rank}/pieces", str(len(cuts)))
            dist.barrier(group=self.runtime.state.world.group)
            return []
        found, malformed = [_unpacked(packed)], list[int]()
        for rank in range(1, launch.world_size):
            store.set(f"{key}/{rank}/wanted", "")
            try:
                found.append(_unpacked(_fetched(store, f"{key}/{rank}")))
            except MALFORMED:  # invalid text, written to the store by another process
                malformed.append(rank)
        dist.barrier(group=self.runtime.state.world.group)
        if malformed:
            say(f" no trace is written: malformed recordings in the rendezvous store, from ranks {malformed}")
        return [] if malformed else found

    def _lists(self) -> Callable[[int], Lists] | None:
        """Return a function that maps a number of micro-batches to the action lists of a step. Return None if passes
        are interleaved. In this case, the step cannot be simulated, because only the combined time of interleaved
        passes is known.
        """
        pipeline = self.pipeline
        if pipeline.passes.pair.in_turns:
            return None
        chunks, group = pipeline.layout.chunks, pipeline.group
        return lambda m: pipeline_lists(pipeline.schedule, pipeline.pp.size, m, chunks, group=group)

    def _facts(self, last: int) -> dict[str, object]:
        dims, layout = self.runtime.state.dims, self.pipeline.layout
        return {
            "program": "pretrain_gpt.py --trace",
            "iterations": [self._first, last],
            "device": self.runtime.device.type,
            "layout": {axis: dims.size(axis) for axis in SINGLE_AXES},
            "tp_pp_dp": dims.tp_pp_dp,
            "schedule": self.pipeline.schedule,
            "chunks": layout.chunks,
            "v_shaped": layout.v_shaped,
            "pipelines": [list(ranks) for ranks in dims.groups("pp")],
            "clock": "microseconds on the clock of rank 0's host; residual_us of a rank bounds the error of its times",
        }


def held_bytes(run: RunView) -> dict[str, int]:
    """Return the number of bytes that this rank holds, by category. On GPUs, the category `activations and working` is
    the peak allocated memory minus the weights, gradients and optimizer states. On CPUs, the category `process` is the
    peak memory of the whole process, including torch's code and data.
    """
    ddp = run.optimizer.ddp
    parameters, gradients, of_units = ddp.nbytes
    states, on_host = run.optimizer.nbytes
    held = {"weights": parameters, "gradients": gradients, "optimizer": states, "host": on_host + of_units}
    if ddp.device.type == "cuda":
        held["activations and working"] = torch.cuda.max_memory_allocated() - sum(list(held.values())[:3])
    else:
        held["process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return held


def _fetched(store: dist.Store, key: str) -> bytes:
    """Read a rank's packed dump, which is split over several keys of the store, and delete these keys."""
    names = [f"{key}/{number}" for number in range(parse_integer(store.get(f"{key}/pieces").decode()))]
    packed = b64decode(b"".join(store.get(name) for name in names))
    for name in names:
        store.delete_key(name)
    return packed


def _unpacked(packed: bytes) -> RankTrace:
    dump, offsets = json.loads(zlib.decompress(packed))
    first, last = (Offset(**offset) for offset in offsets)
    return RankTrace(dump["spans"], dump["in_flight"], dump["facts"], Alignment(first, last))
