"""Everything that a layout computes in a few steps, as global tensors: what comparisons of layouts compare.

Each rank reports fragments, boxes of global tensors, which it finds through `ParamMeta`; no layer has code here.
`assemble` puts them together and insists that replicas agree and that nothing is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.boxes import boxes_of_flat_range
from megatron.core.parallel_state import ParallelState, initialize_model_parallel
from megatron.training.arguments import parse_args
from megatron.training.initialize import Runtime
from megatron.training.launch import Launch
from megatron.training.local_world import run_world
from megatron.training.setup import TrainingRun, build_run
from megatron.training.training import Interval, train_step
from megatron.training.validation import resolve, validate


@dataclass(frozen=True)
class Fragment:
    """`values` at `offset` of the global tensor `key` of `shape`."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


@dataclass
class Snapshot:
    """Global tensors in the order in which they were computed."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    replica_errors: list[str] = field(default_factory=list)
    """Places where ranks that should hold equal values do not."""

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]


def train_in_world(world_size: int, argv: Sequence[str], steps: int = 2, timeout: float = 120.0) -> Snapshot:
    """Trains `steps` steps on `world_size` gloo ranks under the flags `argv`.

    Keys, for step k = 1, 2, ...: `step k loss`, `step k grad_norm`, `step k gradient NAME`, `step k weight NAME`,
    `step k exp_avg NAME`, ... and `initial weight NAME`. Raises ValueError if the configuration is not legal.
    """
    config = resolve(parse_args(argv), world_size)
    problems = validate(config, world_size)
    if problems:
        raise ValueError("\n".join(map(str, problems)))
    results = run_world(world_size, _train_on_rank, config, steps, timeout=timeout)
    return assemble([fragment for fragments in results for fragment in fragments])


def _train_on_rank(rank: int, world_size: int, config: Any, steps: int) -> list[Fragment]:
    parallel = config.parallel
    state = initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size,
        parallel.use_tp_pp_dp_mapping,
    )
    with ExitStack() as resources:
        run = build_run(config, Runtime(Launch(rank, world_size, rank), torch.device("cpu"), state))
        resources.callback(run.data.close)
        fragments = list(_weights(run, "initial"))
        for step in range(1, steps + 1):
            fragments += train_and_snap(run, f"step {step}")
    return fragments


def train_and_snap(run: TrainingRun, label: str) -> list[Fragment]:
    """One training step, and the fragments of everything it computed on this rank."""
    interval = Interval()
    found: list[Fragment] = []

    def before_update() -> None:
        # The gradient of the step, before clipping scales it.
        run.ddp.gather_grads_()
        found.extend(_gradients(run, label))

    train_step(run, interval, before_update=before_update)
    totals = interval.losses[0].clone()
    if run.runtime.launch.world_size > 1:
        torch.distributed.all_reduce(totals)
    found.append(_scalar(f"{label} loss", (totals[0] / totals[1]).item()))
    found.append(_scalar(f"{label} grad_norm", interval.results[0].grad_norm))
    return found + list(_weights(run, label)) + list(_moments(run, label))


def _scalar(key: str, value: float) -> Fragment:
    return Fragment(key, (), (), torch.tensor(value, dtype=torch.float64))


def _parameters(run: TrainingRun) -> Iterator[tuple[Any, tuple[int, ...]]]:
    for param in run.ddp.params:
        offset, shape = param.meta.box(run.runtime.state.coords)  # type: ignore[attr-defined]
        assert tuple(param.shape) == shape
        yield param, offset


def _weights(run: TrainingRun, label: str) -> Iterator[Fragment]:
    run.optimizer.finish_param_sync()
    for param, offset in _parameters(run):
        meta = param.meta
        yield Fragment(f"{label} weight {meta.name}", meta.global_shape, offset, param.detach().clone())
    for model in run.stages.values():
        for name, (param, meta) in model.named_metas().items():
            if not param.requires_grad:  # moved on by other rules than the optimizer's, and whole on every rank
                origin = (0,) * param.ndim
                yield Fragment(f"{label} state {name}", meta.global_shape, origin, param.detach().clone())


def _gradients(run: TrainingRun, label: str) -> Iterator[Fragment]:
    for param, offset in _parameters(run):
        meta = param.meta
        yield Fragment(f"{label} gradient {meta.name}", meta.global_shape, offset, param.main_grad.clone())


def _moments(run: TrainingRun, label: str) -> Iterator[Fragment]:
    state: ParallelState = run.runtime.state
    for piece in run.optimizer.sharded_state():
        offset, shape = piece.meta.box(state.coords)
        for box in boxes_of_flat_range(offset, shape, piece.start, piece.stop):
            values = piece.data[box.start - piece.start : box.stop - piece.start].view(box.shape).clone()
            yield Fragment(f"{label} {piece.key} {piece.meta.name}", piece.meta.global_shape, box.offset, values)


def assemble(fragments: Iterable[Fragment]) -> Snapshot:
    """Global tensors from the fragments of all ranks. Replicas that differ are noted, the first one stands.

    Raises AssertionError if a tensor is not covered: a rank has not reported, or not what its metadata says.
    """
    snapshot = Snapshot()
    covered: dict[str, Tensor] = {}
    for fragment in fragments:
        if fragment.key not in snapshot.tensors:
            snapshot.tensors[fragment.key] = torch.zeros(fragment.shape, dtype=fragment.values.dtype)
            covered[fragment.key] = torch.zeros(fragment.shape, dtype=torch.bool)
        place = tuple(slice(o, o + n) for o, n in zip(fragment.offset, fragment.values.shape, strict=True))
        target, seen = snapshot.tensors[fragment.key][place], covered[fragment.key][place]
        different = seen & (target != fragment.values) & ~(target.isnan() & fragment.values.isnan())
        if different.any():
            snapshot.replica_errors.append(f"{fragment.key}: replicas differ at {_first_place(different, fragment)}")
        target.copy_(torch.where(seen, target, fragment.values))
        seen.fill_(True)
    for key, seen in covered.items():
        assert seen.all(), f"{key}: no rank has reported {_first_missing(seen)}"
    return snapshot


def _first_place(different: Tensor, fragment: Fragment) -> tuple[int, ...]:
    index = different.nonzero()[0].tolist()
    return tuple(o + i for o, i in zip(fragment.offset, index, strict=True))


def _first_missing(seen: Tensor) -> tuple[int, ...]:
    return tuple((~seen).nonzero()[0].tolist())


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the larger norm; 0 for two zeros, infinite if either is not finite."""
    difference = torch.linalg.vector_norm((a - b).double()).item()
    scale = max(torch.linalg.vector_norm(x.double()).item() for x in (a, b))
    if difference != difference or scale == float("inf"):
        return float("inf")
    return difference / scale if scale else 0.0


def first_difference(a: Snapshot, b: Snapshot, tolerance: float) -> tuple[str, float] | None:
    """The first tensor, in order of computation, in which two snapshots differ by more than `tolerance` relative.

    Gradients that are sums of cancelling terms are measured against the largest gradient of the step: a key bias,
    whose gradient is zero but for rounding, has no scale of its own.
    """
    assert a.tensors.keys() == b.tensors.keys(), sorted(a.tensors.keys() ^ b.tensors.keys())
    for key, value in a.tensors.items():
        error = relative_difference(value, b[key])
        if error > tolerance:
            return key, error
    return None
