"""The short form of `python -m tests.extensions.text_data.input_corruption`."""

from __future__ import annotations

from tests.extensions.text_data.input_corruption import campaign

KINDS = 36


def test_damage_is_told_or_does_no_harm() -> None:
    """Each kind of input once; of a thousand trials these are those of one seed."""
    counts = campaign(KINDS, seed=7)
    assert not counts["failed"], "see what is printed"
    assert counts.total() == KINDS and min(counts["told"], counts["read"]) > 3
