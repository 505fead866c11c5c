"""The short form of `python -m tests.faults.kill_campaign`."""

from __future__ import annotations

from pathlib import Path

from tests.faults.kill_campaign import STRATEGIES, campaign


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    """Each start has another sharding strategy."""
    kills, wrong = campaign(kills=2, seed=5, iterations=8, folder=tmp_path, share=0.5, flags=STRATEGIES)
    assert len(kills) == 2 and not wrong, wrong
    assert kills[-1].resumed is not None
