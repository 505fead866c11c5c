"""Tests of the schedule plotter's text output, pictures and error messages."""

import re
import struct
import sys

import pytest

from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from tests.apart import run_command
from tests.extensions import installed
from tools import plot_schedule
from tools.plot_schedule import main, windows_of

pytestmark = pytest.mark.skipif(not installed("planner"), reason="the planner is deleted")


def test_text_is_to_scale(capsys):
    assert main(["--pipeline-schedule", "1f1b", "--pp", "2", "--num-microbatches", "2"]) == 0
    first, last, summary, _, later = capsys.readouterr().out.splitlines()
    assert first == "  0 F0|F1|......B0---|...B1---|"
    assert last == "  1 ...F0|B0---|F1|B1---|"
    assert "bubble 0.3333" in summary and "bubble 0.3333" in later


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_every_schedule_can_be_drawn(schedule, tmp_path):
    path = tmp_path / "schedule.png"
    assert main(["--pipeline-schedule", schedule, "--messages", "--output", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_only_the_two_ends_of_a_long_schedule_are_drawn(tmp_path, capsys):
    path = tmp_path / "schedule.png"
    assert main(["--pp", "16", "--num-microbatches", "192", "--output", str(path)]) == 0
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert width <= 2400 and height <= 1000
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 490 for line in lines) and lines[16].endswith("--messages prints every action")
    assert "F0--|F1--|" in lines[0] and lines[0].endswith("B191-----|")
    assert windows_of(10, 20) == [(0, 10)]
    assert windows_of(100, 20) == [(0, 10), (90, 100)]


def test_a_schedule_of_an_extension_can_be_drawn(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text(
        "from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES\n"
        "PIPELINE_SCHEDULES.register('plotted', 'megatron.core.pipeline_parallel.schedules:gpipe')\n"
    )
    assert (
        main(["--extension", str(own), "--pipeline-schedule", "plotted", "--pp", "2", "--num-microbatches", "2"]) == 0
    )
    assert capsys.readouterr().out.startswith("  0 F0|F1|")
    with pytest.raises(SystemExit):
        main(["--extension", str(tmp_path / "absent.py")])
    assert "absent.py: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pp", "0"], "--pp 0: must be at least 1"),
        (["--forward", "0"], "--forward 0: must be a finite number above 0"),
        (["--forward", "nan"], "--forward nan: must be a finite number"),
        (["--comm", "inf", "--steps", "0"], "--steps 0: must be at least 1\n--comm inf: must be a finite number"),
        (["--output", "schedule"], "--output schedule: must end with the kind of picture: .png, .eps, .jpg, .pdf"),
        (["--output", "x.foo"], ".webp; for example x.png"),
        (["--output", "/proc/none/a.png"], "--output /proc/none/a.png: /proc cannot be written (No such file"),
        (["--pipeline-schedule", "1f1b", "--num-virtual-stages-per-pipeline-rank", "2"], "must be 1"),
    ],
)
def test_bad_flags_are_refused(flags, message, capsys):
    with pytest.raises(ValueError, match=re.escape(message)):
        main(flags)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("redirected", "why"), [("> /dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
)
def test_a_tool_whose_output_is_full_or_closed_ends_with_one_line(redirected, why):
    command = f"{sys.executable} {plot_schedule.__file__} {redirected}"
    done = run_command(["sh", "-c", command], code=2)
    assert done.stderr == f"error: standard output: cannot be written: {why}\n"
