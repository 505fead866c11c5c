"""Asynchronous messages of fixed shape between neighboring pipeline stages.

With NCCL, waiting for a message blocks the current stream. With gloo, waiting blocks the calling thread. No operation
synchronizes a device. gloo does not support CUDA tensors in point-to-point messages, so CUDA tensors are copied through
host memory.

With NCCL, all messages of a process group run in order on the stream of the group. The communicators of all groups are
created at the start of the run, because torch would otherwise create a communicator for each pair of ranks. A message
waits for the computation that was launched before it, but computation that is launched later does not wait for the
message. A single group would be too slow: each send would wait for the receives that were launched before it, and a
receive waits until the peer has computed the message. There are therefore four lanes, each with its own process group
over the same ranks: one lane for each combination of forward or backward messages and even or odd sending ranks. On
each lane, a rank either only sends messages or only receives messages. There is one exception: if an interleaved
schedule has an odd number of ranks, the messages between the last and the first rank use a lane on which a rank both
sends and receives. The order of these messages is the same on all ranks.
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
        """Wait for the message, and return a tensor that can be used on the current stream."""
        if self.work is not None:
            _wait(self.work, self.timeout)
        return self.buffer.to(self.device)


class PipelineP2P:
    """Channel that sends and receives the messages of one rank along the pipeline axis.

    Two ranks must post the messages between them in the same order, because NCCL ignores tags. gloo matches messages by
    tag, so inconsistent action lists are detected. Forward messages have even tags, and backward messages have odd
    tags. The memory of a message is kept until the message has been sent, and each call of `send` frees the memory of
    all messages that have been sent. If `MAX_IN_FLIGHT` messages are still in flight, `send` waits until one of them
    has been sent.
    """

    def __init__(
        self, pp: Axis, shape: Sequence[int], dtype: torch.dtype, device: torch.device, lanes: Sequence[Axis] = ()
    ) -> None:
        """Create the message channel of one rank.

        Args:
            pp: Pipeline axis.
            shape: Shape of every message, [s, b, h].
            dtype: Data type of every message.
            device: Device of the rank's stages.
            lanes: Four process groups over the ranks of `pp`, one for each message lane. By default, all messages use
                the group of `pp`.
        """
        assert len(lanes) in (0, 1, 4) and all(lane.ranks == pp.ranks for lane in lanes)
        self.lanes = tuple(lanes) if len(lanes) == 4 else (pp,) * 4
        self.pp = pp
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self.timeout: timedelta | None = None
        """Timeout of gloo messages. None means the timeout of the process group. With NCCL, the timeout of the process
        group always applies."""
        self._sends: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._gloo = pp.group is not None and dist.get_backend(pp.group) == "gloo"
        self.wire_device = torch.device("cpu") if self._gloo else device

    def send(self, message: Tensor, peer: int, tag: int) -> None:
        """Start sending the message [s, b, h] to pipeline rank `peer`. The caller must not modify the message
        afterwards, but need not keep a reference to it."""
        assert tuple(message.shape) == self.shape, f"message {tuple(message.shape)}, pipeline shape {self.shape}"
        assert message.dtype == self.dtype, f"message {message.dtype}, pipeline dtype {self.dtype}"
        message = message.to(self.wire_device).contiguous()
        self._let_go(MAX_IN_FLIGHT - 1)
        work = dist.isend(message, self.pp.ranks[peer], group=self._lane(tag, self.pp.rank).group, tag=tag)
        self._sends.append((work, message))

    def receive(self, peer: int, tag: int) -> Receive:
        """Start receiving a message [s, b, h] from pipeline rank `peer`."""
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.wire_device)
        work = dist.irecv(buffer, self.pp.ranks[peer], group=self._lane(tag, peer).group, tag=tag)
        return Receive(work, buffer, self.device, self.timeout if self._gloo else None)

    @contextmanager
    def shaped(self, shape: Sequence[int]) -> Iterator[None]:
        """Context manager that changes the message shape within the block. All pipeline ranks must enter the context,
        and no message may be in flight when they do."""
        assert not self._sends, "messages are still in flight"
        before, self.shape = self.shape, tuple(shape)
        try:
            yield
        finally:
            self.shape = before

    def sending(self) -> list[Tensor]:
        """Return the messages that may still be in flight, whose memory is therefore kept."""
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
                # Even if the message has been sent, torch releases its memory only after a call of `wait`.
                _wait(work, self.timeout if self._gloo else None)
                self._sends.popleft()
            else:
                break


def lane_of(backward: bool, sender: int) -> int:
    """Return the number of the lane for forward or backward messages from pipeline rank `sender`."""
    return 2 * backward + sender % 2


def _wait(work: dist.Work, timeout: timedelta | None) -> None:
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)
