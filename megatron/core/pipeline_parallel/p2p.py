"""Asynchronous fixed-shape messages between neighbouring pipeline stages.

Waiting blocks the current stream under NCCL and the calling thread under gloo. No operation synchronizes a device. gloo
does not support CUDA tensors in point-to-point messages, so such tensors are copied through host memory.

Under NCCL, all messages of a group run in order on the stream of the group. All communicators are created at the start
of the run, because torch would otherwise create a communicator for each pair of ranks. A message waits for the
computation launched before it, but computation launched later does not wait for the message. A single group would be
too slow: each send would wait for the receives launched before it, and a receive waits until the peer has computed the
message. There are therefore four lanes, each with its own group over the same ranks: one lane for each combination of
forward or backward messages and even or odd sending ranks. On each lane, a rank either only sends messages or only
receives messages. There is one exception: if an interleaved schedule has an odd number of ranks, a rank both sends and
receives on the lane of the messages between the last and the first rank. The order of these messages is the same on all
ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import Axis

MAX_IN_FLIGHT = 8


class Receive(NamedTuple):
    """A pending receive."""

    work: dist.Work | None
    buffer: Tensor
    """Receive buffer."""

    device: torch.device
    timeout: timedelta | None

    def wait(self) -> Tensor:
        """Wait for the message, and return it for use on the current stream."""
        if self.work is not None:
            _wait(self.work, self.timeout)
        return self.buffer.to(self.device)


class PipelineP2P:
    """Sends and receives the messages of one rank along the pipeline axis.

    Both ends must post the messages between two ranks in the same order, because NCCL ignores tags. gloo matches
    messages by tag, which also reveals inconsistent action lists. Forward messages have even tags, and backward
    messages have odd tags. The memory of a message is kept until its send has finished. When a message is sent, the
    memory of all messages whose sends have finished is freed. If `MAX_IN_FLIGHT` messages are still in flight, `send`
    waits until one of them has been sent.
    """

    def __init__(
        self, pp: Axis, shape: Sequence[int], dtype: torch.dtype, device: torch.device, lanes: Sequence[Axis] = ()
    ) -> None:
        """Create the message channel of one rank.

        Args:
            pp: Pipeline axis.
            shape: Shape of every message, [s, b, h].
            dtype: Data type of every message.
            device: Device of the stages.
            lanes: Four process groups over the ranks of `pp`, one for each of the four message lanes. By default, all
                messages use the group of `pp`.
        """
        assert len(lanes) in (0, 1, 4) and all(lane.ranks == pp.ranks for lane in lanes)
        self.lanes = tuple(lanes) if len(lanes) == 4 else (pp,) * 4
        self.pp = pp
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self.timeout: timedelta | None = None
        """Timeout of gloo messages, used instead of the timeout of the process group. With NCCL, the timeout of the
        process group always applies."""
        self._sends: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._gloo = pp.group is not None and dist.get_backend(pp.group) == "gloo"
        self.wire_device = torch.device("cpu") if self._gloo else device

    def send(self, message: Tensor, peer: int, tag: int) -> None:
        """Start sending [s, b, h] to pipeline rank `peer`. The caller must not modify the message afterwards, but may
        drop its reference to the message."""
        assert tuple(message.shape) == self.shape, f"message {tuple(message.shape)}, pipeline shape {self.shape}"
        assert message.dtype == self.dtype, f"message {message.dtype}, pipeline dtype {self.dtype}"
        message = message.to(self.wire_device).contiguous()
        self._let_go(MAX_IN_FLIGHT - 1)
        work = dist.isend(message, self.pp.ranks[peer], group=self._lane(tag, self.pp.rank).group, tag=tag)
        self._sends.append((work, message))

    def receive(self, peer: int, tag: int) -> Receive:
        """Start receiving [s, b, h] from pipeline rank `peer`."""
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.wire_device)
        work = dist.irecv(buffer, self.pp.ranks[peer], group=self._lane(tag, peer).group, tag=tag)
        return Receive(work, buffer, self.device, self.timeout if self._gloo else None)

    @contextmanager
    def shaped(self, shape: Sequence[int]) -> Iterator[None]:
        """Change the message shape between two pipeline runs, on all pipeline ranks."""
        assert not self._sends, "messages are still in flight"
        before, self.shape = self.shape, tuple(shape)
        try:
            yield
        finally:
            self.shape = before

    def sending(self) -> list[Tensor]:
        """Return the messages whose memory is held because they may still be in flight."""
        return [message for _, message in self._sends]

    def finish(self) -> None:
        """Wait until all sends have finished."""
        self._let_go(0)

    def _lane(self, tag: int, sender: int) -> Axis:
        return self.lanes[lane_of(backward=tag % 2 == 1, sender=sender)]

    def _let_go(self, keep: int) -> None:
        while self._sends:
            work, _ = self._sends[0]
            if work is not None and (len(self._sends) > keep or work.is_completed()):
                # Even if the send has finished, torch releases the message only after a wait.
                _wait(work, self.timeout if self._gloo else None)
                self._sends.popleft()
            else:
                break


def lane_of(backward: bool, sender: int) -> int:
    """Return which of the four lanes carries a message from pipeline rank `sender`."""
    return 2 * backward + sender % 2


def _wait(work: dist.Work, timeout: timedelta | None) -> None:
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)
