"""torchrun's rendezvous for hosts that may be lost: calls of a store that does not answer end."""

from __future__ import annotations

import threading

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError

from megatron.training.reliability.hosts.torchrun import bounded


def test_a_call_that_does_not_return_is_an_error_and_others_are_as_they_were() -> None:
    def broken() -> None:
        raise RendezvousStateError("broken")

    assert bounded(lambda x, y: (x, y))(1, 2) == (1, 2)
    assert bounded(lambda: None)() is None
    with pytest.raises(RendezvousStateError, match="broken"):
        bounded(broken)()
    hanging = bounded(threading.Event().wait, 0.05)
    for _ in range(2):
        with pytest.raises(RendezvousConnectionError, match=r"the rendezvous does not answer: no reply in 0\.05 s"):
            hanging()
