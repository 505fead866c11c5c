"""Messages between neighbouring pipeline stages: tensors of one fixed shape, sent and received asynchronously.

Waiting makes the current stream wait under NCCL and the calling thread under gloo; nothing synchronises a device.
gloo does not take CUDA tensors point to point, so there messages go through host memory.

Under NCCL the messages of a group run on a stream of that group, one after another (communicators are made when the run
begins, and torch then has no others for pairs of ranks). A message begins when what is computed before it is done and
holds up nothing that is computed after it; but a send would wait behind a receive posted earlier, which waits for its
peer to compute. So there are four lanes, groups of the same ranks: forward and backward messages, from even and from
odd ranks. On each a rank only sends or only receives (at the seam of an interleaved schedule over an odd number of
ranks it does both, in the one order that all ranks keep).
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
    """A receive under way."""

    work: dist.Work | None
    buffer: Tensor
    """The message arrives here."""

    device: torch.device
    timeout: timedelta | None

    def wait(self) -> Tensor:
        """The message, for use on the current stream."""
        if self.work is not None:
            _wait(self.work, self.timeout)
        return self.buffer.to(self.device)


class PipelineP2P:
    """Sends and receives of one rank over the pipeline axis.

    Messages between two ranks must be posted in one order at both ends (NCCL ignores tags); gloo's tags also catch
    lists that disagree. Even tags are of forward messages, odd ones of backward messages. `lanes` are the groups that
    they take, of the same ranks as `pp`; without, all go over `pp`.

    A message that is being sent keeps its memory until the send is done: finished ones are let go at every later send,
    and no more than `MAX_IN_FLIGHT` are kept.
    """

    def __init__(
        self, pp: Axis, shape: Sequence[int], dtype: torch.dtype, device: torch.device, lanes: Sequence[Axis] = ()
    ) -> None:
        assert len(lanes) in (0, 1, 4) and all(lane.ranks == pp.ranks for lane in lanes)
        self.lanes = tuple(lanes) if len(lanes) == 4 else (pp,) * 4
        self.pp = pp
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self.timeout: timedelta | None = None
        """Time that gloo may wait for a message, instead of the timeout of the group. NCCL asks the group."""
        self._sends: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._gloo = pp.group is not None and dist.get_backend(pp.group) == "gloo"
        self.wire_device = torch.device("cpu") if self._gloo else device

    def send(self, message: Tensor, peer: int, tag: int) -> None:
        """Starts sending [s, b, h] to pipeline rank `peer`. The caller may drop the message, but not change it."""
        assert tuple(message.shape) == self.shape, f"message {tuple(message.shape)}, pipeline shape {self.shape}"
        assert message.dtype == self.dtype, f"message {message.dtype}, pipeline dtype {self.dtype}"
        message = message.to(self.wire_device).contiguous()
        self._let_go(MAX_IN_FLIGHT - 1)
        work = dist.isend(message, self.pp.ranks[peer], group=self._lane(tag, self.pp.rank).group, tag=tag)
        self._sends.append((work, message))

    def receive(self, peer: int, tag: int) -> Receive:
        """Starts receiving [s, b, h] from pipeline rank `peer`."""
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.wire_device)
        work = dist.irecv(buffer, self.pp.ranks[peer], group=self._lane(tag, peer).group, tag=tag)
        return Receive(work, buffer, self.device, self.timeout if self._gloo else None)

    @contextmanager
    def shaped(self, shape: Sequence[int]) -> Iterator[None]:
        """Messages of another shape, between two runs of the pipeline; on all its ranks."""
        assert not self._sends, "messages are on their way"
        before, self.shape = self.shape, tuple(shape)
        try:
            yield
        finally:
            self.shape = before

    def sending(self) -> list[Tensor]:
        """Messages whose memory is held as they may still be on their way."""
        return [message for _, message in self._sends]

    def finish(self) -> None:
        """Waits for all sends."""
        self._let_go(0)

    def _lane(self, tag: int, sender: int) -> Axis:
        return self.lanes[lane_of(backward=tag % 2 == 1, sender=sender)]

    def _let_go(self, keep: int) -> None:
        while self._sends:
            work, _ = self._sends[0]
            if work is not None and (len(self._sends) > keep or work.is_completed()):
                _wait(work, self.timeout if self._gloo else None)  # also makes torch let go of the message
                self._sends.popleft()
            else:
                break


def lane_of(backward: bool, sender: int) -> int:
    """Which of the four lanes a message of pipeline rank `sender` takes."""
    return 2 * backward + sender % 2


def _wait(work: dist.Work, timeout: timedelta | None) -> None:
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)
