"""Snapshots of everything that a layout computes in a few steps, as global tensors, for comparing layouts.

Each rank reports fragments, which are rectangular blocks of global tensors. `ParamMeta` locates the block of a
parameter. The samples and positions in the micro-batch context locate the block of an activation. This module therefore
needs no code for specific layers. `assemble` combines the fragments in the order of computation and checks that
replicas agree and that nothing is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import isfinite
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.collectives import all_reduce_
from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.dist_checkpointing.state_dict import callback_prefix
from megatron.core.param_meta import ParamMeta
from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.training.checkpoints.checkpointing import callback_states
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.hooks import Callback, Meter, states_of
from megatron.training.progress import Interval
from megatron.training.run import TrainingRun
from megatron.training.train_step import train_step


@dataclass(frozen=True)
class Fragment:
    """Block of a global tensor, copied to the host. The global tensor is named `key` and has the shape `shape`, and the
    block `values` begins at `offset`. Snapshots sort tensors by increasing `order`."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", self.values.detach().to("cpu", copy=True))


PHASES = ("activation", "loss", "gradient", "grad_norm", "weight", "state", "moment", "callback")
"""Kinds of values that a step computes, in the order of computation."""


@dataclass(frozen=True)
class Label:
    """Step to which a tensor belongs. The keys of a snapshot begin with the text form of a label: `step 1`, or
    `initial` for the state before the first step."""

    step: int

    def __str__(self) -> str:
        return f"step {self.step}" if self.step else "initial"

    def order(self, phase: str, *place: int) -> tuple[int, ...]:
        """Return the key by which snapshots sort a tensor. `place` is the tensor's position among the tensors of the
        phase."""
        return (self.step, PHASES.index(phase), *place)


@dataclass
class Snapshot:
    """Global tensors in the order of computation."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    differing_replicas: dict[str, str] = field(default_factory=dict)
    """For each tensor whose replicas differ between ranks, an error message that says where the replicas differ. The
    dict is keyed by tensor."""

    @property
    def replica_errors(self) -> list[str]:
        """Error messages in `differing_replicas`."""
        return list(self.differing_replicas.values())

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]


def train_in_world(
    world_size: int,
    flags: Sequence[str] | RunConfig,
    steps: int = 2,
    timeout: float = 600.0,
    activations: bool = False,
    unseen: int = 0,
) -> Snapshot:
    """Train on forked gloo ranks and return the global tensors of each step.

    For step k = 1, 2, ..., keys are `step k loss`, `step k grad_norm`, `step k gradient NAME`, `step k weight NAME`,
    `step k exp_avg NAME` and so on, and for callbacks `step k callbacks.CALLBACK.STATE NAME`. The keys of initial
    weights are `initial weight NAME`.

    Args:
        world_size: Number of ranks.
        flags: Command line, or a configuration, which may already be resolved.
        steps: Number of recorded steps.
        timeout: Seconds after which the world counts as hanging.
        activations: Also record `step k activation MODULE` [samples, s, h], the outputs of the embedding and of each
            layer.
        unseen: Number of unrecorded steps before the recorded steps. Use unrecorded steps to test overlap between
            steps, because recording reads the parameters and therefore waits for their all-gather.

    Raises:
        ValueError: Validation refuses the configuration.
        RuntimeError: A rank failed. The message contains the traceback of the rank.
        TimeoutError: The world hangs. The message contains the stacks of all ranks.
    """
    config = resolve_legal(flags if isinstance(flags, RunConfig) else parse_args(flags), world_size)
    results = run_world(world_size, train_on_rank, config, steps, activations, unseen, timeout=timeout)
    return assemble([fragment for fragments in results for fragment in fragments])


def train_on_rank(
    rank: int, world_size: int, config: RunConfig, steps: int, activations: bool, unseen: int
) -> list[Fragment]:
    with local_run(config, rank, world_size) as run:
        start_callbacks(run)
        fragments = list(_weights(run, Label(0)))
        for _ in range(unseen):
            whole_step(run)
        for step in range(unseen + 1, unseen + steps + 1):
            with ExitStack() as hooks:
                seen = _Activations(run, Label(step), hooks) if activations else None
                fragments += train_and_snap(run, Label(step))
            fragments += seen.found if seen is not None else []
    return fragments


def train_and_snap(run: TrainingRun, label: Label) -> list[Fragment]:
    """Train one step and return this rank's fragments of the loss, gradients, weights and states."""
    interval = run.interval = Interval()
    found: list[Fragment] = []
    for buffer in run.ddp.buffers:
        buffer.grad_data.fill_(torch.nan)  # a gradient that this step does not compute remains NaN

    seen = _GradientMeter(run, label)
    run.meters.append(seen)
    try:
        whole_step(run)
    finally:
        run.meters.remove(seen)
    found += seen.found
    totals = all_reduce_(interval.losses[0].clone(), run.runtime.state.world)
    found.append(_scalar(label, "loss", (totals[0] / totals[1]).item()))
    found.append(_scalar(label, "grad_norm", interval.results[0].grad_norm))
    return found + state_fragments(run, label)


def state_fragments(run: TrainingRun, label: Label) -> list[Fragment]:
    """Return this rank's fragments of the weights, untrained states such as router biases, main parameters, moments and
    callback states."""
    return [*_weights(run, label), *_moments(run, label), *_of_callbacks(run, label)]


def keepers(run: TrainingRun) -> list[Callback]:
    """Return the callbacks that store state in checkpoints."""
    return [each for each in run.callbacks if states_of(each) or type(each).state is not Callback.state]


def start_callbacks(run: TrainingRun) -> None:
    """Call `on_start` of the callbacks that store state. Call this function before the first `whole_step`."""
    for callback in keepers(run):
        callback.on_start(run)


def whole_step(run: TrainingRun) -> None:
    """Run one training step and let callbacks update their states."""
    train_step(run)
    for callback in keepers(run):
        callback.on_step_end(run)


class _Activations:
    """Hook that records the outputs of this rank's embedding and layers in one step's forward passes."""

    def __init__(self, run: TrainingRun, label: Label, hooks: ExitStack) -> None:
        self.label, self.found = label, list[Fragment]()
        self.first_sample = run.progress.consumed_samples
        self.samples = run.batch_sizes.at(self.first_sample)
        self.seq_length = run.config.model.seq_length
        self.tp_rank = run.runtime.state.tp.rank if run.config.parallel.sequence_parallel else 0
        for model in run.stages.values():
            modules: dict[str, nn.Module] = {} if model.embedding is None else {"embedding": model.embedding}
            modules |= model.named_layers()
            for name, module in modules.items():
                place = getattr(module, "number", -1)
                handle = module.register_forward_hook(partial(self.record, name, place))
                hooks.callback(handle.remove)

    def record(self, name: str, place: int, module: nn.Module, args: tuple[object, ...], x: Tensor) -> None:
        """Record the activation x [n, b, h]. The batch context contains the positions and the samples of the tokens in
        x. If activation recomputation runs the module again, the values are overwritten with equal values."""
        context = args[-1]
        assert isinstance(context, BatchContext)
        rows = context.places_of(x, self.tp_rank).tolist()
        samples = (context.sample_index - self.first_sample).tolist()
        shape = (self.samples, self.seq_length, x.shape[-1])
        key, order = f"{self.label} activation {name}", self.label.order("activation", place)
        values = x.detach().transpose(0, 1)
        for i, sample in enumerate(samples):
            for run in _runs(rows):
                part = values[i : i + 1, run.start : run.stop]
                self.found.append(Fragment(key, shape, (sample, rows[run.start], 0), part, order))


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Divide a list into runs of consecutive numbers, and return the index range of each run."""
    cuts = [i + 1 for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1]
    return (range(start, stop) for start, stop in pairwise([0, *cuts, len(numbers)]))


def _scalar(label: Label, name: str, value: float) -> Fragment:
    return Fragment(f"{label} {name}", (), (), torch.tensor(value, dtype=torch.float64), label.order(name))


def _places(run: TrainingRun) -> dict[str, tuple[int, int]]:
    """Map each parameter to (pipeline stage, index in the stage), in forward order. A parameter that several stages
    share is mapped to the first of these stages."""
    places: dict[str, tuple[int, int]] = {}
    for stage, model in run.stages.items():
        for i, (name, (_, meta)) in enumerate(model.named_metas().items()):
            places.setdefault(name, (meta.shared_stages[0], 0) if meta.shared_stages else (stage, i))
    return places


def _shard(run: TrainingRun, label: Label, phase: str, meta: ParamMeta, values: Tensor, *place: int) -> Fragment:
    """Return a fragment with `values`, such as the gradient, for this rank's shard of a parameter."""
    offset, shape = meta.box(run.runtime.state.coords)
    assert tuple(values.shape) == shape
    order = label.order(phase, *place)
    return Fragment(f"{label} {phase} {meta.name}", meta.global_shape, offset, values, order)


def _weights(run: TrainingRun, label: Label) -> Iterator[Fragment]:
    run.ddp.gather_params_()
    params: list[Any] = run.ddp.params
    places = _places(run)
    for param in params:
        yield _shard(run, label, "weight", param.meta, param.detach(), *places[param.meta.name])
    for model in run.stages.values():
        for param, meta in model.named_metas().values():
            if not param.requires_grad:  # frozen parameters, and parameters without gradients, such as router biases
                yield _shard(run, label, "state", meta, param.detach())


class _GradientMeter(Meter):
    """Meter that records a step's gradient before clipping scales it."""

    def __init__(self, run: TrainingRun, label: Label) -> None:
        self.run, self.label = run, label
        self.found: list[Fragment] = []

    def reads_result(self, iteration: int) -> bool:
        return True

    def gradients_ready(self, factor: torch.Tensor) -> None:
        self.run.ddp.gather_grads_()
        self.found.extend(_gradients(self.run, self.label, factor.to(self.run.ddp.main_dtype)))


def _gradients(run: TrainingRun, label: Label, factor: torch.Tensor) -> Iterator[Fragment]:
    params: list[Any] = run.ddp.params
    places = _places(run)
    for param in params:
        stage, i = places[param.meta.name]  # the backward pass goes from the last parameter to the first
        yield _shard(run, label, "gradient", param.meta, param.main_grad * factor, -stage, -i)


def _moments(run: TrainingRun, label: Label) -> Iterator[Fragment]:
    return _pieces(run, run.optimizer.sharded_state(), label, "moment")


def _of_callbacks(run: TrainingRun, label: Label) -> Iterator[Fragment]:
    """Record the tensors of callbacks, and the numbers and strings that their `state()` returns."""
    for callback in keepers(run):
        yield from _pieces(run, callback.states, label, "callback", _callback_kind(callback.name))
    for name, state in callback_states(run.callbacks).items():
        kind = _callback_kind(name).removesuffix(".")
        for path, value in _leaves(state, "state"):
            key = f"{label} {kind} {path.replace(' ', '_')}"
            yield Fragment(key, (), (), torch.tensor(value, dtype=torch.float64), label.order("callback"))


def _callback_kind(name: str) -> str:
    """Return the prefix with which snapshot keys name the states of the callback `name`. Spaces are replaced with
    underscores."""
    return callback_prefix(name).replace(" ", "_")


def _leaves(state: object, path: str) -> Iterator[tuple[str, float]]:
    """Yield (path, value) for every entry of a JSON state. The value of a finite number is the number itself, and the
    value of any other leaf is a checksum. The value of a list or mapping is its length, so that a missing entry also
    counts as a difference."""
    if isinstance(state, (list, Mapping)):
        yield f"{path}.length", len(state)
        for name, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _leaves(value, f"{path}.{name}")
    else:
        yield path, state if isinstance(state, (int, float)) and isfinite(state) else crc32(repr(state).encode())


def _pieces(
    run: TrainingRun, pieces: Iterable[OptimizerPiece], label: Label, phase: str, prefix: str = ""
) -> Iterator[Fragment]:
    places = _places(run)
    for piece in pieces:
        key, order = f"{label} {prefix}{piece.key} {piece.meta.name}", label.order(phase, *places[piece.meta.name])
        for offset, values in piece.boxes(run.runtime.state.coords):
            yield Fragment(key, piece.global_shape, offset, values, order)


def assemble(fragments: Iterable[Fragment]) -> Snapshot:
    """Assemble global tensors from the fragments of all ranks, in order.

    If replicas differ, the first replica is used and the difference is recorded. Raises AssertionError if the fragments
    do not cover a whole tensor. This happens if a rank did not report, or if a fragment contradicts its metadata.
    """
    snapshot = Snapshot()
    covered: dict[str, Tensor] = {}
    orders: dict[str, tuple[int, ...]] = {}
    for fragment in fragments:
        orders.setdefault(fragment.key, fragment.order)
        if fragment.key not in snapshot.tensors:
            snapshot.tensors[fragment.key] = torch.zeros(fragment.shape, dtype=fragment.values.dtype)
            covered[fragment.key] = torch.zeros(fragment.shape, dtype=torch.bool)
        place = tuple(slice(o, o + n) for o, n in zip(fragment.offset, fragment.values.shape, strict=True))
        target, seen = snapshot.tensors[fragment.key][place], covered[fragment.key][place]
        different = seen & (target != fragment.values) & ~(target.isnan() & fragment.values.isnan())
        if different.any():
            where = tuple(o + i for o, i in zip(fragment.offset, different.nonzero()[0].tolist(), strict=True))
            snapshot.differing_replicas.setdefault(fragment.key, f"{fragment.key}: replicas differ at {where}")
        target.copy_(torch.where(seen, target, fragment.values))
        seen.fill_(True)
    for key, seen in covered.items():
        assert seen.all(), f"{key}: no rank has reported {tuple((~seen).nonzero()[0].tolist())}"
    snapshot.tensors = {key: snapshot.tensors[key] for key in sorted(snapshot.tensors, key=orders.__getitem__)}
    return snapshot


FLOOR = 1e-3
"""When a difference is divided by the norm of a tensor, the divisor is at least this fraction of the largest norm among
tensors of the same kind and step.

Some gradients are zero except for rounding. An example is the gradient of a key bias, on which softmax does not depend.
The norm of a gradient that is pure rounding noise is not a useful scale.
"""


def kind_of(key: str) -> str:
    """Remove the tensor's name from a key, so that `step 1 gradient NAME` becomes `step 1 gradient`. Return keys of
    scalars unchanged."""
    kind, _, name = key.rpartition(" ")
    return key if name in PHASES else kind


def floors_of(*snapshots: Snapshot) -> dict[str, float]:
    """Return the floor of each tensor, which is the smallest divisor for its relative differences. The dict is keyed by
    tensor. A relative difference is computed by dividing by the norm of the tensor or, if the floor is larger, by the
    floor."""
    largest: dict[str, float] = {}
    for snapshot in snapshots:
        for key, value in snapshot.tensors.items():
            norm = torch.linalg.vector_norm(value.double()).item()
            if isfinite(norm):
                largest[kind_of(key)] = max(norm, largest.get(kind_of(key), 0.0))
    return {key: FLOOR * largest.get(kind_of(key), 0.0) for snapshot in snapshots for key in snapshot.tensors}


def relative_difference(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference divided by the larger norm of the two tensors. If `floor` is larger than this
    norm, divide by `floor`. The result is 0 if both tensors are zero, and infinite if either tensor is not finite.
    """
    difference = torch.linalg.vector_norm((a - b).double()).item()
    scale = max(floor, *(torch.linalg.vector_norm(x.double()).item() for x in (a, b)))
    if difference != difference or scale == float("inf"):
        return float("inf")
    return difference / scale if scale else 0.0


def differences(a: Snapshot, b: Snapshot) -> Iterator[tuple[str, float]]:
    """Yield (key, relative difference) for every tensor of two snapshots, in the order of computation."""
    assert a.tensors.keys() == b.tensors.keys(), sorted(a.tensors.keys() ^ b.tensors.keys())
    floors = floors_of(a, b)
    return ((key, relative_difference(value, b[key], floors[key])) for key, value in a.tensors.items())


def moved_by_rounding(a: Snapshot, b: Snapshot, name: str, tolerance: float) -> Tensor | None:
    """Return a mask of the parameter elements whose gradients are pure rounding noise.

    The mask selects an element if its gradient is at most `tolerance` times the tensor's floor (`floors_of`) in every
    step, and is not zero in at least one step. Return None if the snapshots contain no gradient of the parameter
    `name`.
    """
    floors, largest = floors_of(a, b), None
    for key in (key for key in a.tensors if key.endswith(f" gradient {name}")):
        share = torch.maximum(a[key].abs(), b[key].abs()).double() / floors[key]
        largest = share if largest is None else torch.maximum(largest, share)
    return None if largest is None else (largest > 0) & (largest <= tolerance)


def first_difference(a: Snapshot, b: Snapshot, tolerance: float) -> tuple[str, float] | None:
    """Return the first tensor, in order of computation, in which two snapshots differ by more than `tolerance`
    (relative)."""
    return next((found for found in differences(a, b) if found[1] > tolerance), None)
