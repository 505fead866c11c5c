"""Tests of stop requests that arrive before the first step."""

from __future__ import annotations

import torch.distributed as dist

from megatron.training.reliability.launch import Launch
from megatron.training.reliability.rank_store import Board, Request
from megatron.training.reliability.stop_requests import StopRequests


def looks(unsaved: bool) -> tuple[list[str | None], list[StopRequests]]:
    """Return the final decisions of two ranks about a stop request that arrives before the ranks know whether their
    state is saved."""
    store = dist.HashStore()
    boards, ranks = [Board(store, Launch(rank, 2)) for rank in range(2)], [StopRequests() for _ in range(2)]
    ranks[1].ask(Request("resume", "SIGTERM"))
    for rank in ranks:
        rank.undecided = True
    for _ in range(3):
        assert [rank.look(board, 0.1) for rank, board in zip(ranks, boards, strict=True)] == [None, None]
    for rank in ranks:
        rank.decide(unsaved)
    for _ in range(3):
        found = [rank.look(board, None) for rank, board in zip(ranks, boards, strict=True)]
    return found, ranks


def test_an_unsaved_state_is_saved_before_the_end() -> None:
    found, ranks = looks(unsaved=True)
    assert found == [None, None]
    assert all(not rank.tick() and rank.stopping and rank.resumes for rank in ranks)


def test_a_state_on_disk_needs_no_save() -> None:
    found, _ = looks(unsaved=False)
    assert found == ["ending before the first step: SIGTERM"] * 2
