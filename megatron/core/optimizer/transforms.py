"""Transforms, which are the links of an optimizer chain, as in optax.

From the gradient of a parameter, a chain computes the value that is added to the parameter. Each link reads and
replaces `x.update`, which is the gradient at first. A link owns the states that its method `states` declares:

    class Momentum(Transform):
        def states(self, meta):
            return [elements("momentum", meta)]

        def update(self, x):
            x.update = x.states["momentum"].mul_(0.9).add_(x.update)

A rank holds only a flat part of each parameter. A link that needs data of elements on other ranks must make a request.
The link's `update` method is a generator, in which `yield from REQUEST` returns the result of the request. `x.sum` and
`x.mean` reduce over the whole parameter. `x.fold` updates a `reduced` state with a mean over the parameter. `x.whole`
calls a function with each whole matrix, on the rank that owns the matrix. The requests of many parameters are sent
together. The result is the same under every parallel layout.

A `FusedTransform` updates the flat shards of many parameters at once. Examples are torch's fused Adam, and Muon, which
exchanges all matrices of a stage. The links before a fused link change the gradient that the fused link reads. For the
links after a fused link, `x.param` is the updated parameter, as in `[FusedAdam(config), AverageWeights(0.999)]`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from inspect import isgeneratorfunction
from typing import ClassVar

import torch
from torch import Tensor

from megatron.core.boxes import boxes_of_flat_range
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.distributed.param_layout import BufferLayout, place_states
from megatron.core.optimizer.optimizer import Shard, ShardUpdate
from megatron.core.optimizer.planned_states import (
    ELEMENTS,
    ChainPlan,
    State,
    elements,
    matrix_size,
    of_matrices,
    reduced,
    reduced_shape,
)
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import ParamMeta

__all__ = [
    "AdamMoments",
    "AddDecay",
    "AverageWeights",
    "FusedTransform",
    "ParameterUpdate",
    "Requests",
    "ScaleByRate",
    "StageOfUpdate",
    "State",
    "Transform",
    "elements",
    "matrix_size",
    "of_matrices",
    "reduced",
    "together",
]

MatrixFunction = Callable[[Tensor, dict[str, Tensor]], Tensor]
"""Function that takes a matrix [rows, columns] and a dictionary of its states, and returns a matrix [rows, columns].
The function modifies the states in place."""


class Request:
    """Request for a result that requires data from other ranks. To obtain the result, write `result = yield from
    request`."""

    def __iter__(self) -> Generator[tuple[Request, ...], Sequence[Tensor], Tensor]:
        (result,) = yield (self,)
        return result


@dataclass(frozen=True)
class SumRequest(Request):
    """Request for a sum over all elements of a parameter, including the elements on other ranks."""

    partial: Tensor
    """This rank's contribution to the sum, a tensor of the same shape as the sum."""

    state: str | None = None
    """Name of the `reduced` state that `by` updates with the sum, or None if only the sum is requested."""

    by: Callable[[Tensor, Tensor], Tensor] | None = None
    """Function that takes elements of the state and the corresponding elements of the sum, and returns the new elements
    of the state."""


@dataclass(frozen=True)
class MatrixRequest(Request):
    """Request to apply a function to each whole matrix of a parameter. `values` contains the matrix elements that this
    rank holds."""

    values: Tensor
    function: MatrixFunction


def together(*requests: Request) -> Generator[tuple[Request, ...], Sequence[Tensor], Sequence[Tensor]]:
    """Make several requests at once, as in `a, b = yield from together(x.sum(v), x.sum(w))`."""
    return (yield requests)


Requests = Generator[tuple[Request, ...], Sequence[Tensor], None]
"""Return type of `Transform.update` methods that make requests."""


class ParameterUpdate:
    """Input and output of the links that update this rank's part of a parameter. The part is a flat range of n elements
    in the main dtype, where n may be 0."""

    meta: ParamMeta
    param: Tensor
    """Elements of the parameter [n]. The links of a chain must not change them."""

    update: Tensor
    """The update [n]. Each link of the optimizer chain may replace this tensor. Before the first link, the update is
    the clipped gradient, or zeros in a skipped step. After the last link, the update is added to the parameter."""

    states: Mapping[str, Tensor]
    """States of kind `elements`, keyed by name. Each state is a tensor [n], which links modify in place."""

    lr: float
    weight_decay: float
    """Weight decay, which is 0 for parameters without weight decay."""

    eps_mult: float
    """Factor by which --adam-eps is multiplied for this parameter (`ParamGroup.eps_mult`)."""

    step: Tensor
    """Number of this update, starting at 1. Skipped steps do not count. `step` is a float64 scalar tensor on the
    device, because the host does not know yet which steps were skipped."""

    def __init__(
        self,
        meta: ParamMeta,
        param: Tensor,
        update: Tensor,
        states: Mapping[str, Tensor],
        place: Place,
        scalars: tuple[float, float, Tensor],
        eps_mult: float = 1.0,
    ) -> None:
        self.meta = meta
        self.param = param
        self.update = update
        self.states = states
        self.lr, self.weight_decay, self.step = scalars
        self.eps_mult = eps_mult
        self._place = place

    def sum(self, values: Tensor, *dims: int) -> SumRequest:
        """Request the sum of `values` [n] over the dims `dims` of the whole parameter.

        The result has the parameter's shape, except that its size is 1 in each of `dims`. If no `dims` are given, the
        result is the scalar sum of all values.
        """
        partial = self._partial(values, reduced_shape(self.meta, dims))
        return SumRequest(partial if dims else partial.view(()))

    def mean(self, values: Tensor, *dims: int) -> SumRequest:
        """Request the mean of `values` over the dims `dims`. The arguments and the shape of the result are the same as
        for `sum`."""
        partial = self.sum(values, *dims).partial
        return SumRequest(partial / (self.meta.numel // partial.numel()))

    def fold(self, state: str, values: Tensor, by: Callable[[Tensor, Tensor], Tensor]) -> SumRequest:
        """Request that a `reduced` state is replaced by `by(state, mean)`. `mean` is the mean of `values` [n] over the
        dims in which the state has size 1.

        The result of the request is the whole new state, including the elements on other ranks. Each rank calls `by`
        only for the elements of the state that it stores, together with the corresponding elements of the mean.
        """
        partial = self._partial(values, self._place.reduced[state])
        return SumRequest(partial / (self.meta.numel // partial.numel()), state, by)

    def whole(self, values: Tensor, function: MatrixFunction) -> MatrixRequest:
        """Request the result of `function(matrix, states)` for each whole matrix of the parameter. `values` [n]
        contains the elements of the matrices that belong to this rank.

        `function` runs on the rank that owns the matrix. The result of the request is a tensor [n] with this rank's
        elements of the returned matrices.
        """
        return MatrixRequest(values, function)

    def spread(self, values: Tensor) -> Tensor:
        """Broadcast `values`, such as a result of `sum` or `fold`, to the shape of the whole parameter, and return this
        rank's elements of the broadcast tensor, [n]."""
        parts = [values[_within(box.offset, box.shape, values.shape)] for box in self._place.boxes]
        parts = [part.expand(box.shape).reshape(-1) for part, box in zip(parts, self._place.boxes, strict=True)]
        return torch.cat(parts) if parts else values.new_empty(0)

    def _partial(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """Return this rank's contribution to a sum. The contribution is zero if a replica of the elements on another
        rank is counted instead."""
        found = values.new_zeros(shape)
        summed = [dim for dim, size in enumerate(shape) if size == 1]
        for box in self._place.boxes if self._place.counts else ():
            part = values[box.start - self._place.start : box.stop - self._place.start].view(box.shape)
            found[_within(box.offset, box.shape, shape)] += part.sum(summed, keepdim=True) if summed else part
        return found


class Place:
    """Location of a range of elements of a parameter's local tensor within the whole parameter. The elements form one
    or more rectangular blocks of the whole parameter, which the attribute `boxes` lists."""

    def __init__(
        self,
        local: tuple[tuple[int, ...], tuple[int, ...]],
        held: tuple[int, int],
        counts: bool,
        reduced: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Compute the attribute `boxes`.

        Args:
            local: Offset and shape of the local tensor within the whole parameter.
            held: Range [start, stop) of the elements in the flattened local tensor.
            counts: Whether this rank's elements are included in sums over the parameter. If False, a replica of these
                elements on another rank is included instead.
            reduced: Shapes of the `reduced` states, keyed by name.
        """
        self.start = held[0]
        self.counts = counts
        self.reduced = reduced
        self.boxes = boxes_of_flat_range(*local, *held)


def _within(offset: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that select a rectangular block of the parameter from a tensor of shape `whole`. A tensor of
    shape `whole` must be broadcastable to the shape of the parameter."""
    return tuple(
        slice(0, 1) if size == 1 else slice(start, start + length)
        for start, length, size in zip(offset, shape, whole, strict=True)
    )


class Transform:
    """Base class of the links of an optimizer chain. A link transforms the update of one parameter at a time."""

    whole_matrices: ClassVar[bool] = False
    """True if the transform calls `ParameterUpdate.whole`, but declares no state of kind `of_matrices`."""

    def states(self, meta: ParamMeta) -> Sequence[State]:
        """Return the states that the transform keeps for a parameter.

        The result must depend only on `meta`, because memory planning calls this method as well.
        """
        return ()

    def update(self, x: ParameterUpdate) -> Requests | None:
        """Replace `x.update`, and modify the tensors in `x.states` in place.

        All ranks must make the same requests, so the requests of a link may depend only on `x.meta`. In a skipped step,
        the chain discards the new `x.update` and states.
        """
        raise NotImplementedError(f"{type(self).__name__} must write update()")

    def flops(self, meta: ParamMeta) -> int:
        """Return the number of FLOPs of the matrix products in one update of a whole parameter. Estimates of the step
        time use this number."""
        return 0


@dataclass(frozen=True)
class StageOfUpdate:
    """Properties of a pipeline stage that fused links (`FusedTransform`) need to build their kernels."""

    layouts: Sequence[BufferLayout]
    """Layouts of the buffers that contain the rank's parameters."""

    dims: ParallelDims
    axis: Axis
    """Ranks of the stage."""

    main_dtype: torch.dtype
    device: torch.device
    compiled: bool
    """True if `torch.compile` may be used."""


class FusedTransform(Transform):
    """Base class of fused links. A fused link updates the main parameters of whole shards in place, and its kernels
    process many parameters at once.

    All states of a fused link are of kind `elements`. The method `states` must return the same names and dtypes for
    every parameter. The states of a fused link are stored together with the main parameters (`OptimizerShard.states`),
    including padding. Either all parameters of a buffer must use the same fused link, or no parameter of the buffer may
    use a fused link. Matrices whose role is in `OptimizerConfig.whole_roles` are in separate buffers.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config

    def update(self, x: ParameterUpdate) -> None:
        raise AssertionError("a fused link updates whole shards: call kernel() instead of update()")

    def kernel(self, shards: Sequence[Shard], stage: StageOfUpdate) -> ShardUpdate:
        """Return the object that updates `shards`. The object must also apply the learning rate and the weight decay.

        In a skipped step, the object must leave the shards unchanged. If its `step` method communicates between the
        ranks of the stage, all of these ranks must call `kernel`, including ranks without shards.
        """
        raise NotImplementedError(f"{type(self).__name__} must write kernel()")


class AddDecay(Transform):
    """Link that adds weight decay * parameter to the update. For decoupled weight decay, place this link directly
    before `ScaleByRate`."""

    def update(self, x: ParameterUpdate) -> None:
        if x.weight_decay:
            x.update = x.update + x.weight_decay * x.param


class AdamMoments(Transform):
    """Link that divides the moving average of the gradients by the square root of the moving average of the squared
    gradients, as in Adam (arXiv 1412.6980)."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.beta1 = config.adam_beta1
        self.beta2 = config.adam_beta2
        self.eps = config.adam_eps

    def states(self, meta: ParamMeta) -> Sequence[State]:
        return [elements("exp_avg", meta), elements("exp_avg_sq", meta)]

    def update(self, x: ParameterUpdate) -> None:
        average, square = x.states["exp_avg"], x.states["exp_avg_sq"]
        average.lerp_(x.update, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(x.update, x.update, value=1 - self.beta2)
        scale = (square / (1 - self.beta2**x.step)).sqrt_().add_(self.eps * x.eps_mult)
        x.update = average / (1 - self.beta1**x.step) / scale


class ScaleByRate(Transform):
    """Link that multiplies the update by the negative learning rate."""

    def update(self, x: ParameterUpdate) -> None:
        x.update = x.update * -x.lr


class AverageWeights(Transform):
    """Link that keeps an exponential moving average of the weights in the state `averaged`. This link must be the last
    link of a chain."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def states(self, meta: ParamMeta) -> Sequence[State]:
        return [elements("averaged", meta)]

    def update(self, x: ParameterUpdate) -> None:
        average, after = x.states["averaged"], x.param + x.update
        average.copy_(torch.where(x.step > 1, average.lerp(after, 1 - self.decay), after))


def chain_of(config: OptimizerConfig, meta: ParamMeta) -> tuple[Transform, ...]:
    """Return the links that update a parameter.

    The function raises ValueError in three cases. A link is not a `Transform`, or does not override its method `update`
    (`kernel` for a fused link). The chain has several fused links. The optimizer is registered with `by_element`,
    although the update of an element depends on other elements.
    """
    name = config.optimizer if meta.matrix and meta.role in config.whole_roles else config.elementwise
    made = OPTIMIZERS.build(name, config, meta)
    links = tuple(link for link in made if isinstance(link, Transform))
    if len(links) < len(made):
        raise ValueError(f"--optimizer {name}: a link of its chain is not a Transform; derive its class from Transform")
    for link in links:
        base, method = (FusedTransform, "kernel") if isinstance(link, FusedTransform) else (Transform, "update")
        if getattr(type(link), method, None) is getattr(base, method):
            form = "kernel(shards, stage)" if base is FusedTransform else "update(x)"
            raise ValueError(f"--optimizer {name}: its link {type(link).__name__} has no {form}; write it")
    if sum(isinstance(link, FusedTransform) for link in links) > 1:
        raise ValueError(
            f"--optimizer {name}: a chain must have at most one fused link; remove all but one of {_names(links)}"
        )
    if OPTIMIZERS.facts(name).by_element:
        for link in links:
            if isgeneratorfunction(link.update) or any(state.kind != ELEMENTS for state in link.states(meta)):
                what = f"{type(link).__name__} makes requests, or keeps states of a kind other than elements"
                raise ValueError(f"--optimizer {name} is registered with by_element=True, and {what}; remove it")
    return links


def states_of_parameter(config: OptimizerConfig, meta: ParamMeta) -> list[State]:
    """Return the states that the links of a parameter's chain keep, except the states of fused links. The chain stores
    the returned states, and the shards store the states of fused links."""
    links = (link for link in chain_of(config, meta) if not isinstance(link, FusedTransform))
    return [state for link in links for state in link.states(meta)]


def plan_of_chain(
    config: OptimizerConfig, layouts: Sequence[BufferLayout], dims: ParallelDims, ranks: Sequence[int]
) -> ChainPlan:
    """Return the `ChainPlan` of the states of a pipeline stage.

    Args:
        config: Optimizer settings.
        layouts: Layouts of the buffers of the stage's ranks.
        dims: Sizes of the parallel dimensions.
        ranks: Ranks of the stage.
    """

    def states_of(meta: ParamMeta) -> list[State]:
        return states_of_parameter(config, meta)

    def asks_for_matrices(meta: ParamMeta) -> bool:
        return any(link.whole_matrices for link in chain_of(config, meta))

    distributed, ranges = config.use_distributed_optimizer, place_states(layouts, config)
    return ChainPlan(layouts, states_of, asks_for_matrices, dims, ranks, distributed, ranges)


def _names(links: Sequence[Transform]) -> str:
    return " and ".join(type(link).__name__ for link in links if isinstance(link, FusedTransform))
