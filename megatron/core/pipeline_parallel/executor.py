"""Runs a rank's list of actions on its stages.

One executor runs every schedule, on one rank or many, training or evaluation: what it does, and in which order,
is all in the list (`passes.pipeline_lists`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from megatron.core.collectives import PassPair
from megatron.core.pipeline_parallel.actions import BACKWARDS, COMPUTE, Action, Kind, counterpart, units
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.p2p import PipelineP2P, Receive
from megatron.core.tensor_parallel.linear_gemms import WeightCasts
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue


def _nothing(action: Action) -> None:
    pass


def _nothing_to_validate() -> bool:
    return False


def _one_version(of_next_step: bool) -> None:
    pass


class StaleForwards(Exception):
    """Parameters have changed since the forward passes that a run has made: run its list again from the start. Raised
    on all ranks or on none, when no message is on its way."""


class PipelineExecutor:
    """The stages of one rank, and the messages between them and other ranks.

    `stages` maps the global number of each local stage to its module: `module(hidden | None, batch)` returns hidden
    [s(/tp), b, h], and on the last stage the loss sum of the microbatch, a scalar. The first stage is given None.
    `p2p` carries the messages. Lists with I and W need the `queue` that the linear layers of the stages leave their
    weight gradients in. `casts` are the stages' copies of weights, kept for a run.

    An output is kept only until it is sent: the backward needs its place in the autograd graph, not its values.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        layout: PipelineLayout,
        p2p: PipelineP2P,
        queue: WeightGradQueue | None = None,
        casts: WeightCasts | None = None,
        pair: PassPair | None = None,
    ) -> None:
        pp = p2p.pp
        assert sorted(stages) == layout.stages_of(pp.rank), f"stages {sorted(stages)} on pipeline rank {pp.rank}"
        self.stages = stages
        self.layout = layout
        self.pp = pp
        self.p2p = p2p
        self.queue = queue
        self.casts, self.pair = casts or WeightCasts(), pair or PassPair()
        self.current: Action | None = None
        """The action being run, for whoever reports a hang."""
        self.message_from: int | None = None
        """The rank of the world whose message it waits for."""
        self.after: Callable[[Action], None] = _nothing
        """Called after each action, for diagnosis."""
        self.watchers: list[Callable[[Action], AbstractContextManager[None]]] = []
        """Contexts entered around each action, with the wait for its message."""
        self.timed: Callable[[str], AbstractContextManager[Any]] = nullcontext
        """Wraps what "forward" and "backward" actions of training compute, without the wait for their messages. A
        forward and a backward that run in turns count as backward."""
        self.validate: Callable[[], bool] = _nothing_to_validate
        """Called by VALIDATE: returns whether parameters have changed, the same on all ranks."""
        self.use_weights: Callable[[bool], None] = _one_version
        """Called before a pass of training, with whether it is of the next step: chooses the version of the weights."""
        self._in_turns = False
        self._handlers = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_backward,
            Kind.W: self._weight_backward,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            Kind.VALIDATE: self._validate,
        }
        self._losses: dict[int, Tensor] = {}
        self._outbox: dict[Action, Tensor] = {}  # by send: what a stage has computed and none has taken yet
        self._arriving: dict[Action, Receive] = {}
        self._saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = {}
        self._begin((), 1.0, training=False)

    def run(
        self,
        actions: Sequence[Action],
        batches: Sequence[Any],
        *,
        loss_scale_seed: float | Tensor = 1.0,
        last_forward: Callable[..., Tensor] | None = None,
        following: Sequence[Any] = (),
        begun: bool = False,
    ) -> list[Tensor]:
        """Runs one step over `batches`, one for each microbatch, the same on every pipeline rank.

        Gradients of loss * `loss_scale_seed`, summed over microbatches, are added up in the parameters; a list
        without backwards runs without autograd. Returns the detached loss sum of each microbatch on the rank of
        the last stage, and [] elsewhere. An exception carries a note that names the action. A list with VALIDATE may
        raise `StaleForwards`.

        A list may begin the passes of the `following` micro-batches, those of the next step, with which the next run
        goes on, whose passes have then `begun` (`ScheduleFacts.of_step`).

        In a list without backwards, `last_forward(module, hidden, batch)` may replace the last stage's own forward
        pass; what it returns, of any shape, comes back instead of the loss sums."""
        ended = [action.microbatch for action in actions if action.kind in BACKWARDS] or [a.microbatch for a in actions]
        microbatches = 1 + max(ended, default=-1)
        assert len(batches) == microbatches, f"{len(batches)} batches for a list of {microbatches} microbatches"
        training = any(action.kind in (Kind.B, Kind.I) for action in actions)
        assert last_forward is None or not training, "a loss is needed for the backward"
        if not begun:
            self._clear()
        self._begin([*batches, *following], loss_scale_seed, training, last_forward, microbatches)
        with torch.set_grad_enabled(training), self.casts.kept():
            for unit in units(actions):
                self._run_unit(unit)
        if self.queue is not None:
            self.queue.assert_empty()
        losses = [self._losses[microbatch] for microbatch in sorted(self._losses)]
        if following:
            self._number_from(microbatches)
            return losses
        self.p2p.finish()
        assert not self.has_begun, "the list leaves messages or graphs behind"
        return losses

    @property
    def has_begun(self) -> bool:
        """Whether passes of the next step have begun on this rank."""
        return bool(self._outbox or self._arriving or self._saved)

    def drop(self) -> None:
        """Forgets passes of the next step that have begun, on all pipeline ranks: all their messages have been sent."""
        for receive in self._arriving.values():
            receive.wait()
        self.p2p.finish()
        self._clear()

    def _number_from(self, first: int) -> None:
        """Numbers what is held of micro-batches from `first` on."""
        later = lambda action: action._replace(microbatch=action.microbatch - first)  # noqa: E731
        self._losses = {}
        self._outbox = {later(send): tensor for send, tensor in self._outbox.items()}
        self._arriving = {later(receive): message for receive, message in self._arriving.items()}
        self._saved = {(stage, microbatch - first): kept for (stage, microbatch), kept in self._saved.items()}

    def results(self) -> list[Tensor]:
        """Losses so far, and what is on its way between stages: computed, being sent, or arriving."""
        arriving = (receive.buffer for receive in self._arriving.values())
        return [*self._losses.values(), *self._outbox.values(), *self.p2p.sending(), *arriving]

    def _begin(
        self,
        batches: Sequence[Any],
        loss_scale_seed: float | Tensor,
        training: bool,
        last_forward: Callable[..., Tensor] | None = None,
        microbatches: int = 0,
    ) -> None:
        self._batches = batches
        self._seed = loss_scale_seed
        self._training = training
        self._in_turns = False
        self._last_forward, self._microbatches = last_forward, microbatches
        self._losses = {}

    def _clear(self) -> None:
        self._outbox = {}
        self._arriving = {}
        self._saved = {}

    def _run_unit(self, unit: tuple[Action, ...]) -> None:
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
        """Runs one action, with the wait for its message."""
        if self.watchers:
            with ExitStack() as stack:
                for watcher in self.watchers:
                    stack.enter_context(watcher(action))
                self._handle(action)
        else:
            self._handle(action)

    def _handle(self, action: Action) -> None:
        if self._training and action.kind in COMPUTE:
            self.use_weights(action.microbatch >= self._microbatches)
        self._handlers[action.kind](action)

    def _clock(self, phase: str) -> AbstractContextManager[Any]:
        """A pair of passes that runs in turns is timed as one action."""
        return nullcontext() if self._in_turns else self.timed(phase)

    def _run_in_turns(self, *pair: Action) -> None:
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
        if hidden is not None and self._training:
            hidden.requires_grad_()
        output, edge = self._compute_forward(action, hidden)
        if self._training:
            self._saved[stage, microbatch] = (hidden, edge)
        is_last = stage == self.layout.num_stages - 1
        if not is_last:
            self._outbox[Action(Kind.SEND_F, stage, microbatch)] = output
            return
        scalar = output.dim() == 0 or self._last_forward is not None
        assert scalar, f"the last stage returned {tuple(output.shape)}, not a scalar loss sum"
        self._losses[microbatch] = output
        if self._training:  # the gradient that a stage beyond the last would send
            self._outbox[Action(Kind.SEND_B, stage + 1, microbatch)] = torch.ones_like(output) * self._seed

    def _compute_forward(self, action: Action, hidden: Tensor | None) -> tuple[Tensor, GradientEdge | None]:
        _, stage, microbatch = action
        forward: Callable[..., Tensor] = self.stages[stage]
        if stage == self.layout.num_stages - 1 and self._last_forward is not None:
            forward = partial(self._last_forward, forward)
        with self._clock("forward") if self._training else nullcontext():
            output = forward(hidden, self._batches[microbatch])
        # A first stage that is frozen as a whole has no backward.
        edge = get_gradient_edge(output) if self._training and output.requires_grad else None
        return output.detach(), edge

    def _backward(self, action: Action) -> None:
        _, stage, microbatch = action
        grad_output = self._take(Action(Kind.RECV_B, stage, microbatch))
        hidden, edge = self._saved.pop((stage, microbatch))
        if edge is None:
            return
        with self._clock("backward"):
            torch.autograd.backward([edge], [grad_output])
        if hidden is not None:
            assert hidden.grad is not None, f"stage {stage} does not use its input"
            self._outbox[Action(Kind.SEND_B, stage, microbatch)] = hidden.grad

    def _input_backward(self, action: Action) -> None:
        assert self.queue is not None, f"{action} needs a WeightGradQueue"
        self.queue.begin((action.stage, action.microbatch))
        self._backward(action)
        self.queue.end()

    def _weight_backward(self, action: Action) -> None:
        assert self.queue is not None, f"{action} needs a WeightGradQueue"
        with self._clock("backward"):
            self.queue.run((action.stage, action.microbatch))

    def _validate(self, action: Action) -> None:
        if self.validate():
            self.drop()  # the cut has no message across it
            raise StaleForwards

    def _send(self, action: Action) -> None:
        self.p2p.send(self._outbox.pop(action), self._peer(action), self._tag(action))

    def _receive(self, action: Action) -> None:
        self._arriving[action] = self.p2p.receive(self._peer(action), self._tag(counterpart(action)))

    def _take(self, receive: Action) -> Tensor:
        """The message of a receive: from another rank, or handed over by a stage of this one."""
        if receive in self._arriving:
            self.message_from = self.pp.ranks[self._peer(receive)]
            message = self._arriving.pop(receive).wait()
            self.message_from = None
            return message
        return self._outbox.pop(counterpart(receive))

    def _peer(self, action: Action) -> int:
        return self.layout.rank_of(counterpart(action).stage)

    def _tag(self, send: Action) -> int:
        place = send.microbatch * self.layout.num_stages + send.stage
        return 2 * place + (send.kind is Kind.SEND_B)
