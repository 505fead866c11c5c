"""Tests of the placement of state copies on hosts. The parts of the state have random sizes. No host has two copies of
a part, hosts are balanced, and parts that a replica already holds are not sent."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.extensions.operate.peer_copies.placement import (
    Part,
    duties,
    groups,
    partners,
    place,
    sent_bytes,
    stored_bytes,
    survivable,
    survives,
)

ranks_of_hosts = st.lists(st.integers(1, 5), min_size=1, max_size=11)
number = st.integers(1, 4)


def hosts_of(sizes: list[int]) -> list[str]:
    return [f"host{host}" for host, size in enumerate(sizes) for _ in range(size)]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[str], list[Part], int]:
    """Draw the host of each rank, the parts of the training state, and the number of copies. There is one part per
    rank, and there may be further parts that have several replicas."""
    host_of = hosts_of(draw(ranks_of_hosts))
    parts = [Part(rank, (rank,), draw(st.integers(0, 100))) for rank in range(len(host_of))]
    for _ in range(draw(st.integers(0, 4))):
        replicas = draw(st.lists(st.integers(0, len(host_of) - 1), min_size=1, unique=True))
        parts.append(Part(draw(st.sampled_from(replicas)), tuple(replicas), 10))
    return host_of, parts, draw(number)


@given(worlds())
def test_each_part_is_on_enough_hosts_and_at_most_once_per_host(world: tuple[list[str], list[Part], int]) -> None:
    host_of, parts, copies = world
    every = len(set(host_of))
    for part, held in zip(parts, place(host_of, parts, copies), strict=True):
        hosts = [each.host for each in held]
        assert len(set(hosts)) == len(hosts) == min(copies + 1, every)
        assert hosts[0] == host_of[part.writer] and held[0].by == part.writer
        for each in held:
            assert each.by is None or (each.by in part.replicas and host_of[each.by] == each.host)


@given(worlds())
def test_parts_that_replicas_hold_are_not_sent(world: tuple[list[str], list[Part], int]) -> None:
    host_of, parts, copies = world
    placed = place(host_of, parts, copies)
    for part, held in zip(parts, placed, strict=True):
        there = {host_of[rank] for rank in part.replicas}
        wanted = min(copies + 1, len(set(host_of)))
        assert sum(each.by is None for each in held) == max(0, wanted - len(there))
    sent = sent_bytes(parts, placed)
    assert sum(sent.values()) == sum(
        part.nbytes * sum(each.by is None for each in held) for part, held in zip(parts, placed, strict=True)
    )


@given(worlds())
def test_ranks_store_and_send_every_copy_once(world: tuple[list[str], list[Part], int]) -> None:
    host_of, parts, copies = world
    placed, found = place(host_of, parts, copies), list[tuple[int, str]]()
    for rank, host in enumerate(host_of):
        for part, others in duties(rank, placed):
            found += [(part, host), *((part, other) for other in others)]
    assert sorted(found) == sorted((part, each.host) for part, held in enumerate(placed) for each in held)


@given(st.integers(1, 11), st.integers(1, 5), number)
def test_equal_hosts_hold_and_send_equal_bytes(hosts: int, ranks: int, copies: int) -> None:
    host_of = hosts_of([ranks] * hosts)
    parts = [Part(rank, (rank,), 1) for rank in range(len(host_of))]
    placed = place(host_of, parts, copies)
    assert set(stored_bytes(parts, placed).values()) == {ranks * min(copies + 1, hosts)}
    assert len(set(sent_bytes(parts, placed).values())) <= 1


@settings(max_examples=40)
@given(worlds())
def test_the_stated_number_of_hosts_may_be_lost(world: tuple[list[str], list[Part], int]) -> None:
    host_of, parts, copies = world
    placed, hosts = place(host_of, parts, copies), sorted(set(host_of))
    least = min(len(held) for held in placed)
    for count in range(1, min(4, least) + 1):
        good = [survives(placed, lost) for lost in combinations(hosts, count)]
        assert survivable(placed, len(hosts), count) == (sum(good), len(good))
        assert count == least or all(good)


def test_losing_hosts_is_fatal_only_if_a_whole_group_is_lost() -> None:
    host_of = hosts_of([2] * 8)
    parts = [Part(rank, (rank,), 1) for rank in range(16)]
    placed = place(host_of, parts, 1)
    assert survivable(placed, 8, 2) == (24, 28)
    assert groups(list("abcdefg"), 2) == [("a", "b", "c"), ("d", "e", "f", "g")]
    assert partners(list("abc"), 1) == {"a": ("b",), "b": ("c",), "c": ("a",)}


@pytest.mark.parametrize("copies", [1, 3])
def test_a_single_host_keeps_its_own_parts(copies: int) -> None:
    placed = place(["here"] * 3, [Part(rank, (rank,), 1) for rank in range(3)], copies)
    assert [[each.host for each in held] for held in placed] == [["here"]] * 3
    assert not survives(placed, ["here"])
