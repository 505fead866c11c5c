"""Tests of the torchrun rendezvous for jobs that may lose hosts. Calls to the methods of the rendezvous handler return
even if the store does not answer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError

from megatron.extensions.operate.resilience.torchrun import bounded, marked, unless_refused


def test_only_a_call_that_does_not_return_becomes_an_error() -> None:
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


def test_waiting_for_other_hosts_is_reported_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "waits"

    def fail() -> Any:
        assert file.exists()
        raise RendezvousStateError("broken")

    assert marked(file.exists, file)() is True and not file.exists()  # type: ignore[arg-type]
    with pytest.raises(RendezvousStateError):
        marked(fail, file)()
    assert not file.exists()


def test_an_invalid_configuration_is_not_restarted(tmp_path: Path) -> None:
    outcome, met = tmp_path / "outcome", list[int]()
    join: Any = unless_refused(lambda: met.append(1), outcome)  # type: ignore[arg-type, return-value]
    join()
    outcome.write_text("name=FAILED\nwhy=\n")
    join()
    outcome.write_text("name=BAD_CONFIGURATION\nwhy=\n")
    with pytest.raises(SystemExit, match="2"):
        join()
    assert len(met) == 2
