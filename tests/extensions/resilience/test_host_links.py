"""Heartbeats between hosts detect silent, deaf, slow and paused hosts. The tests use a simulated clock."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.extensions.operate.resilience import host_watch
from megatron.extensions.operate.resilience.flags import ResilienceConfig
from megatron.extensions.operate.resilience.heartbeat import BEAT, KINDS, LINGER, Links, watched
from megatron.extensions.operate.resilience.host_watch import AskedStore, HostWatch
from megatron.extensions.operate.resilience.watches import HostsAndFolders
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.failure_report import Failure
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.rank_status import RankStatus
from tests.limits import HANG, wait_for
from tests.pure.test_validation import problems

TIMEOUT = 6.0


class Cluster:
    """Hosts with heartbeats. `lost` contains the pairs (sender, receiver) of hosts between which messages are lost.
    Hosts in `asleep` are suspended."""

    def __init__(self, hosts: int) -> None:
        self.now, self.asleep, self.lost = 0.0, set[int](), set[tuple[int, int]]()
        self.share_lost = 0.0
        self.links = {host: Links(host, TIMEOUT) for host in range(hosts)}
        for host, links in self.links.items():
            for other in self.links:
                links.know(other, other, self.now)
            assert host not in links.peers
        self._draw = random.Random(0)

    def beat(self, seconds: float) -> None:
        for _ in range(round(seconds / BEAT)):
            self.now += BEAT
            for host, links in self.links.items():
                if host in self.asleep:
                    continue
                message = links.message(self.now)
                for target in links.targets(self.now):
                    arrives = (host, target) not in self.lost and self._draw.random() >= self.share_lost
                    if arrives and target not in self.asleep:
                        self.links[target].hear(message, host, self.now)

    def found(self, host: int) -> dict[str, Any]:
        found = self.links[host].findings(self.now)
        return {kind: sorted(what) for kind, what in found.items() if what and kind != "fine"}

    def cut(self, host: int) -> None:
        self.lost |= {pair for other in self.links for pair in ((host, other), (other, host))}


@pytest.mark.parametrize("hosts", [4, 40])
def test_a_disconnected_host_and_its_watchers_report_each_other(hosts: int) -> None:
    cluster, watching = Cluster(hosts), sorted(watched(range(hosts), 2))
    cluster.beat(2)
    cluster.cut(2)
    cluster.beat(TIMEOUT - 1)
    assert all(cluster.found(host) == {} for host in range(hosts))
    cluster.beat(1 + 2 * BEAT)
    found = {host: findings for host in range(hosts) if (findings := cluster.found(host))}
    assert found == {host: {"silent": [2]} for host in watching} | {2: {"silent": watching}}


def test_a_one_way_loss_is_reported_on_both_sides_with_its_direction() -> None:
    cluster = Cluster(3)
    cluster.beat(2)
    cluster.lost = {(0, 1)}
    cluster.beat(TIMEOUT + 3 * BEAT)
    assert [cluster.found(host) for host in range(3)] == [{"deaf": [1]}, {"silent": [0]}, {}]


def test_a_link_that_loses_half_of_all_messages_is_not_a_fault() -> None:
    cluster = Cluster(4)
    cluster.share_lost = 0.5
    for _ in range(1000):
        cluster.beat(1)
        assert all(cluster.found(host) == {} for host in range(4))


def test_a_host_that_was_never_heard_is_reported_separately() -> None:
    cluster = Cluster(2)
    cluster.cut(1)
    cluster.beat(TIMEOUT + 2 * BEAT)
    assert [cluster.found(host) for host in range(2)] == [{"unheard": [1]}, {"unheard": [0]}]


@pytest.mark.parametrize("end", ["bye", "gone"])
def test_a_host_that_announces_its_end_is_not_reported(end: str) -> None:
    cluster = Cluster(2)
    cluster.beat(2)
    cluster.links[0].hear(cluster.links[1].message(cluster.now, end), 1, cluster.now)
    cluster.asleep = {1}
    cluster.beat(60)
    assert cluster.found(0) == ({"gone": [1], "failed": [1]} if end == "gone" else {"over": [1]})


@pytest.mark.parametrize("end", ["failed", "lost"])
def test_a_failed_host_is_detected_without_other_signs(end: str) -> None:
    cluster = Cluster(3)
    cluster.beat(2)
    cluster.links[0].hear(cluster.links[1].message(cluster.now, end), 1, cluster.now)
    cluster.asleep, cluster.lost = {1}, {(1, 2)}
    cluster.beat(LINGER - BEAT)
    assert cluster.found(0) == {}
    cluster.links[0].stood_still(5.0, cluster.now)
    cluster.beat(5.0 - BEAT)
    assert cluster.found(0) == {}
    cluster.beat(1)
    assert cluster.found(0) == {"failed": [1]} and cluster.found(2) == {"silent": [1]}


def test_the_last_message_counts_even_if_its_sender_paused() -> None:
    cluster = Cluster(2)
    cluster.beat(2)
    cluster.lost = {(0, 1)}
    cluster.beat(TIMEOUT)
    cluster.links[1].stood_still(5.0, cluster.now)  # makes host 1 report that it heard from host 0 one second ago
    cluster.links[0].hear(cluster.links[1].message(cluster.now, "lost"), 1, cluster.now)
    cluster.asleep = {1}
    cluster.beat(LINGER + 1)
    assert cluster.found(0) == {"failed": [1]}


def test_the_last_message_of_a_deaf_host_is_kept_even_if_this_host_paused() -> None:
    cluster = Cluster(2)
    cluster.beat(2)
    cluster.lost = {(0, 1)}
    cluster.beat(TIMEOUT - BEAT)
    assert cluster.found(0) == {}
    cluster.now += BEAT
    cluster.links[0].hear(cluster.links[1].message(cluster.now, "lost"), 1, cluster.now)
    cluster.links[0].stood_still(2.0, cluster.now)
    cluster.asleep = {1}
    cluster.beat(60)
    assert cluster.found(0) == {"deaf": [1]}


def test_a_paused_host_blames_nobody_for_the_pause() -> None:
    cluster = Cluster(2)
    cluster.beat(2)
    cluster.asleep = {1}
    cluster.beat(60)
    assert cluster.found(0) == {"silent": [1]}
    cluster.asleep = set()
    cluster.links[1].stood_still(60.0, cluster.now)
    assert cluster.found(1) == {}
    cluster.beat(1)
    assert cluster.found(1) == {}


@pytest.mark.parametrize("hosts", [2, 3, 16, 17, 33, 128, 1000])
def test_every_host_is_watched_and_a_large_world_is_not_watched_by_all(hosts: int) -> None:
    numbers = range(0, 8 * hosts, 8)
    own = {host: watched(numbers, host) for host in numbers}
    assert all(host not in others and others <= set(numbers) for host, others in own.items())
    assert all(host in own[other] for host, others in own.items() for other in others)
    assert all(len(others) == min(hosts - 1, len(others)) >= 1 and len(others) <= 20 for others in own.values())


class Ends:
    """Replacement for `FailureHandler` that only records failure reports. The real handler would end this rank."""

    def __init__(self) -> None:
        self.reports = list[str]()

    def unreachable(self, failure: Failure, ranks: Collection[int]) -> None:
        self.reports.append(f"{failure.who} {failure.title}: {failure.what}")


def watch_of(rank: int, status: RankStatus, ends: Ends) -> HostWatch:
    """Return a `HostWatch` for one of two hosts, without opening it."""
    board: Any = SimpleNamespace(store=None)
    return HostWatch(Launch(rank, 2, several_hosts=True), status, cast("Any", ends), board, TIMEOUT)


REPORTS = [
    ("failed", "saving iteration 3", 60, "12 s ago with a failure whose report has not arrived here"),
    ("over", "step 3", -1, "12 s ago without a failure, while this rank is in a step"),
    ("over", "step 3", 60, ""),
    ("over", "saving iteration 3", -1, ""),
]


@pytest.mark.parametrize(("kind", "phase", "peace", "report"), REPORTS)
def test_a_rank_exits_if_its_run_ended_elsewhere(
    monkeypatch: pytest.MonkeyPatch, kind: str, phase: str, peace: float, report: str
) -> None:
    monkeypatch.setattr(host_watch, "PEACE", peace)
    ends, status = Ends(), RankStatus()
    status.phase = phase
    watch = watch_of(0, status, ends)
    watch._act({each: {} for each in KINDS} | {"gone": [], "fine": [], kind: {"1": 12.0}})
    who = "the host of rank 1 (rank 1 of 2)"
    assert ends.reports == ([f"{who} ended before this rank: the run on {who} ended {report}"] if report else [])


class StoreBehindCable:
    """Store that answers only after the cable is repaired."""

    def __init__(self) -> None:
        self.mended = threading.Event()

    def check(self, keys: list[str]) -> bool:
        return self.mended.wait(HANG)


def test_a_store_reports_how_long_a_call_has_waited() -> None:
    cable = StoreBehindCable()
    store = AskedStore(cast("Any", cable))
    assert store.waits() == 0.0
    asking = threading.Thread(target=store.check, args=(["link/0"],))
    asking.start()
    wait_for(lambda: store.waits() >= 0.2)
    cable.mended.set()
    asking.join()
    assert store.waits() == 0.0


@pytest.mark.parametrize("there", [True, False])
def test_a_rank_without_an_answer_checks_the_host_of_the_store(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    asked: list[tuple[str, int]] = []
    watch = watch_of(1, RankStatus(), ends := Ends())

    def answers(address: tuple[str, int], seconds: float) -> bool:
        asked.append(address)
        if len(asked) == 2:
            watch._closed.set()
        return there

    monkeypatch.setattr(host_watch, "_answers", answers)
    monkeypatch.setattr(host_watch, "LOOK", 0.001)
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setenv("MASTER_PORT", "29500")
    watch._store = cast("Any", SimpleNamespace(waits=lambda: 7.0))
    watch._ask_after_store()
    assert asked == [("first", 29500)] * 2
    who = "first (rank 0 of 2) host cannot be reached: the host of rank 1 (rank 1 of 2) has heard nothing from"
    assert [report.startswith(who) for report in ends.reports] == ([] if there else [True, True])


@pytest.mark.parametrize(("seconds", "hosts", "there"), [(6, 2, True), (6, 1, False), (0, 2, False)])
def test_only_ranks_on_several_hosts_watch_them(seconds: float, hosts: int, there: bool) -> None:
    config = RunConfig().with_options(ResilienceConfig(seconds))
    assert HostsAndFolders(config).watches_hosts(Launch(0, 2, several_hosts=hosts > 1)) is there
    flag = "--host-heartbeat-timeout-seconds"
    assert problems(f"{flag} 1")[0].startswith(f"{flag} 1.0: must be 0 or at least 3")
