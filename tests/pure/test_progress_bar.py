"""Test that the progress of long operations is printed as lines to a log file, and shown as a progress bar on a
terminal."""

from __future__ import annotations

import io
import sys

import pytest

from megatron.training.metrics.progress_bar import ProgressBar, bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_logged_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that end within half a minute print no line. Longer operations print the remaining time every half
    minute."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    lines: list[str] = []
    times = iter([0.0, 10.0, 40.0, 40.0, 50.0, 75.0, 75.0, 100.0, 120.0, 120.0])
    bar = ProgressBar("converting", 400, "B", lines.append, lambda: next(times))
    for done in (50, 100, 150, 300, 310, 400):
        bar.update(done)
    bar.close()
    assert lines == [
        "converting: 25% after 40 s, 120 s left",
        "converting: 75% after 75 s, 25 s left",
        "converting: 100% after 120 s, 0 s left",
    ]
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    lines: list[str] = []
    show = bars("scoring tasks", "batch", lines.append)
    for total in (2, 3):
        for done in range(total + 1):
            show(done, total)
    assert lines == [] and "scoring tasks:" in screen.getvalue()
    assert "0/2 [" in screen.getvalue() and "0/3 [" in screen.getvalue()
