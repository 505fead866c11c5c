"""Test that the parent processes of all ranks agree on the number of the next start and on which processes were
lost."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict

import pytest
import torch.distributed as dist

from megatron.extensions.operate.job_restarts import parents
from megatron.extensions.operate.job_restarts.parents import Parents, Start
from megatron.training.config.arguments import parse_args
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.rank_store import NoStoreError, Peer
from tests.forked import PORTS
from tests.tiny import TINY

BEFORE = Start((0, 1), (0, 1, 2))


def parents_of(*peers: Peer) -> list[Parents]:
    """Return one `Parents` object for each peer. The objects share a store that contains the announcement of each
    peer."""
    store = dist.HashStore()
    for worker, peer in enumerate(peers):
        store.set(f"parent/{worker}", json.dumps([f"host{worker}", asdict(peer)]))
    return [Parents(store, worker, len(peers)) for worker in range(len(peers))]


def test_all_parents_follow_the_first_decision() -> None:
    first, second, _ = parents_of(*[Peer.here()] * 3)
    second.store.set("here/1/2", "1")
    second.store.set("here/1/1", "1")
    made = first.gather(1, BEFORE, lambda came, hosts: Start((0, 1), tuple(came), "first", ("why",)))
    assert made == Start((0, 1), (0, 1, 2), "first", ("why",))
    # The second parent has not seen the decision and makes a late proposal.
    second._propose(1, Start((1, 0), (0, 1, 2), "second"))
    assert second.gather(1, BEFORE, lambda came, hosts: Start((), ())) == made


def test_only_one_parent_searches_for_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = parents_of(Peer.here(), Peer.here())
    assert first._decides(1)
    assert not second._decides(1)
    monkeypatch.setattr(parents, "DECIDES", -1.0)
    assert second._decides(1)


def test_parents_that_are_gone_are_left_out() -> None:
    ended = subprocess.Popen(["sleep", "60"])
    gone = Peer(Peer.here().host, ended.pid, Peer.here().namespace, "of another time")
    there, _, silent = parents_of(Peer.here(), gone, Peer("elsewhere", os.getpid(), "another", "0"))
    silent.store.set("here/1/2", "1")
    ended.kill()
    ended.wait()
    came, began = list[int](), time.monotonic()

    def decide(workers: object, hosts: dict[int, str]) -> Start:
        came.extend(sorted(hosts))
        return Start((0, 2), tuple(workers))  # type: ignore[call-overload]

    assert there.gather(1, BEFORE, decide).living == (0, 2)
    assert came == [0, 1, 2]
    assert time.monotonic() - began < parents.ROLL / 2


def test_a_silent_parent_on_another_host_counts_as_gone_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parents, "SILENT", 0.2)
    there, other = parents_of(Peer.here(), Peer("elsewhere", os.getpid(), "another", "0"))
    silence = dict[int, tuple[int, float]]()
    other.beat()
    assert not there._is_gone(1, silence)
    other.beat()
    assert not there._is_gone(1, silence)
    monkeypatch.setattr(parents.time, "monotonic", lambda clock=parents.time.monotonic: clock() + 1.0)
    assert there._is_gone(1, silence)


def test_a_finished_run_is_not_started_again() -> None:
    there, other = parents_of(Peer.here(), Peer.here())
    other.leave(75, (1,))
    assert there.over() == 75
    assert there.gather(1, BEFORE, lambda came, hosts: BEFORE).ends == "a rank has ended permanently"


def test_hosts_without_ranks_offer_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parents, "OFFERS", 0.2)
    there, other, _ = parents_of(*[Peer.here()] * 3)
    other.offer(4, "copies")
    assert there.offers(4, [1]) == ["copies"]
    assert there.offers(4, [1, 2]) == ["copies"]
    assert there.offers(4, []) == []


def test_a_paused_process_does_not_regard_others_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = parents.Clock(), parents.time.monotonic()
    monkeypatch.setattr(parents.time, "monotonic", lambda: now + 3600)
    assert clock.seconds() <= parents.LONGEST


def test_keys_of_earlier_starts_are_deleted_from_the_store() -> None:
    (there,) = parents_of(Peer.here())
    start = Start((0,), (0,), rung="again")

    def make(number: int) -> int:
        there.ask(number)
        there.gather(number, start, lambda came, hosts: start)
        there.offer(number, "copies")
        for name in ("board", "groups"):
            dist.PrefixStore(f"{name}//.{number}", there.store).set("0//key", "value")
        there.forget(number)
        while there._old:
            there.tidy()
        return int(there.store.num_keys())

    assert len({make(number) for number in range(1, 6)}) == 1


def test_a_parent_that_is_too_late_for_a_start_exits() -> None:
    there, late = parents_of(Peer.here(), Peer.here())
    there.forget(3)
    assert late.asked(2)
    assert late.gather(2, BEFORE, lambda came, hosts: BEFORE).ends == "the other ranks have continued without it"


def test_a_rank_is_lost_if_its_parent_died_during_the_run() -> None:
    ended = Peer(Peer.here().host, os.getpid(), Peer.here().namespace, "of another time")
    there, _ = parents_of(Peer.here(), ended)
    assert there.lost([1]) and not there.lost([0, 1])
    there.leave(0, ())
    assert not there.lost([1])


@pytest.mark.parametrize("other", ["--save b", "--save a --seed 2"])
def test_a_process_that_reaches_the_store_of_another_run_exits(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = next(PORTS)
    environ = {"ADDR": "127.0.0.1", "PORT": str(port)}
    for name, value in environ.items():
        monkeypatch.setenv(f"MASTER_{name}", value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "")
    first = Parents.of(parse_args([*TINY.split(), "--save", "a"]), Launch(0, 2))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = ""
    with pytest.raises(NoStoreError, match=f"store of another run at 127.0.0.1:{port}: --save a, .* different ports"):
        Parents.of(parse_args([*TINY.split(), *other.split()]), Launch(1, 2, 1))
    assert not first._there("parent/1")
    Parents.of(parse_args([*TINY.split(), "--save", "a"]), Launch(1, 2, 1))
    assert first._there("parent/1")
