"""If copies to peers fail, training continues at the same speed, and the failure is logged once."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.extensions.operate.peer_copies import copies as copies_module
from megatron.extensions.operate.peer_copies.client import Address, Link, Pace, open_holder
from megatron.extensions.operate.peer_copies.copies import Backoff, Copies, Duty, Place
from megatron.extensions.operate.peer_copies.holder import headers_in
from megatron.extensions.operate.peer_copies.placement import Part
from megatron.extensions.operate.peer_copies.shards import Stored, entries_of
from tests.extensions.peer_copies.test_memory_checkpoint import COLUMNS, GENERATION, ROWS, cut, values

TENSORS = cut(values(), [0, ROWS], COLUMNS - 1)


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[Copies]:
    """Yield the `Copies` object of one rank. The rank's state is also sent to the host `there`, which refuses
    connections."""
    folder = tmp_path / "here"
    own = open_holder(folder, keep=60)
    (folder / GENERATION).mkdir()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # it refuses connections
        lost = Address("there", *nobody.getsockname(), "")
        place = Place(folder, GENERATION, {"here": own, "there": lost}, "here", 60, True, 0)
        nbytes = (last := entries_of(Stored(Part(0, (0,), 0), ("model.x",)), TENSORS)[-1]).start + last.nbytes
        duty = Duty(Stored(Part(0, (0,), nbytes), ("model.x",)), ("there",))
        yield Copies(place, [duty], dist.HashStore(), 1, Pace(None))
    Link(own).end()


def test_without_room_the_copies_of_a_step_are_incomplete(
    copies: Copies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = open_holder(tmp_path / "there", keep=60)
    (tmp_path / "there" / GENERATION).mkdir()
    copies.place = Place(**vars(copies.place) | {"holders": {"here": copies.place.holders["here"], "there": there}})

    def full(*place: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lines = []
    for step in range(1, 6):
        with monkeypatch.context() as patch:
            if step == 2 or step == 3:
                patch.setattr(os, "posix_fallocate", full)
            copies.copy(step, TENSORS, {})
            copies.wait()
        lines.append(copies.news())
    assert lines[1].startswith("copies in memory of the last step are incomplete: here: OSError: [Errno 28] No space")
    assert lines[4] == "copies in memory are complete again, for iteration 5"
    assert not any(lines[at] for at in (0, 2, 3))
    for host in ("here", "there"):
        assert [header["iteration"] for _, header in headers_in(tmp_path / host / GENERATION)] == [1, 5]
    Link(there).end()


def test_a_lost_host_slows_few_steps(copies: Copies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "AGAIN", 0.3)
    asked, attempts, reached = list[str](), list[int](), copies_module.reached

    def counted(holder: Address) -> Link:
        asked.append(holder.host)
        return reached(holder)

    monkeypatch.setattr(copies_module, "reached", counted)
    for step in range(1, 9):
        before = len(asked)
        copies.copy(step, TENSORS, {})
        copies.wait()
        attempts.append(asked[before:].count("there"))
    assert attempts[0] > 1 and attempts[1:] == [1, 0, 1, 0, 0, 0, 1]
    assert "there" in copies.failure or "refused" in copies.failure


def test_retries_back_off() -> None:
    backoff, due = Backoff(), list[int]()
    for number in range(1, 200):
        if backoff.is_due():
            due.append(number)
            backoff.failed()
    assert due[:6] == [1, 2, 4, 8, 16, 32] and {b - a for a, b in pairwise(due[6:])} == {32}
    backoff.succeeded()
    assert all(backoff.is_due() for _ in range(9)) and backoff.failures == 0
