"""Tests of the process that holds copies on a host: refused requests, transfer rates, and complete sets of copies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.extensions.operate.peer_copies import client
from megatron.extensions.operate.peer_copies.client import (
    Address,
    HolderError,
    Link,
    Pace,
    drop_abandoned,
    leased,
    open_holder,
    reached,
)
from megatron.extensions.operate.peer_copies.holder import WORLD, header_of, headers_in, make_room, read_header, sealed
from megatron.extensions.operate.peer_copies.sets import (
    Copy,
    Inventory,
    complete_sets,
    drop_others,
    inventory,
    why_none,
)
from tests.limits import wait_for

GENERATION = "g000001-0123abcd"


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Address]:
    found = open_holder(tmp_path / "host", keep=60)
    (tmp_path / "host" / GENERATION).mkdir()
    yield found
    if (about := tmp_path / "host" / "holder.json").exists():
        os.kill(json.loads(about.read_text())["pid"], signal.SIGKILL)


def refuses(holder: Address) -> bool:
    try:
        Link(holder).close()
    except OSError:
        return True
    return False


def header(data: bytes, **more: object) -> bytes:
    return sealed(json.dumps({"iteration": 3, "part": "0-own", "nbytes": len(data), **more}).encode())


def test_sent_copies_can_be_read_and_outlive_the_holder(holder: Address, tmp_path: Path) -> None:
    data, link = os.urandom(3_000_000), Link(holder)
    link.put(GENERATION, "0-own.1", header(data), memoryview(data), Pace(None))
    part = bytearray(1_000_000)
    link.get(GENERATION, "0-own.1", 1_500_000, memoryview(part))
    assert part == data[1_500_000:2_500_000]
    ((path, _),) = headers_in(tmp_path / "host" / GENERATION)
    os.kill(json.loads((tmp_path / "host" / "holder.json").read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: refuses(holder))
    again = open_holder(tmp_path / "host", keep=60)
    assert again.port != holder.port and path.read_bytes() == data
    Link(again).end()
    wait_for(lambda: not (tmp_path / "host").exists())


def test_a_stopped_holder_is_replaced(holder: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RESPONDS", 0.5)
    pid = json.loads((tmp_path / "host" / "holder.json").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(HolderError, match=r"did not answer within 0\.5 s"):
        leased(holder)
    again = open_holder(tmp_path / "host", keep=60)
    assert again.token != holder.token and (tmp_path / "host" / GENERATION).exists()
    wait_for(lambda: refuses(holder))
    leased(again).close()


def test_a_replaced_holder_leaves_the_copies_in_place(tmp_path: Path) -> None:
    first = open_holder(tmp_path / "host", keep=60)
    (tmp_path / "host" / "holder.json").unlink()
    again = open_holder(tmp_path / "host", keep=60)
    wait_for(lambda: refuses(first))
    reached(again).end()


def test_a_holder_outlives_the_process_that_starts_it(tmp_path: Path) -> None:
    folder = tmp_path / "host"
    folder.mkdir()
    nobody, output = os.pipe()
    os.close(nobody)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", client.PROGRAM, folder, "127.0.0.1", "60"], stdout=output, stderr=subprocess.PIPE
    ) as process:
        os.close(output)
        wait_for(lambda: (folder / "holder.json").exists())
        reached(open_holder(folder, keep=60)).end()
        assert process.communicate()[1] == b""


def test_a_copy_counts_only_when_complete(holder: Address, tmp_path: Path) -> None:
    folder, data, link = tmp_path / "host" / GENERATION, b"12345678", Link(holder)
    link.put(GENERATION, "0-own.0", header(data), memoryview(data), Pace(None))
    link._ask(op="put", generation=GENERATION, name="0-own.0", header=len(header(data)), nbytes=len(data))
    link._socket.sendall(header(data) + data[:-1])
    wait_for(lambda: not header_of(folder / "0-own.0").exists())
    link.close()
    assert not list(headers_in(folder))


@pytest.mark.parametrize("change", [{"token": "0" * 32}, {"name": "../x"}, {"generation": ".."}, {"op": "_answer"}])
def test_invalid_requests_are_refused(holder: Address, change: dict[str, str]) -> None:
    link = Link(replace(holder, token=change.get("token", holder.token)))
    request = {"op": "get", "generation": GENERATION, "name": "0-own.0", "start": 0, "length": 1}
    link._ask(**request | change)
    with pytest.raises(HolderError):
        link._answer()


def test_a_sender_is_told_why_its_part_is_not_stored(holder: Address, tmp_path: Path) -> None:
    # because of this folder, writing fails at the same point as on a full file system
    (tmp_path / "host" / GENERATION / "0-own.1").mkdir()
    data, link = bytes(8_000_000), Link(holder)
    with pytest.raises(HolderError, match="IsADirectoryError"):
        link.put(GENERATION, "0-own.1", header(data), memoryview(data), Pace(None))
    link.close()


def test_a_file_without_room_is_refused_before_it_is_written(tmp_path: Path) -> None:
    make_room(tmp_path / "part", 8)
    assert (tmp_path / "part").stat().st_size == 8
    with pytest.raises(OSError, match="Errno"):
        make_room(tmp_path / "part", 1 << 62)


def test_a_holder_stays_while_a_rank_is_connected(tmp_path: Path) -> None:
    link = leased(open_holder(tmp_path / "host", keep=0.3))
    time.sleep(1.0)
    assert (tmp_path / "host").exists()
    link.close()
    wait_for(lambda: not (tmp_path / "host").exists())


def test_a_damaged_header_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "0-own.0").write_bytes(b"1234")
    whole = header(b"1234")
    header_of(tmp_path / "0-own.0").write_bytes(whole)
    assert read_header(tmp_path / "0-own.0")["iteration"] == 3
    header_of(tmp_path / "0-own.0").write_bytes(whole.replace(b'"iteration": 3', b'"iteration": 7'))
    assert not list(headers_in(tmp_path))


@given(st.lists(st.integers(1, 10**6), max_size=20), st.integers(1, 10**9))
def test_the_transfer_rate_is_limited(chunks: list[int], rate: int) -> None:
    now = 0.0
    pace = Pace(rate, lambda: now)
    for number, chunk in enumerate(chunks):
        now += pace.wait(chunk)
        assert now == pytest.approx(sum(chunks[:number]) / rate)


def held(*copies: tuple[str, int, str], parts: tuple[str, ...] = ("a", "b")) -> Inventory:
    found = tuple(Copy("host", f"g{n:06d}-0123abcd", step, part, f"{part}.0") for n, step, part in copies)
    return Inventory(found, {copy.generation: parts for copy in found})


def test_a_set_belongs_to_one_step_of_one_start() -> None:
    assert not complete_sets([held((1, 3, "a")), held((2, 3, "b"))])
    assert not complete_sets([held((1, 3, "a")), held((1, 4, "b"))])
    sets = complete_sets([held((1, 9, "a"), (2, 3, "a")), held((1, 9, "b"), (2, 3, "b"), (2, 4, "b"))])
    assert [(each.generation[:7], each.iteration) for each in sets] == [("g000002", 3), ("g000001", 9)]
    assert "no living host has part a of iteration 4" in why_none([held((2, 4, "b"))])
    assert why_none([Inventory()]) == ""


def test_a_set_does_not_mix_iterations_before_and_after_a_rollback() -> None:
    copies = [
        Copy("host", GENERATION, 13, part, f"{part}.{number % 2}", number) for number, part in ((7, "a"), (8, "a"))
    ]
    copies.append(Copy("host", GENERATION, 13, "b", "b.1", 7))
    (found,) = complete_sets([Inventory(tuple(copies), {GENERATION: ("a", "b")})])
    assert found.number == 7 and found.copies == {"a": (copies[0],), "b": (copies[2],)}
    copies.append(Copy("host", GENERATION, 12, "b", "b.0", 8))
    copies[1] = Copy("host", GENERATION, 12, "a", "a.0", 8)
    newest, _ = complete_sets([Inventory(tuple(copies), {GENERATION: ("a", "b")})])
    assert (newest.number, newest.iteration) == (8, 12)


def test_a_host_lists_its_copies_and_keeps_one_generation(tmp_path: Path) -> None:
    for generation in (GENERATION, "g000002-0123abcd"):
        (tmp_path / generation).mkdir()
        (tmp_path / generation / WORLD).write_text('{"parts": ["0-own"]}')
        for slot, step in ((0, 3), (1, 4)):
            path = tmp_path / generation / f"0-own.{slot}"
            path.write_bytes(b"1234")
            header_of(path).write_bytes(header(b"1234", iteration=step))
    found = inventory(tmp_path, "here")
    assert {(copy.generation[:7], copy.iteration) for copy in found.copies} == {
        (f"g00000{number}", step) for number in (1, 2) for step in (3, 4)
    }
    drop_others(tmp_path, [found.copies[0]])
    assert inventory(tmp_path, "here").copies == found.copies[:1]
    assert sorted(path.name for path in (tmp_path / GENERATION).iterdir()) == ["0-own.0", "0-own.0.json", WORLD]


def test_copies_of_a_killed_holder_are_deleted_after_a_while(tmp_path: Path) -> None:
    own, left, new, served = (
        tmp_path / f"megatron-copies-{os.getuid()}-{name}" for name in ("own", "left", "new", "served")
    )
    for folder in (own, left, new):
        (folder / GENERATION).mkdir(parents=True)
    holder = open_holder(served, keep=60)
    hour = time.time() - 3700
    for path in (own / GENERATION, own, left / GENERATION, left, new, served / "holder.json", served):
        os.utime(path, (hour, hour))
    drop_abandoned(own, keep=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(each.name for each in (own, new, served))
    Link(holder).end()


def test_a_holder_that_does_not_start_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(client, "PROGRAM", tmp_path / "slow.py")
    monkeypatch.setattr(client, "OPENS", 0.1)
    with pytest.raises(OSError, match=r"was not ready after 0.1 s"):
        open_holder(tmp_path / "host", keep=60)
