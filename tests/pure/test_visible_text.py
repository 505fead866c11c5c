"""Test that control characters in values are shown as text instead of being sent to the terminal."""

from __future__ import annotations

import io
import sys

import pytest

from megatron.training.config.problem import Problem
from megatron.training.reliability.failure_report import Failure
from megatron.training.reliability.visible_text import LONGEST, VisibleStream, exact, visible, visible_output
from tools.common import run_tool

TITLE = "\x1b]0;owned\x07"
"""Terminal escape sequence that sets the window title."""


def test_control_characters_are_shown_and_text_is_unchanged() -> None:
    assert visible(f"a{TITLE}b\r\x9b\x7f\0") == r"a\x1b]0;owned\x07b\x0d\x9b\x7f\x00"
    assert visible("plain\tüñ 漢字 😀\n") == "plain\tüñ 漢字 😀\n"
    assert visible("right\u202eto left\u2066") == r"right\u202eto left\u2066"
    assert visible("bytes \udcff") == r"bytes \udcff"


def test_a_problem_is_one_line_of_bounded_length() -> None:
    text = str(Problem(f"--data-path{TITLE}", ("a\nb", "9" * 5000), f"no {TITLE}", TITLE))
    assert "\x1b" not in text and "\n" not in text and len(text) < LONGEST + 200
    assert r"a\nb 999" in text and "...(5,000 characters)..." in text
    assert str(Problem("--lr", 1, "rule", "remedy")) == "--lr 1: rule; remedy"
    assert str(Problem("--lr", None, "rule", "remedy")) == "--lr: rule; remedy"


def test_failure_reports_show_control_characters() -> None:
    failure = Failure(0, f"rank 0 on {TITLE}", "step", TITLE, f"ValueError: {TITLE}", "look")
    assert "\x1b" not in failure.text() + failure.line() and r"\x1b]0;owned\x07" in failure.text()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("write", ["\r 10%|#  | step\x1b[K", "\n\x1b[A", "\x1b[A", "\r", "\n", "\n\n", "done\n"])
def test_cursor_movements_of_progress_bars_are_kept(write: str) -> None:
    stream = io.StringIO()
    VisibleStream(stream).write(write)
    assert stream.getvalue() == write


@pytest.mark.parametrize("write", [f"\r 10% {TITLE}", "x\x1b[A", "name\rother", "\x1b[2J", "a\x1b[Kb"])
def test_values_in_a_progress_bar_are_escaped(write: str) -> None:
    stream = io.StringIO()
    VisibleStream(stream).write(write)
    assert not {"\x1b", "\x07"} & set(stream.getvalue()) and "\r" not in stream.getvalue()[1:]


def test_generated_text_is_exact_in_files_and_visible_on_a_terminal() -> None:
    for stream, expected in ((io.StringIO(), TITLE), (Terminal(), visible(TITLE))):
        exact(VisibleStream(stream)).write(TITLE)  # type: ignore[arg-type]
        assert stream.getvalue() == expected
    assert exact(sys.stdout) is sys.stdout


def test_control_characters_are_shown_within_a_tool(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        print(TITLE)
        raise ValueError(f"--input {TITLE}: no such file")

    with pytest.raises(SystemExit, match="2"):
        run_tool(main)
    assert capsys.readouterr() == (f"{visible(TITLE)}\n", f"error: --input {visible(TITLE)}: no such file\n")
    with visible_output():
        print(TITLE, file=sys.stderr)
    print("plain")
    assert capsys.readouterr() == ("plain\n", f"{visible(TITLE)}\n")
