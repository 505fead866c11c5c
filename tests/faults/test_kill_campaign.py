"""The short forms of `python -m tests.faults.kill_campaign` and `python -m tests.faults.resume_elsewhere`."""

from __future__ import annotations

from pathlib import Path

from tests.faults.kill_campaign import STRATEGIES, campaign
from tests.faults.resume_elsewhere import killed_and_resumed


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    """Each start has another sharding strategy."""
    kills, wrong = campaign(kills=2, seed=5, iterations=8, folder=tmp_path, share=0.5, flags=STRATEGIES)
    assert len(kills) == 2 and not wrong, wrong
    assert all(kill.hit.killed for kill in kills) and kills[-1].resumed is not None


def test_killed_and_resumed_at_another_layout_as_one_process(tmp_path: Path) -> None:
    outcome = killed_and_resumed(iterations=6, ranks=4, folder=tmp_path)
    assert outcome.equal and 0 < outcome.resumed_from < 6, outcome
