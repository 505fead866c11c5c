"""Recording of a rank's forward and backward passes in one step. The recording consists of sketches in the order of
computation.

The tape contains sketches of module outputs, of the operands and results of messages between the ranks of a replica, of
gradients after the last micro-batch, and of gradients before their reduction. Collectives are recorded by wrappers
around the functions of torch.distributed (`Taps`). No hooks are installed during steps that are not audited. Recording
does not synchronize with the device; only `Tape.rows` does.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from megatron.core.distributed.param_and_grad_buffer import Bucket
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import LANES, ParallelState
from megatron.core.pipeline_parallel.actions import Action
from megatron.extensions.operate.audit.sketch import sketch_of
from megatron.extensions.operate.audit.verdict import BUCKET, GRADIENT, LOSS, OUTPUT, RECEIVED, SENT
from megatron.training.foreign import replaced
from megatron.training.run import TrainingRun

REPLICA_AXES = ("tp", "cp", "pp", "ep", "expt_tp", "expt_tp_ep", "tp_cp", "mp", "expt_mp", "embd", *LANES)
"""Axes along which ranks process the same micro-batches."""

DATA_AXES = ("dp", "dp_cp", "expt_dp", "stage", "world")
"""Axes along which ranks process different micro-batches. Collectives over these axes are not recorded."""

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all_single",
    "broadcast",
)


P = ParamSpec("P")
T = TypeVar("T")

Wait = Callable[Concatenate[dist.Work, P], bool]


class Entry(NamedTuple):
    """Description of a recorded tensor."""

    kind: str
    label: str
    key: str = ""


class Tape:
    """Sketches of the tensors in the forward and backward passes of one rank in a step."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.buckets: dict[str, Tensor] = {}
        """Sketches of gradients before the reduction over data-parallel ranks. The key contains the parameter name and
        the number of the reduction. The keys are needed because the order of reductions may vary."""

        self.sketches: list[Tensor] = []
        self._recording = self._ends = False
        self._last = "the start of the step"
        self._count = 0

    def add(self, kind: str, label: str, value: Tensor, key: str = "") -> None:
        """Add the sketch of a tensor to the tape."""
        self.entries.append(Entry(kind, label, key))
        self.sketches.append(sketch_of(value))

    def rows(self) -> tuple[list[Entry], Tensor]:
        """Return the n recorded entries and an int64 tensor [n, 1 + COLUMNS] in host memory with one row per entry. A
        row consists of a checksum of the entry's kind and label, followed by the sketch of the tensor. The gradients
        before their reduction (`buckets`) come last."""
        names = sorted(self.buckets)
        entries = [*self.entries, *(Entry(BUCKET, name) for name in names)]
        sketches = torch.stack([*self.sketches, *(self.buckets[name] for name in names)]).cpu()
        words = [zlib.crc32(f"{entry.kind} {entry.label}".encode()) for entry in entries]
        return entries, torch.cat([torch.tensor(words, dtype=torch.int64)[:, None], sketches], dim=1)

    @contextmanager
    def of_passes(self, run: TrainingRun, microbatches: int) -> Iterator[None]:
        """Record the passes of a step within the `with` block. Gradients are recorded only in the last micro-batch,
        because the accumulated gradients are complete after this micro-batch."""
        self._microbatches = microbatches
        with ExitStack() as stack:
            for name, module in modules_of(run):
                stack.callback(module.register_forward_hook(partial(self._output, name)).remove)
            for param in run.ddp.params:
                self._watch_gradient(param, stack)
            for bucket in run.ddp.buckets:
                bucket.before_sync = self._bucket
                stack.callback(partial(setattr, bucket, "before_sync", None))
            watchers = run.pipeline.executor.watchers
            watchers.append(self._during)
            stack.callback(watchers.remove, self._during)
            stack.enter_context(self._collectives(run.runtime.state))
            yield

    @contextmanager
    def _during(self, action: Action) -> Iterator[None]:
        """Record tensors while a pipeline action runs. Nothing is recorded outside of actions. Reductions at the end of
        a step are therefore not recorded. The results of these reductions cannot be compared, because a rank and its
        peer hold different shards of the gradients."""
        self._recording, self._action = True, f"{action.kind.name} of micro-batch {action.microbatch}"
        self._ends = action.microbatch == self._microbatches - 1
        try:
            yield
        finally:
            self._recording = False

    def _output(self, name: str, module: nn.Module, args: object, output: object) -> None:
        if self._recording and isinstance(output, Tensor):
            self._last = name
            self.add(LOSS if output.dim() == 0 else OUTPUT, f"{name} ({self._action})", output)

    def _watch_gradient(self, param: nn.Parameter, stack: ExitStack) -> None:
        before: Callable[[], object] | None = getattr(param, "on_main_grad", None)
        name = param.meta.name  # type: ignore[attr-defined]

        def added() -> None:
            if self._recording and self._ends:
                self._last = f"gradient of {name}"
                grad: Tensor = param.main_grad  # type: ignore[attr-defined]
                self.add(GRADIENT, f"{name} ({self._action})", grad)
            if before is not None:
                before()

        param.on_main_grad = added  # type: ignore[attr-defined]
        stack.callback(partial(setattr, param, "on_main_grad", before))

    def _bucket(self, bucket: Bucket) -> None:
        for place in bucket.layout.params:
            start = place.start - bucket.layout.start
            grad = bucket.grads[start : start + place.stop - place.start]
            times = sum(name.startswith(f"{place.meta.name} (") for name in self.buckets)
            self.buckets[f"{place.meta.name} (reduction {times + 1})"] = sketch_of(grad)

    @contextmanager
    def _collectives(self, state: ParallelState) -> Iterator[None]:
        taps = Taps(self, state)
        with taps.installed():
            yield

    def message(self, operands: Sequence[Tensor], axis: str, ranks: str) -> Callable[[Sequence[Tensor]], None] | None:
        """Record the operands of a collective or point-to-point message. Return a function that records the results of
        the message, which are the argument of the function. If recording is off, do nothing and return None."""
        if not self._recording:
            return None
        self._count += 1
        label, key = f"{axis}, message {self._count}, after {self._last}", ranks
        for operand in operands:
            self.add(SENT, label, operand, key)

        def arrived(results: Sequence[Tensor]) -> None:
            for result in results:
                self.add(RECEIVED, label, result, key)

        return arrived


def modules_of(run: TrainingRun) -> Iterator[tuple[str, nn.Module]]:
    """Yield a pair for each module of this rank whose output is recorded: the name of the module in the full model, and
    the module. Recorded modules are modules without submodules, modules that directly own parameters, and the last
    stage, because its output is the loss."""
    for stage, model in run.stages.items():
        for name, module in model.named_modules():
            inner = next(module.children(), None)
            if inner is None or next(module.parameters(recurse=False), None) is not None or (not name and model.last):
                yield _global_name(model, name, stage), module


def _global_name(model: GPTModel, name: str, stage: int) -> str:
    if not name:
        return "loss" if model.last else f"stage {stage}"
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"] and len(parts) > 2:
        parts[2] = str(model.decoder.layers[int(parts[2])].number)
    return ".".join(parts)


class Taps:
    """Wrappers around the torch.distributed functions that training calls, and around the `wait` method of the work
    objects that these functions return."""

    def __init__(self, tape: Tape, state: ParallelState) -> None:
        self.tape = tape
        summed = {id(state.axis(name).group) for name in DATA_AXES} | {id(state.world.group), id(None)}
        self._axes: dict[int, tuple[str, tuple[int, ...]]] = {}
        for name in reversed(REPLICA_AXES):
            axis = state.axis(name)
            if axis.size > 1 and id(axis.group) not in summed:
                self._axes[id(axis.group)] = name, axis.ranks
        self._pending: dict[int, tuple[dist.Work, Callable[[], None]]] = {}
        self._numbers: dict[str, int] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record collectives and messages until the end of the `with` block."""
        there = [name for name in COLLECTIVES if hasattr(dist, name)]
        taps = {name: self._collective(name, getattr(dist, name)) for name in there}
        messages = {name: self._message(name, getattr(dist, name)) for name in ("isend", "irecv")}
        with replaced(
            *((dist, name, tap) for name, tap in (taps | messages).items()),
            # P2POp compares its operation with isend and irecv of distributed_c10d, so replace these functions as well
            *((distributed_c10d, name, tap) for name, tap in messages.items()),
            (dist.Work, "wait", self._wait(dist.Work.wait)),
        ):
            yield
        self._pending.clear()

    def _key(self, words: str) -> str:
        self._numbers[words] = self._numbers.get(words, 0) + 1
        return f"{words} {self._numbers[words]}"

    def _collective(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Wrap a torch.distributed collective, so that its operand and result are recorded. A collective with two
        tensor arguments writes the first and reads the second. A collective with one tensor argument reads and writes
        this tensor."""

        @functools.wraps(function)
        def tap(*args: P.args, **kwargs: P.kwargs) -> T:
            axis = self._axes.get(id(kwargs.get("group")))
            tensors = [each for each in args[:2] if isinstance(each, Tensor)]
            if axis is None or not tensors:
                return function(*args, **kwargs)
            result, operand = tensors[0], tensors[-1]
            arrived = self.tape.message([operand], f"{name} over {axis[0]}", self._key(f"{name} {axis[1]}"))
            work = function(*args, **kwargs)
            if arrived is not None:
                self._when_done(work, partial(arrived, [result]))
            return work

        return tap

    def _message(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        sends = name == "isend"

        @functools.wraps(function)
        def tap(*args: P.args, **kwargs: P.kwargs) -> T:
            group, tensor = kwargs.get("group"), args[0]
            axis = self._axes.get(id(group))
            if axis is None or not isinstance(tensor, Tensor):
                return function(*args, **kwargs)
            peer, own = peer_of(args, kwargs, axis[1]), dist.get_rank()
            ends = (own, peer) if sends else (peer, own)
            key = self._key(f"message {ends[0]} to {ends[1]} tag {kwargs.get('tag', 0)}")
            words = f"{'send' if sends else 'receive'} over {axis[0]}"
            arrived = self.tape.message([tensor] if sends else [], words, key)
            work = function(*args, **kwargs)
            if not sends and arrived is not None:
                self._when_done(work, partial(arrived, [tensor]))
            return work

        return tap

    def _when_done(self, work: object, then: Callable[[], None]) -> None:
        if isinstance(work, dist.Work):
            self._pending[id(work)] = work, then
        else:
            then()

    def _wait(self, function: Wait[P]) -> Wait[P]:
        @functools.wraps(function)
        def tap(work: dist.Work, *args: P.args, **kwargs: P.kwargs) -> bool:
            done = function(work, *args, **kwargs)
            if id(work) in self._pending:
                _, then = self._pending.pop(id(work))
                then()
            return done

        return tap


def peer_of(args: Sequence[object], kwargs: Mapping[str, object], ranks: Sequence[int]) -> object:
    """Return the rank that a message is sent to or received from. Callers pass this rank as `dst`, `src`, `group_dst`
    or `group_src`, or by position."""
    within = kwargs.get("group_dst", kwargs.get("group_src"))
    if isinstance(within, int):
        return ranks[within]
    return args[1] if len(args) > 1 else kwargs.get("dst", kwargs.get("src"))
