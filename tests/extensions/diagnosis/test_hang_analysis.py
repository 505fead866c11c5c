"""Tests of how the rank that caused a hang is determined. The decision is based on the last collective that each rank
entered."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from megatron.extensions.observe.diagnosis.hang_analysis import (
    CollectivesAnalysis,
    Entered,
    Waiting,
    blame,
    last_entered,
)
from megatron.training.reliability.rank_status import Meeting, RankStatus, Standing

TP, PP = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
WORLD = (0, 1, 2, 3)


def standing(
    rank: int, world: int, tp: int, pp: int, waits_in: str = "", what: str = "all_reduce [4]", sender: int | None = None
) -> Waiting:
    """Return the status of a waiting rank. `world`, `tp` and `pp` are the numbers of collectives that the rank has
    entered in each group. The rank waits in the last collective of the group `waits_in`."""
    counts = {"world": (WORLD, world), "tp": (TP[rank], tp), "pp": (PP[rank], pp)}
    entered = [
        Entered(axis, ranks, number, what if axis == waits_in else "all_reduce [4]", axis == waits_in)
        for axis, (ranks, number) in counts.items()
        if number
    ]
    return Waiting(f"line_of_{rank}", tuple(entered), sender)


def with_rank_2(*where: Any) -> dict[int, Waiting]:
    """Return the status of each of four ranks, keyed by rank. The status of rank 2 is `standing(2, *where)`. Rank 0
    waits for its pipeline group, rank 1 for its tensor-parallel group, and rank 3 for a message from rank 1."""
    others = {0: standing(0, 4, 8, 5, "pp"), 1: standing(1, 4, 9, 5, "tp"), 3: standing(3, 4, 6, 5, sender=1)}
    return others | {2: standing(2, *where)}


def test_the_rank_that_enters_another_collective_is_named() -> None:
    """Ranks 0 and 2 wait for each other. The other three ranks have entered pp collective 5, which rank 2 has not
    entered, but none of them has entered world collective 5, in which rank 2 waits."""
    found = blame(with_rank_2(5, 6, 4, "world", "barrier []"))
    assert found is not None and found.ranks == (2,)
    assert "rank 2 entered barrier [] (number 5 over world" in found.why


@pytest.mark.parametrize("guilty", WORLD)
def test_the_rank_with_another_tensor_size_is_named(guilty: int) -> None:
    """All ranks wait in the same collective of their tensor-parallel groups, but the tensor of one rank has a different
    size."""
    sizes = {rank: "all_reduce [7]" if rank == guilty else "all_reduce [4]" for rank in WORLD}
    found = blame({rank: standing(rank, 4, 9, 5, "tp", what) for rank, what in sizes.items()})
    assert found is not None and found.ranks == (guilty,)


def test_the_rank_that_skips_a_collective_is_named() -> None:
    """The waits form a cycle: rank 0 waits for 2, 2 for 3, 3 for 1, and 1 for 0. Rank 2 has skipped a pp collective."""
    found = blame(with_rank_2(4, 7, 4, "tp"))
    assert found is not None and found.ranks == (2,)
    assert "skipped the collective that all others entered over pp" in found.why


def test_two_ranks_that_disagree_are_both_named() -> None:
    pair = (0, 1)
    entered = [(Entered("tp", pair, 2, what, True),) for what in ("all_reduce [4]", "all_gather [4]")]
    found = blame({rank: Waiting("here", entered=each) for rank, each in enumerate(entered)})
    assert found is not None and found.ranks == (0, 1)


def test_all_to_all_sizes_may_differ() -> None:
    entered = [Entered("ep", (0, 1), 2, f"all_to_all_single [{size}]", True) for size in (3, 5)]
    assert blame({rank: Waiting("here", entered=(each,)) for rank, each in enumerate(entered)}) is None


def test_the_missing_rank_is_named() -> None:
    """Rank 2 does not wait in any collective. Rank 1 waits for rank 0, which waits for rank 2, and rank 3 waits for a
    message from rank 1."""
    found = blame(with_rank_2(4, 6, 4))
    assert found is not None and found.ranks == (2,) and found.title.startswith("did not reach the point")
    assert "rank 2 was at line_of_2" in found.why


def test_no_rank_is_named_if_no_rank_waits() -> None:
    assert blame({rank: standing(rank, 4, 6, 5) for rank in WORLD}) is None
    assert blame({}) is None


def test_the_collective_that_a_rank_waits_for_is_sent_as_json() -> None:
    before = standing(2, 5, 6, 4, "world", sender=1)
    said = Standing("step 3", before.place, "stack", [[asdict(each) for each in before.entered], before.message_from])
    assert Waiting.of(Standing.from_json(said.to_json())) == before


def test_a_rendezvous_at_start_up_counts_as_evidence() -> None:
    """Rank 0 waits in the second rendezvous of the group, which rank 1 has not reached yet."""
    standings = {}
    for rank, number in enumerate((2, 1)):
        status = RankStatus()
        status.meeting = Meeting((0, 1), number, "model", pending=number == 2)
        standings[rank] = Standing("model", "here", evidence=CollectivesAnalysis(status).evidence())
    found = CollectivesAnalysis(status).blame(standings)
    assert found is not None and found.ranks == (1,) and found.title.startswith("did not reach the point")


def test_the_last_collective_of_each_group_is_read_from_a_trace() -> None:
    def entry(group: str, number: int, state: str = "completed", p2p: bool = False) -> dict[str, object]:
        common = {"profiling_name": "gloo:all_reduce", "input_sizes": [[4]], "input_dtypes": ["Float"]}
        over = {"state": state, "retired": state == "completed", "is_p2p": p2p}
        return common | over | {"process_group": [group, ""], "collective_seq_id": number}

    entries = [entry("1", 1), entry("0", 1), entry("1", 2, "scheduled"), entry("1", 3, "scheduled"), entry("9", 1)]
    trace = {"entries": [*entries, entry("1", 4, p2p=True), entry("0", 2)]}
    groups = {"0": ("world", (0, 1)), "1": ("tp", (0, 1))}
    found = {each.axis: each for each in last_entered([trace, {}], groups)}
    assert (found["tp"].number, found["tp"].pending, found["tp"].what) == (2, True, "all_reduce [4] Float")
    assert (found["world"].number, found["world"].pending) == (2, False)
    assert {each.axis: each.pending for each in last_entered([trace], groups, last_pending=True)}["world"]
