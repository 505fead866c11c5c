"""Shards of main parameters and optimizer states, and the interfaces of the objects that update them.

Every optimizer is a chain of transforms (modules `transforms` and `chain`). The chains of Adam and SGD consist of a
single fused link (module `fused`). `DistributedOptimizer` performs the other parts of a step, such as computing the
gradient norm and gathering the updated parameters.
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
"""Name of the main parameters in checkpoints, where they are stored like an optimizer state."""

CHUNK = 2**22
"""Maximum number of elements that an element-wise update processes at once. The limit bounds the memory of temporary
copies."""


@dataclass(frozen=True)
class ShardSpec:
    """Description of a shard, from which `Shard` is created. A shard is the part of a bucket that a rank updates, with
    the optimizer states of this part."""

    bucket: Bucket
    layout: BufferLayout
    """Layout of the bucket's buffer."""

    place: StateRange
    """Range of the bucket's elements that the shard contains. The `StateRange` also records whether the states of these
    elements are in host memory."""

    states: Sequence[State]
    """Optimizer states of the fused link (`FusedTransform`) that updates the bucket's parameters."""

    config: OptimizerConfig
    main_dtype: torch.dtype


class Shard:
    """Base class of shards. A shard is the part of a bucket that one rank updates, or a range of this part. A shard
    contains main parameters and optimizer states on the device or on the host. Subclasses define the storage format.
    The constructor allocates the states, so that a checkpoint can be loaded into them and the first step does not
    allocate memory for them.
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
        """Parameters that an update writes, and gradients that it reads. For a shard in host memory, both are the host
        copies that were passed to `attach`."""
        self.device = torch.device("cpu") if self.on_host else self.params.device
        """Device on which the states are stored and updated."""
        self.params_are_main = self.params.dtype == spec.main_dtype
        """True if the parameters already have the main dtype. In this case, checkpoints contain no separate main
        parameters."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a zero-initialized tensor for states on the shard's device."""
        if self.on_host:
            return self.bucket.host_zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    changes_params_when_loaded = False
    """True if loading main parameters can change how the model parameters are rounded, so that the parameters must be
    gathered again."""

    def attach(self, grads: Tensor, params: Tensor) -> None:
        """Set the tensors that the next update reads and writes: gradients `grads` and parameters `params`. Both
        tensors are copies in host memory."""
        self.grads, self.params = grads, params

    def write_params(self) -> None:
        """Copy the main parameters to this rank's part of the model parameters."""
        raise NotImplementedError

    def read_main(self, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop) of the shard's main parameters, as a tensor on the shard's device."""
        raise NotImplementedError

    def exported(self) -> dict[str, Tensor]:
        """Return the main parameters and states as flat tensors, keyed by name. A checkpoint is saved from these
        tensors or loaded into them."""
        raise NotImplementedError

    def take_up(self, loaded: Mapping[str, Tensor]) -> None:
        """Copy values that were loaded from a checkpoint to the shard. `loaded` contains the tensors of `exported()`
        with the loaded values. Tensors that are views of the shard's memory need no copy."""

    @property
    def nbytes(self) -> tuple[int, int]:
        """Size in bytes of the main parameters, and size in bytes of the states."""
        raise NotImplementedError

    def owned_pieces(self, start: int, stop: int) -> Iterator[tuple[Piece, slice]]:
        """Yield the parts of parameters that the shard contains within the range [start, stop) of the buffer. Each part
        is yielded as a pair of a `Piece` and a slice, which is the position of the part in the shard."""
        first, last = self.range
        for piece in self.bucket.layout.pieces(max(start, first), min(stop, last)):
            yield piece, slice(piece.offset - first, piece.offset - first + piece.stop - piece.start)

    def pieces(self, exported: Mapping[str, Tensor]) -> Iterator[OptimizerPiece]:
        """Yield a view of each tensor in `exported` for each part of a parameter that the shard contains."""
        for piece, span in self.owned_pieces(*self.range):
            for key, tensor in exported.items():
                yield OptimizerPiece(key, piece.meta, tensor[span], piece.start, piece.stop)


class OptimizerShard(Shard):
    """Shard that stores main parameters and states as plain tensors. The tensor `main` contains the main parameters,
    and `main.grad` contains their gradients.

    If the shard is on the device and the model parameters have the main dtype, the main parameters share the memory of
    the model parameters. Otherwise, the main parameters are a copy of the model parameters in the main dtype.
    """

    def __init__(self, spec: ShardSpec) -> None:
        super().__init__(spec)
        self.aliased = self.params_are_main and not self.on_host
        self.main = self.params if self.aliased else self.zeros(self.numel, spec.main_dtype).copy_(self.params)
        self.main.grad = None if self.on_host else self.grads
        self.states = {state.name: self._zeros(state) for state in spec.states}
        """Optimizer states of the fused link (`FusedTransform`) that updates the shard, keyed by name."""
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
    """Learning rate of the parameter groups with a decoupled learning rate, or None if there are no such groups."""

    def of(self, group: ParamGroup) -> tuple[float, float]:
        """Return the learning rate and the weight decay of a parameter group."""
        return group.lr(self.lr, self.decoupled_lr), group.decay(self.weight_decay)


@dataclass(frozen=True)
class StepValues:
    """Scalar inputs of an update. The tensors are float64 scalars on the device, so that the host need not wait for
    their values."""

    rates: Rates
    skip: Tensor
    """Flag that is 1 if the update is skipped, else 0."""

    updates: Tensor
    """Number of earlier updates. Skipped steps do not count."""


class ShardUpdate:
    """Base class of objects that update the shards of one rank. Examples are `Chain` and the kernels of fused links."""

    def step(self, values: StepValues) -> None:
        """Update all shards once."""
        raise NotImplementedError

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients that the next `step` uses by `factor`, which is a float64 scalar tensor on the
        device."""
        raise NotImplementedError

    def set_step_count(self, updates: int) -> None:
        """Set the number of earlier updates when a checkpoint is loaded."""


def scale_gradients_(shards: Sequence[Shard], factor: Tensor) -> None:
    """Multiply the gradients of shards in place by `factor`, which is a float64 scalar tensor on the device."""
    if shards:
        grads = [shard.grads for shard in shards]
        foreach_mul_(grads, factor.to(grads[0].dtype))


@runtime_checkable
class HostUpdateRule(Protocol):
    """Interface of objects with which `DistributedOptimizer` updates shards in host memory."""

    nbytes: int
    """Size in bytes of the host memory that the object uses in addition to the states, such as transfer buffers."""

    def start(self) -> None:
        """Start copying the gradients of the first shards to the host.

        The gradients must be reduced, but may still have to be multiplied by a factor, which `update` applies. Kernels
        that are launched between `start` and `update` must not read the parameters.
        """

    def scalars(self, skip: Tensor, updates: Tensor, factor: Tensor | None) -> HostCopy:
        """Start copying the scalar inputs of `update` to the host. Because the copy is launched early, `update` does
        not wait for kernels that are launched after this call."""

    def update(self, rates: Rates, scalars: HostCopy, scaled: bool) -> None:
        """Update the shards once, after waiting for the gradients that `start` copies. Call `start` first. `scalars` is
        the result of calling the method `scalars` for this step.

        If `scaled` is True, multiply the gradients by the factor that was passed to the method `scalars`. Kernels that
        are launched after `update` read the new parameters.
        """


def freeze_parameters(modules: Iterable[nn.Module], config: OptimizerConfig, world: Axis) -> list[str]:
    """Freeze the parameters that match a freezing rule. A frozen parameter has no gradient, no optimizer state and no
    place in the gradient buffers, so call this function before the gradient buffers are built. If there are custom
    parameter groups, return lines of text that describe the groups of all parameters that are not frozen. Otherwise,
    return an empty list. If there are freezing rules or custom parameter groups, all ranks must call this function
    together. If a rule does not fit the parameters of the whole model, the function raises ValueError on every rank.
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
