"""Run a small part of the campaign of random faults (`campaign.py`): twelve faults of ten kinds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.extensions.peer_copies.campaign import KINDS, drawn_faults, one_round

SEEDS = (1, 2, 3, 14, 21)


def test_the_sample_has_most_kinds_of_faults() -> None:
    faults = []
    for seed in SEEDS:
        moments = random.Random(seed)
        ranks, _ = moments.randrange(2, 5), moments.randrange(1, 3)
        faults += [fault.kind.split()[0] for fault in drawn_faults(moments, ranks)]
    # Every kind of fault occurs except "two", because `drawn_faults` returns a "two" as a pair of other faults.
    assert len(faults) == 12 and {*KINDS} - {*faults} == {"two"}, faults


@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults_cost_one_step_at_most(seed: int, tmp_path: Path) -> None:
    """The assertions are in `one_round`."""
    assert one_round(tmp_path, seed)
