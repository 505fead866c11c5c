"""Shards of main parameters and optimizer states, and the interfaces through which a rank updates its shards.

Every optimizer is a chain of transforms (modules `transforms` and `chain`). The chains of Adam and SGD consist of one
fused link (module `fused`). `DistributedOptimizer` performs the rest of a step, from the gradient norm to the
all-gather of updated parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megatron.core.collectives import gather_objects
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.param_groups import ParamGroup, lines_of_groups
from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.dist_checkpointing.state_dict import tagged_parameters
from megatron.core.distributed.param_and_grad_buffer import Bucket
from megatron.core.distributed.param_layout import BufferLayout, Piece, StateRange
from megatron.core.host_to_device import HostCopy
from megatron.core.optimizer.planned_states import State
from megatron.core.parallel_state import Axis
from megatron.core.torch_private import foreach_mul_

MAIN_PARAM = "main_param"
"""Name under which main parameters are stored among the optimizer states."""

CHUNK = 2**22
"""Number of elements per chunk of an element-wise update. The chunk size limits the memory of temporary copies."""


@dataclass(frozen=True)
class ShardSpec:
    """Description of a shard: the part of a bucket that a rank updates, and the optimizer states of this part."""

    bucket: Bucket
    layout: BufferLayout
    """Layout of the bucket's buffer."""

    place: StateRange
    """Range of the bucket's elements. A `StateRange` also records whether the states of its elements are in host
    memory."""

    states: Sequence[State]
    """Optimizer states of the fused link (`FusedTransform`) that updates the bucket's parameters."""

    config: OptimizerConfig
    main_dtype: torch.dtype


class Shard:
    """The part of a bucket that one rank updates, or a range of this part. A shard contains main parameters and states
    in any storage format, on the device or the host. States are allocated immediately, so that a checkpoint can be
    loaded into them and memory use does not grow in the first step.
    """

    def __init__(self, spec: ShardSpec) -> None:
        bucket, place = spec.bucket, spec.place
        self.bucket = bucket
        self.layout = spec.layout
        self.group = spec.layout.group
        self.on_host, self.numel = place.on_host, place.numel
        first = bucket.owned_range[0]
        self.range = first + place.start, first + place.stop
        """Range [start, stop) of the shard's elements in the buffer."""
        self.device_params = bucket.owned_params[place.start : place.stop]
        self.device_grads = bucket.owned_grads[place.start : place.stop]
        self.params, self.grads = self.device_params, self.device_grads
        """Tensors that an update reads and writes. For a shard in host memory, these tensors are the copies passed to
        `attach`."""
        self.device = torch.device("cpu") if self.on_host else self.params.device
        """Device on which states are stored and updated."""
        self.params_are_main = self.params.dtype == spec.main_dtype
        """True if the model parameters themselves serve as main parameters. If `params_are_main` is True, checkpoints
        contain no separate main parameters."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate memory for states on the shard's device."""
        if self.on_host:
            return self.bucket.host_zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    changes_params_when_loaded = False
    """True if the model parameters may be rounded differently after main parameters were loaded."""

    def attach(self, grads: Tensor, params: Tensor) -> None:
        """Let the next update read `grads` and write `params`. Both tensors are copies in host memory."""
        self.grads, self.params = grads, params

    def write_params(self) -> None:
        """Write main parameters to this rank's part of the parameters."""
        raise NotImplementedError

    def read_main(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the shard's main parameters, on the device of the shard."""
        raise NotImplementedError

    def exported(self) -> dict[str, Tensor]:
        """Return the states as flat tensors, keyed by kind of state. A checkpoint is saved from these tensors, or
        loaded into them."""
        raise NotImplementedError

    def take_up(self, loaded: Mapping[str, Tensor]) -> None:
        """Copy loaded values to the shard. `loaded` contains the tensors of `exported()`, into which a checkpoint was
        loaded. Tensors that are views of the shard's memory are not copied."""

    @property
    def nbytes(self) -> tuple[int, int]:
        """Return the sizes in bytes of the main parameters and of the states."""
        raise NotImplementedError

    def owned_pieces(self, start: int, stop: int) -> Iterator[tuple[Piece, slice]]:
        """Return the parts of parameters within [start, stop) of the buffer, and their positions in the shard."""
        first, last = self.range
        for piece in self.bucket.layout.pieces(max(start, first), min(stop, last)):
            yield piece, slice(piece.offset - first, piece.offset - first + piece.stop - piece.start)

    def pieces(self, exported: Mapping[str, Tensor]) -> Iterator[OptimizerPiece]:
        """Yield views of the tensors in `exported`: one for each kind of state and each part of a parameter that the
        shard contains."""
        for piece, span in self.owned_pieces(*self.range):
            for key, tensor in exported.items():
                yield OptimizerPiece(key, piece.meta, tensor[span], piece.start, piece.stop)


class OptimizerShard(Shard):
    """A shard whose main parameters and states are tensors in the main dtype. The tensor `main` contains the main
    parameters, and its attribute `grad` contains the gradient.

    If the parameters are on the device and have the main dtype, the main parameters share their memory. Otherwise, the
    main parameters are a copy of the parameters in the main dtype.
    """

    def __init__(self, spec: ShardSpec) -> None:
        super().__init__(spec)
        self.aliased = self.params_are_main and not self.on_host
        self.main = self.params if self.aliased else self.zeros(self.numel, spec.main_dtype).copy_(self.params)
        self.main.grad = None if self.on_host else self.grads
        self.states = {state.name: self._zeros(state) for state in spec.states}
        """Optimizer states of a fused link (`FusedTransform`), keyed by name."""
        self.written_by_update = False
        """True if the update of the main parameters also writes the model parameters."""

    def _zeros(self, state: State) -> Tensor:
        assert not state.scale_block, "a plain shard cannot store states with block scales"
        dtype = self.main.dtype if state.dtype is None else getattr(torch, state.dtype)
        return self.zeros(self.numel, dtype)

    def attach(self, grads: Tensor, params: Tensor) -> None:
        super().attach(grads, params)
        self.main.grad = grads

    def write_params(self) -> None:
        if not (self.aliased or self.written_by_update):
            self.params.copy_(self.main)

    def read_main(self, start: int, stop: int) -> Tensor:
        return self.main[start:stop]

    def exported(self) -> dict[str, Tensor]:
        return ({} if self.params_are_main else {MAIN_PARAM: self.main}) | self.states

    def take_up(self, loaded: Mapping[str, Tensor]) -> None:
        if self.params_are_main and not self.aliased:
            self.main.copy_(self.device_params)

    @property
    def nbytes(self) -> tuple[int, int]:
        return 0 if self.aliased else self.main.nbytes, sum(state.nbytes for state in self.states.values())


@dataclass(frozen=True)
class Rates:
    """Learning rates and weight decay for one step."""

    lr: float
    weight_decay: float = 0.0
    decoupled_lr: float | None = None
    """Learning rate of the parameter groups with a decoupled learning rate; None if there are none."""

    def of(self, group: ParamGroup) -> tuple[float, float]:
        """Return (learning rate, weight decay) of a group of parameters."""
        return group.lr(self.lr, self.decoupled_lr), group.decay(self.weight_decay)


@dataclass(frozen=True)
class StepValues:
    """Scalar values that one update uses. The tensors are float64 scalars on the device; the host does not wait for
    them."""

    rates: Rates
    skip: Tensor
    """1 if the update is skipped, else 0."""

    updates: Tensor
    """Number of updates before this one, without skipped steps."""


class ShardUpdate:
    """Base class of objects that update the shards of one rank, such as a chain of transforms, or the kernels of one
    fused link."""

    def step(self, values: StepValues) -> None:
        """Update all shards once."""
        raise NotImplementedError

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients that the next `step` uses by `factor`, a float64 scalar on the device."""
        raise NotImplementedError

    def set_step_count(self, updates: int) -> None:
        """Set the number of earlier updates to the number recorded in a checkpoint."""


def scale_gradients_(shards: Sequence[Shard], factor: Tensor) -> None:
    """Multiply the gradients of shards by `factor`, a float64 scalar on the device."""
    if shards:
        grads = [shard.grads for shard in shards]
        foreach_mul_(grads, factor.to(grads[0].dtype))


@runtime_checkable
class HostUpdateRule(Protocol):
    """Interface through which `DistributedOptimizer` updates shards in host memory."""

    nbytes: int
    """Host memory in bytes that is used in addition to the states."""

    def start(self) -> None:
        """Start copying the gradients of the first shards to the host.

        The gradients must be final, except for a factor that `update` may apply. Kernels launched between `start` and
        `update` must not read the parameters.
        """

    def scalars(self, skip: Tensor, updates: Tensor, factor: Tensor | None) -> HostCopy:
        """Start copying the scalar inputs of `update` to the host, so that `update` need not wait for kernels that are
        launched later."""

    def update(self, rates: Rates, scalars: HostCopy, scaled: bool) -> None:
        """Update the shards once. Call `update` after `start`. `scalars` is the result of `scalars()` for this step.
        `update` waits for the gradients.

        If `scaled` is True, the update multiplies the gradients by the `factor` passed to `scalars()`. Kernels launched
        after `update` see the new parameters.
        """


def freeze_parameters(modules: Iterable[nn.Module], config: OptimizerConfig, world: Axis) -> list[str]:
    """Freeze the parameters to which a freezing rule applies. Call this function before gradient buffers are built. If
    there are custom parameter groups, return lines of text that describe the groups of all parameters that are not
    frozen. A frozen parameter has no gradient, is in no bucket and has no optimizer state. If there are freezing rules
    or custom parameter groups, all ranks must call this function together. If a rule does not fit the parameters of the
    whole model, every rank raises ValueError.
    """
    if not config.parameter_rules and not config.has_own_groups:
        return []
    trained = {meta.name: (meta, param) for meta, param in tagged_parameters(modules) if param.requires_grad}
    own = {name: meta for name, (meta, _) in trained.items()}
    whole = {name: meta for found in gather_objects(own, world) for name, meta in found.items()}
    config.check_rules(whole.values())
    for meta, param in trained.values():
        param.requires_grad_(not config.freezes(meta))
    if not config.has_own_groups:
        return []
    left = (meta for meta in whole.values() if not config.freezes(meta))
    return list(lines_of_groups({meta.name: (config.group_of(meta), meta.numel) for meta in left}))
