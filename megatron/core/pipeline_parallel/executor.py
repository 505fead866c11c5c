"""Executor that runs the action list of a pipeline rank on the rank's stages.

The same executor runs every schedule, with and without pipeline parallelism, in training and in evaluation. The action
list (from `passes.pipeline_lists`) determines all operations and their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from megatron.core.collectives import PassPair
from megatron.core.pipeline_parallel.actions import BACKWARDS, Action, Kind, counterpart, units
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.p2p import PipelineP2P, Receive
from megatron.core.tensor_parallel.linear_gemms import WeightCasts
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue

Module = TypeVar("Module", bound=Callable[..., Tensor])
"""Type of the stages. A stage is called with (hidden states or None, micro-batch) and returns hidden states. The last
stage returns the loss sum instead."""

Micro = TypeVar("Micro")
"""Type of the micro-batches that the stages accept."""


def _nothing(action: Action) -> None:
    pass


@dataclass
class Held:
    """Tensors that a rank stores between actions, because a later action needs them."""

    outbox: dict[Action, Tensor] = field(default_factory=dict)
    """Outputs and input gradients that have been computed but not sent yet, keyed by send action."""

    arriving: dict[Action, Receive] = field(default_factory=dict)
    """Pending receives, keyed by receive action."""

    saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = field(default_factory=dict)
    """Input and autograd graph of each forward pass whose backward pass has not run yet. The keys are (stage,
    micro-batch)."""

    def __bool__(self) -> bool:
        return bool(self.outbox or self.arriving or self.saved)


class PipelineExecutor(Generic[Module, Micro]):
    """Executor that runs the stages of one rank and exchanges messages with other ranks.

    The output of a stage is kept only until it has been sent, because the backward pass needs only the autograd node of
    the output, not its values.

    A subclass may override `handle` to support further kinds of actions or to wrap every action.
    """

    def __init__(
        self,
        stages: Mapping[int, Module],
        layout: PipelineLayout,
        p2p: PipelineP2P,
        queue: WeightGradQueue | None = None,
        casts: WeightCasts | None = None,
        pair: PassPair | None = None,
    ) -> None:
        """Create the executor of one rank.

        Args:
            stages: Modules of the stages on this rank, keyed by global stage number. `module(hidden, batch)` returns
                hidden states [s, b, h], or [s/tp, b, h] under sequence parallelism. The last stage returns the scalar
                loss sum of the micro-batch. The argument `hidden` of the first stage is None.
            layout: Placement of all stages on pipeline ranks.
            p2p: Channel that sends and receives messages.
            queue: Queue in which linear layers store their weight-gradient jobs. Lists with I and W actions require a
                queue.
            casts: Cache of low-precision copies of the stages' weights. The copies are kept while `run_actions` runs.
            pair: Object that interleaves a forward and a backward pass.
        """
        pp = p2p.pp
        assert sorted(stages) == layout.stages_of(pp.rank), f"stages {sorted(stages)} on pipeline rank {pp.rank}"
        self.stages = stages
        self.layout = layout
        self.pp = pp
        self.p2p = p2p
        self.queue = queue
        self.casts, self.pair = casts or WeightCasts(), pair or PassPair()
        self.current: Action | None = None
        """Action that is currently running. Reports about hangs contain this action."""
        self.message_from: int | None = None
        """Global rank of the sender of the message that this rank is waiting for, or None."""
        self.after: Callable[[Action], None] = _nothing
        """Diagnostic hook that is called after each action."""
        self.watchers: list[Callable[[Action], AbstractContextManager[None]]] = []
        """Functions that take an action and return a context manager. The executor runs each action, including the wait
        for its message, within the context managers that all these functions return."""
        self.timed: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Function that takes "forward" or "backward", and returns a context manager that times a training pass of this
        kind. The context encloses the computation of the pass, but not the wait for messages. If a forward pass and a
        backward pass are interleaved, they are timed together as one backward pass."""
        self._handlers = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_backward,
            Kind.W: self._weight_backward,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
        }
        self.held = Held()
        self._in_turns = False
        self._begin((), 1.0, training=False)

    def run(
        self,
        actions: Sequence[Action],
        batches: Sequence[Micro],
        *,
        loss_scale_seed: float | Tensor = 1.0,
        last_forward: Callable[[Module, Tensor | None, Micro], Tensor] | None = None,
    ) -> list[Tensor]:
        """Run one step over `batches`.

        If the list contains no backward passes, autograd is disabled. If an action raises an exception, the name of the
        action is added to the exception as a note.

        Args:
            actions: The rank's action list.
            batches: Micro-batches of the step, which must be the same on every pipeline rank.
            loss_scale_seed: Initial gradient of every loss sum. The parameters accumulate the gradients of the loss
                sums of all micro-batches, multiplied by `loss_scale_seed`.
            last_forward: Function that replaces the call of the last stage by `last_forward(module, hidden, batch)`.
                `run` then returns the results of `last_forward`, which may have any shape, instead of loss sums.
                `last_forward` is only supported for lists without backward passes.

        Returns:
            The detached loss sum of each micro-batch on the rank of the last stage, and an empty list on all other
            ranks.
        """
        microbatches = 1 + max((action.microbatch for action in actions), default=-1)
        assert len(batches) == microbatches, f"{len(batches)} batches for a list of {microbatches} microbatches"
        training = any(action.kind in BACKWARDS for action in actions)
        assert last_forward is None or not training, (
            "last_forward is not supported in lists with backward passes, which need a loss"
        )
        self.held = Held()
        self._begin(batches, loss_scale_seed, training, last_forward)
        self.run_actions(actions)
        return self.end()

    def run_actions(self, actions: Sequence[Action]) -> None:
        """Run the actions in order. Autograd is enabled in training only."""
        with torch.set_grad_enabled(self.training), self.casts.kept():
            for unit in units(actions):
                self._run_unit(unit)
        if self.queue is not None:
            self.queue.assert_empty()

    def end(self) -> list[Tensor]:
        """Wait until all messages have been sent, and return the loss sums. `run` returns these loss sums."""
        self.p2p.finish()
        assert not self.held, "messages or autograd graphs are left over at the end of the action list"
        return self.losses()

    def drop(self) -> None:
        """Wait until all messages have arrived, and discard all tensors that the executor still holds. Each pipeline
        rank must have posted all its sends before it calls this method."""
        for receive in self.held.arriving.values():
            receive.wait()
        self.p2p.finish()
        self.held = Held()

    def losses(self) -> list[Tensor]:
        """Return the loss sums that have been computed so far, in micro-batch order."""
        return [self._losses[microbatch] for microbatch in sorted(self._losses)]

    def results(self) -> list[Tensor]:
        """Return the loss sums that have been computed so far, and all tensors that are passed between stages: tensors
        that have not been sent yet, are being sent, or are being received."""
        arriving = (receive.buffer for receive in self.held.arriving.values())
        return [*self._losses.values(), *self.held.outbox.values(), *self.p2p.sending(), *arriving]

    def _begin(
        self,
        batches: Sequence[Micro],
        loss_scale_seed: float | Tensor,
        training: bool,
        last_forward: Callable[[Module, Tensor | None, Micro], Tensor] | None = None,
    ) -> None:
        self._batches = batches
        self._seed = loss_scale_seed
        self.training = training
        self._last_forward = last_forward
        self._in_turns = False
        self._losses: dict[int, Tensor] = {}

    def _run_unit(self, unit: tuple[Action, ...]) -> None:
        """Run a unit, that is, either one action, or an FB action with the two passes that it interleaves. If the unit
        raises an exception, the names of its actions are added to the exception as a note."""
        self.current, *pair = unit
        try:
            with record_function(str(self.current)):
                self._run_in_turns(*pair) if pair else self.run_action(self.current)
        except Exception as error:
            error.add_note(f"pipeline rank {self.pp.rank} was running {' and '.join(map(str, pair or unit))}")
            raise
        for action in pair or unit:
            self.after(action)
        self.current = None

    def run_action(self, action: Action) -> None:
        """Run one action within the context managers of `watchers`."""
        if self.watchers:
            with ExitStack() as stack:
                for watcher in self.watchers:
                    stack.enter_context(watcher(action))
                self.handle(action)
        else:
            self.handle(action)

    def handle(self, action: Action) -> None:
        """Call the method that runs actions of the kind of `action`."""
        self._handlers[action.kind](action)

    def _clock(self, phase: str) -> AbstractContextManager[object]:
        """Return the context manager that times a single pass. Two interleaved passes are timed together, so the method
        returns a null context while they run."""
        return nullcontext() if self._in_turns else self.timed(phase)

    def _run_in_turns(self, *pair: Action) -> None:
        """Interleave a forward pass and a backward pass, with the executor's `PassPair`."""

        def run(action: Action) -> None:
            with record_function(str(action)):
                self.run_action(action)

        with self.timed("backward"):
            self._in_turns = True
            self.pair.run(*(partial(run, action) for action in pair))
            self._in_turns = False

    def _forward(self, action: Action) -> None:
        _, stage, microbatch = action
        hidden = None if stage == 0 else self._take(Action(Kind.RECV_F, stage, microbatch))
        if hidden is not None and self.training:
            hidden.requires_grad_()
        output, edge = self._compute_forward(action, hidden)
        if self.training:
            self.held.saved[stage, microbatch] = (hidden, edge)
        is_last = stage == self.layout.num_stages - 1
        if not is_last:
            self.held.outbox[Action(Kind.SEND_F, stage, microbatch)] = output
            return
        scalar = output.dim() == 0 or self._last_forward is not None
        assert scalar, f"the last stage returned {tuple(output.shape)}, not a scalar loss sum"
        self._losses[microbatch] = output
        if self.training:  # the last stage starts its backward pass from this gradient instead of a received message
            self.held.outbox[Action(Kind.SEND_B, stage + 1, microbatch)] = torch.ones_like(output) * self._seed

    def _compute_forward(self, action: Action, hidden: Tensor | None) -> tuple[Tensor, GradientEdge | None]:
        _, stage, microbatch = action
        forward: Callable[[Tensor | None, Micro], Tensor] = self.stages[stage]
        if stage == self.layout.num_stages - 1 and self._last_forward is not None:
            forward = partial(self._last_forward, self.stages[stage])
        with self._clock("forward") if self.training else nullcontext():
            output = forward(hidden, self._batches[microbatch])
        # If all parameters of the first stage are frozen, its output requires no gradient, and the stage has no
        # backward pass.
        edge = get_gradient_edge(output) if self.training and output.requires_grad else None
        return output.detach(), edge

    def _backward(self, action: Action) -> None:
        _, stage, microbatch = action
        grad_output = self._take(Action(Kind.RECV_B, stage, microbatch))
        hidden, edge = self.held.saved.pop((stage, microbatch))
        if edge is None:
            return
        with self._clock("backward"):
            torch.autograd.backward([edge], [grad_output])
        if hidden is not None:
            assert hidden.grad is not None, f"stage {stage} received an input that does not affect its output"
            self.held.outbox[Action(Kind.SEND_B, stage, microbatch)] = hidden.grad

    def _input_backward(self, action: Action) -> None:
        """Run the backward pass, but queue the weight-gradient jobs of linear layers instead of running them."""
        assert self.queue is not None, f"{action} needs a WeightGradQueue"
        self.queue.begin((action.stage, action.microbatch))
        self._backward(action)
        self.queue.end()

    def _weight_backward(self, action: Action) -> None:
        """Run the weight-gradient jobs that the I action of the same stage and micro-batch queued."""
        assert self.queue is not None, f"{action} needs a WeightGradQueue"
        with self._clock("backward"):
            self.queue.run((action.stage, action.microbatch))

    def _send(self, action: Action) -> None:
        self.p2p.send(self.held.outbox.pop(action), self._peer(action), self._tag(action))

    def _receive(self, action: Action) -> None:
        self.held.arriving[action] = self.p2p.receive(self._peer(action), self._tag(counterpart(action)))

    def _take(self, receive: Action) -> Tensor:
        """Return the message of a receive action. The message may come from another rank or from another stage of this
        rank."""
        if receive in self.held.arriving:
            self.message_from = self.pp.ranks[self._peer(receive)]
            message = self.held.arriving.pop(receive).wait()
            self.message_from = None
            return message
        return self.held.outbox.pop(counterpart(receive))

    def _peer(self, action: Action) -> int:
        """Return the pipeline rank at the other end of a message."""
        return self.layout.rank_of(counterpart(action).stage)

    def _tag(self, send: Action) -> int:
        """Return the tag of the message that the action `send` sends. The tag depends only on the send action, so the
        sender and the receiver compute the same tag."""
        place = send.microbatch * self.layout.num_stages + send.stage
        return 2 * place + (send.kind is Kind.SEND_B)
