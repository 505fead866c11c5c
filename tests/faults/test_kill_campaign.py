"""The short form of `python -m tests.faults.kill_campaign`."""

from __future__ import annotations

from pathlib import Path

from tests.faults.kill_campaign import campaign


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    kills, wrong = campaign(kills=3, seed=5, iterations=12, folder=tmp_path, share=0.5)
    assert len(kills) == 3 and not wrong, wrong
    assert all(kill.hit.killed for kill in kills) and kills[-1].resumed is not None
