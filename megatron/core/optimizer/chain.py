"""Runs the optimizer chains of all parameters of a rank's pipeline stage. Every optimizer is a chain of transforms (see
the module `transforms`), which are also called links.

A fused link (`FusedTransform`) updates the flat shards of many parameters at once. All other links update one parameter
at a time: `_run_links` is a generator that runs the links of one parameter, and pauses when a link requests data from
other ranks. The generators of a batch of parameters are interleaved. When each generator of the batch has either
finished or made a request, all requests are answered together. Requests for sums are answered by one reduce-scatter and
one all-gather over the ranks of the stage, and requests for whole matrices by one exchange with the ranks that own the
matrices (`MatrixExchange`). Between the reduce-scatter and the all-gather, each rank updates its shard of the `reduced`
states (see `planned_states`) with the sums that it received. The all-gather then distributes the updated states and the
sums to all ranks of the stage, so sharding the `reduced` states requires no additional communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.collectives import start_all_gather, start_reduce_scatter
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.fused import fused_parts
from megatron.core.optimizer.matrix_exchange import MatrixExchange
from megatron.core.optimizer.matrix_plan import ROUND, Matrix, Part
from megatron.core.optimizer.optimizer import CHUNK, OptimizerShard, Shard, ShardUpdate, StepValues, scale_gradients_
from megatron.core.optimizer.planned_states import ELEMENTS, REDUCED, ChainPlan, PlannedParam, State
from megatron.core.optimizer.transforms import (
    FusedTransform,
    MatrixRequest,
    ParameterUpdate,
    Place,
    Request,
    Requests,
    StageOfUpdate,
    SumRequest,
    Transform,
    chain_of,
)
from megatron.core.parallel_state import ParallelState


@dataclass(frozen=True)
class _Links:
    """Links (transforms) of a parameter's chain: the links before the fused link (`FusedTransform`), the fused link
    itself, and the links after the fused link."""

    before: Sequence[Transform]
    """Links that precede the fused link. If there is no fused link, `before` contains all links."""

    fused: FusedTransform | None
    after: Sequence[Transform]

    @classmethod
    def of(cls, chain: Sequence[Transform]) -> _Links:
        for place, link in enumerate(chain):
            if isinstance(link, FusedTransform):
                return cls(chain[:place], link, chain[place + 1 :])
        return cls(chain, None, ())


@dataclass
class _Param:
    """Elements of one parameter that this rank updates, and their optimizer states."""

    planned: PlannedParam
    links: _Links
    shard: OptimizerShard
    held: tuple[int, int]
    """Range [start, stop) of the elements of the parameter's local tensor that `shard` contains. The range is (0, 0) if
    `shard` contains none of them."""

    span: slice
    """Position of the `held` elements in `shard`, as a slice."""

    place: Place
    elements: dict[str, Tensor] = field(default_factory=dict)
    reduced: dict[str, Tensor] = field(default_factory=dict)
    """States of kind `reduced` (see `planned_states`), keyed by name. Each tensor is this rank's flat shard of a
    state."""

    matrices: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """States of the matrices that this rank owns, keyed by matrix number and by state name. The states are not
    flattened."""


_Elements = tuple[_Param, slice]
"""A parameter, and a slice of the elements of this parameter that this rank updates."""


@dataclass
class _Run:
    """Running update of a slice of one parameter's elements."""

    param: _Param
    cut: slice
    x: ParameterUpdate
    steps: Requests
    into: Tensor | None
    """Gradient tensor into which the result of the links is written if these links precede a fused link, because a
    fused link reads its input from the gradient. If no fused link follows, `into` is None and the result is added to
    the parameter."""

    requests: tuple[Request, ...] = ()
    done: bool = False

    def advance(self, results: Sequence[Tensor] | None) -> None:
        """Run the generator `steps` until it makes its next requests or ends. `results` contains the results of its
        previous requests, or is None in the first call."""
        try:
            self.requests = next(self.steps) if results is None else self.steps.send(results)
        except StopIteration:
            self.requests, self.done = (), True


class Chain(ShardUpdate):
    """Optimizer chains for the parameters of `shards`, which are either all on the device or all on the host.

    All ranks of the stage must create this object together, unless the optimizer updates each element independently.
    The states of fused links are stored in the shards, together with the main parameters and the gradients. `Chain`
    stores the states of all other links.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        shards: Sequence[Shard],
        plan: ChainPlan,
        ddp: DistributedDataParallel,
        state: ParallelState,
    ) -> None:
        self.config, self.shards = config, shards
        self.plan = plan
        self.axis = state.axis("stage")
        self.dtype = ddp.main_dtype
        self.on_host = any(shard.on_host for shard in shards)
        self.device = shards[0].device if shards else ddp.device
        self.by_element = not config.updates_together
        """True if every element is updated independently of all other elements, so that links make no requests."""
        compiled = not self.on_host and ddp.parallel_config.compiles(ddp.device.type)
        stage = StageOfUpdate(ddp.layouts, state.dims, self.axis, self.dtype, self.device, compiled)
        self._fused = fused_parts(config, shards, stage)
        self.exchange = MatrixExchange(plan.matrices, self.axis, self.dtype, self.device)
        self._params = [
            self._on_rank(planned, links, shard, state)
            for planned, links in [(planned, _Links.of(chain_of(config, planned.meta))) for planned in plan.params]
            for shard in shards
            if (links.before or links.after)
            and shard.bucket is ddp.buffers[planned.place[0]].buckets[planned.place[1]]
            and not (self.by_element and planned.part_within(*shard.range) == (0, 0))
        ]
        self._by_name = {param.planned.meta.name: param for param in self._params}
        self._before = self._batches([param for param in self._params if param.links.before])
        self._after = self._batches([param for param in self._params if param.links.after])
        changed = {id(param.shard) for param in self._params if param.links.before}
        self._scaling = [each for each in self._fused if not any(id(shard) in changed for shard in each.shards)]
        """Fused links whose kernels multiply each gradient by the factor of `scale_gradients` while they read the
        gradient."""
        read_scaled = {id(shard) for each in self._scaling for shard in each.shards}
        self._scaled_here = [shard for shard in shards if id(shard) not in read_scaled]

    @property
    def kernels(self) -> list[ShardUpdate]:
        """Kernels of the chain's fused links (`FusedTransform`)."""
        return [each.kernel for each in self._fused]

    def _batches(self, params: Sequence[_Param]) -> list[list[_Elements]]:
        """Divide the parameters into batches whose elements are updated together."""
        if self.by_element:
            return [[part] for param in params for part in _chunks(param)]
        return list(_batches(params, ROUND * self.axis.size))

    def _on_rank(self, planned: PlannedParam, links: _Links, shard: Shard, state: ParallelState) -> _Param:
        assert isinstance(shard, OptimizerShard), (
            "only the kernel of a fused link can read the storage format of these states"
        )
        meta = planned.meta
        here = self.axis.rank
        coords = state.coords
        held = planned.part_within(*shard.range)
        first = planned.range.start + held[0] - shard.range[0]
        span = slice(first, first + held[1] - held[0]) if held[0] < held[1] else slice(0, 0)
        replica = any(coords[axis][0] for axis in meta.replica_axes)
        copied = not self.config.use_distributed_optimizer and not state.axis(meta.data_axis).first
        shapes = {each.name: each.shape for each in planned.states if each.kind == REDUCED}
        place = Place(meta.box(coords), held, not (replica or copied), shapes)
        param = _Param(planned, links, shard, held, span, place)
        for each in planned.states:
            if each.kind == ELEMENTS:
                param.elements[each.name] = self._zeros(each, held[1] - held[0])
            elif each.kind == REDUCED:
                start, stop = self.plan.part(each, here)
                param.reduced[each.name] = self._zeros(each, stop - start)
            else:
                for number, _, _ in self.plan.owned(planned, each, here):
                    found = self._zeros(each, *each.shape[meta.stacked :])
                    param.matrices.setdefault(number, {})[each.name] = found
        return param

    def _zeros(self, state: State, *shape: int) -> Tensor:
        dtype = self.dtype if state.dtype is None else getattr(torch, state.dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def tensors(self) -> list[Tensor]:
        """States that the chain stores on this rank."""
        kept = [[*p.elements.values(), *p.reduced.values()] for p in self._params]
        kept += [list(states.values()) for p in self._params for states in p.matrices.values()]
        return [tensor for tensors in kept for tensor in tensors]

    @property
    def nbytes(self) -> int:
        """Size in bytes of the states that the chain stores on this rank."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def pieces(self) -> Iterator[OptimizerPiece]:
        """Yield views of the states that the chain stores on this rank. Writing to a view changes the state."""
        for param in self._params:
            for state in param.planned.states:
                yield from self._pieces(param, state)

    def _pieces(self, param: _Param, state: State) -> Iterator[OptimizerPiece]:
        meta, here = param.planned.meta, self.axis.rank
        if state.kind == ELEMENTS:
            if param.held != (0, 0):
                yield OptimizerPiece(state.name, meta, param.elements[state.name], *param.held)
        elif state.kind == REDUCED:
            start, stop = self.plan.part(state, here)
            if start < stop:
                yield OptimizerPiece(state.name, meta, param.reduced[state.name], start, stop, state.shape)
        else:
            for number, start, stop in self.plan.owned(param.planned, state, here):
                flat = param.matrices[number][state.name].view(-1)
                yield OptimizerPiece(state.name, meta, flat, start, stop, state.shape)

    def step(self, values: StepValues) -> None:
        for batch in self._before:
            self._update(batch, values, after=False)
        for kernel in self.kernels:
            kernel.step(values)
        for batch in self._after:
            self._update(batch, values, after=True)

    def _update(self, batch: Sequence[_Elements], values: StepValues, after: bool) -> None:
        """Update all parameters of a batch. If `after` is False, run the links before the fused link. Otherwise, run
        the links after the fused link."""
        skipped = values.skip > 0
        runs = [self._begin(*each, values, after) for each in batch]
        for run in runs:
            run.advance(None)
        while waiting := [run for run in runs if not run.done]:
            results = self._answers(waiting, skipped)
            for run, answers in zip(waiting, results, strict=True):
                run.advance(answers)
        for run in runs:
            if run.into is not None:
                run.into.copy_(run.x.update)
            else:
                _keep_or_copy_(run.x.param, run.x.param + run.x.update, skipped)
            for name, state in run.param.elements.items():
                _keep_or_copy_(state[run.cut], run.x.states[name], skipped)

    def _begin(self, param: _Param, cut: slice, values: StepValues, after: bool) -> _Run:
        shard = param.shard
        assert shard.main.grad is not None
        states = {name: state[cut].to(self.dtype, copy=True) for name, state in param.elements.items()}
        main = shard.main.detach()[param.span][cut]
        grad = shard.main.grad[param.span][cut]
        # In a skipped step, the gradient may contain infinities and NaNs, so the links receive zeros instead.
        update = torch.zeros_like(grad) if after else grad.masked_fill(values.skip > 0, 0.0)
        scalars = (*values.rates.of(shard.group), values.updates + 1.0)
        x = ParameterUpdate(param.planned.meta, main, update, states, param.place, scalars, shard.group.eps_mult)
        links = param.links.after if after else param.links.before
        into = grad if param.links.fused is not None and not after else None
        return _Run(param, cut, x, _run_links(links, x), into)

    def scale_gradients(self, factor: Tensor) -> None:
        scale_gradients_(self._scaled_here, factor)
        for each in self._scaling:
            each.kernel.scale_gradients(factor)

    def set_step_count(self, updates: int) -> None:
        for kernel in self.kernels:
            kernel.set_step_count(updates)

    def _answers(self, runs: Sequence[_Run], skipped: Tensor) -> list[list[Tensor]]:
        """Return the results of all current requests, as one list for each update in `runs`."""
        sums = [(run.param, request) for run in runs for request in run.requests if isinstance(request, SumRequest)]
        found = iter(self._sums(sums, skipped) if sums else ())
        matrices = [(run.param, r) for run in runs for r in run.requests if isinstance(r, MatrixRequest)]
        transformed = iter(self._transformed(matrices, skipped))
        return [[next(found if isinstance(r, SumRequest) else transformed) for r in run.requests] for run in runs]

    def _sums(self, asked: Sequence[tuple[_Param, SumRequest]], skipped: Tensor) -> list[Tensor]:
        """Return the sums of the requests in `asked`, each added up over all ranks of the stage. If a request names a
        state, update the state with the sum and return the updated state instead."""
        size = self.axis.size
        lengths = [self.plan.part_length(request.partial.numel()) for _, request in asked]
        blocks = torch.zeros(size, sum(lengths), dtype=self.dtype, device=self.device)
        for (_, request), block in zip(asked, blocks.split(lengths, dim=1), strict=True):
            flat = request.partial.new_zeros(block.numel())
            flat[: request.partial.numel()] = request.partial.view(-1)
            block.copy_(flat.view(block.shape))
        own = start_reduce_scatter(blocks.view(-1), self.axis).wait()
        for (param, request), part in zip(asked, own.split(lengths), strict=True):
            if request.state is not None and request.by is not None:
                state = param.reduced[request.state]
                values = part[: state.numel()]
                values.copy_(request.by(state.to(self.dtype, copy=True), values))
                _keep_or_copy_(state, values, skipped)
        whole = start_all_gather(own, self.axis).wait().view(size, -1)
        return [
            part.reshape(-1)[: request.partial.numel()].view(request.partial.shape)
            for (_, request), part in zip(asked, whole.split(lengths, dim=1), strict=True)
        ]

    def _transformed(self, asked: Sequence[tuple[_Param, MatrixRequest]], skipped: Tensor) -> list[Tensor]:
        """Return the results of the requests for whole matrices in `asked`. The requested function is called for each
        matrix on the rank that owns the matrix."""
        if not asked:
            return []
        plan = self.plan.matrices
        requests = {param.planned.meta.name: request for param, request in asked}
        results = {name: torch.empty_like(request.values) for name, request in requests.items()}
        assert len(requests) == len(asked), "a link may request whole matrices only once at a time"

        def read(part: Part, values: Tensor) -> None:
            name = plan.matrices[part.matrix].meta.name
            values.copy_(self._held(requests[name].values, part))

        def direction(stack: Tensor, numbers: Sequence[int]) -> Tensor:
            return torch.stack([transformed(*each) for each in zip(stack, numbers, strict=True)])

        def transformed(matrix: Tensor, number: int) -> Tensor:
            name = plan.matrices[number].meta.name
            states = self._by_name[name].matrices.get(number, {})
            new = {key: state.to(self.dtype, copy=True) for key, state in states.items()}
            result = requests[name].function(matrix, new)
            for key, state in states.items():
                _keep_or_copy_(state, new[key], skipped)
            return result

        def write(part: Part, matrix: Matrix, values: Tensor) -> None:
            self._held(results[matrix.meta.name], part).copy_(values)

        numbers = [number for name in requests for number in plan.numbers(name)]
        self.exchange.transform(read, direction, write, sorted(numbers))
        return [results[param.planned.meta.name] for param, _ in asked]

    def _held(self, flat: Tensor, part: Part) -> Tensor:
        """Return a view of the elements of `part` in `flat`. `flat` contains this rank's elements of the parameter that
        contains the part."""
        first = self._by_name[self.plan.matrices.matrices[part.matrix].meta.name].span.start
        return flat[part.start - first : part.stop - first].view(part.held)[part.within]


def _run_links(links: Sequence[Transform], x: ParameterUpdate) -> Requests:
    """Run the `update` methods of all links in order, and yield their requests."""
    for link in links:
        requests = link.update(x)
        if requests is not None:
            yield from requests


def _chunks(param: _Param) -> Iterator[_Elements]:
    """Split the elements of a parameter into chunks of at most `CHUNK` elements. The elements must be updated
    independently of each other."""
    for start in range(0, param.held[1] - param.held[0], CHUNK):
        yield param, slice(start, start + CHUNK)


def _batches(params: Sequence[_Param], limit: int) -> Iterator[list[_Elements]]:
    """Yield batches of consecutive parameters. The unsharded parameters of a batch have at most `limit` elements in
    total. A parameter with more than `limit` elements forms its own batch. `limit` bounds the memory of temporary
    copies."""
    batch: list[_Elements] = []
    filled = 0
    for param in params:
        if batch and filled + param.planned.meta.numel > limit:
            yield batch
            batch, filled = [], 0
        batch.append((param, slice(None)))
        filled += param.planned.meta.numel
    if batch:
        yield batch


def _keep_or_copy_(state: Tensor, new: Tensor, skipped: Tensor) -> None:
    """Copy the values `new` to `state`, unless the step is skipped."""
    state.copy_(torch.where(skipped, state, new.to(state.dtype)))
