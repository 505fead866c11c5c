"""Test that tools for Megatron-LM's output work with this program. Log parsers read the lines of --log-format megatron,
and dashboards read the files in --tensorboard-dir."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.apart import losses_in
from tests.forked import run_forked

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --mock-data --cpu "
    "--train-iters 5 --global-batch-size 4 --eval-interval 2 --eval-iters 1 --save-interval 2 --log-interval 1 "
    "--tp 2 --lr 1e-2 --log-format megatron --log-throughput --log-num-zeros-in-grad --log-params-norm"
).split()
NUMBER, STEPS, WITHIN = r"([-+0-9.eE]+)", ["1", "2", "3", "4", "5"], ["2", "4"]

# Values that log parsers find, keyed by regular expression. A parser searches each whole line, or the part of a line
# that begins with the word "iteration".
FOUND_IN_LINES = {
    r"iteration\s+(\d+)/\s*5": STEPS,
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.\d]*\] iteration\s+(\d+)/\s*\d+ \|": STEPS,
    r"^ \[[^\]]+\] iteration +(\d+)/ +5 \| consumed samples: +\d+ \|": STEPS,
    r"iteration\s+(\d+)/\s*\d+.*?elapsed time per iteration \(ms\): [\d.]+ \|": STEPS,
    r"iteration\s+(\d+)/.*throughput per GPU \(TFLOP/s/GPU\): [0-9.]+ \|.*global batch size:\s+4 \|": STEPS,
    r"iteration\s+(\d+)/.*learning rate: \d\.\d{6}E[-+]\d\d \|.*lm loss: \d\.\d+E[-+]\d+ \|": STEPS,
    r"iteration\s+(\d+)/.*lm loss: [\d.E+-]+ \| loss scale: [\d.]+ \| grad norm: [\d.]+ \|": STEPS,
    r"iteration\s+(\d+)/.*grad norm: [\d.]+ \| num zeros: [\d.]+ \| params norm: [\d.]+ \|": STEPS,
    r"iteration\s+(\d+)/.*number of skipped iterations:\s*0 \| number of nan iterations:\s*0 \|": STEPS,
    r"validation loss at iteration (\d+) \| lm loss value: [\d.E+-]+ \| lm loss PPL: [\d.E+-]+ \|": WITHIN,
    r"validation loss at iteration (\d+) on validation set \| lm loss value: [\d.E+-]+ \|": ["5"],
    r"validation loss at iteration (\d+) on test set \| lm loss value: [\d.E+-]+ \|": ["5"],
    r"saving checkpoint at iteration\s+(\d+) to \S+ in torch_dist format": ["2", "4", "5"],
    r"successfully saved checkpoint from iteration\s+(\d+)": ["2", "4", "5"],
    r"number of parameters on \(tensor, pipeline\) model parallel rank \(0, 0\): (\d+)": ["4560"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def log(folder: Path) -> str:
    places = ["--save", str(folder / "run"), "--tensorboard-dir", str(folder / "board")]
    return run_forked(2, [*FLAGS, *places], folder / "screen")


@pytest.mark.parametrize("pattern", FOUND_IN_LINES)
def test_parsers_find_the_expected_values(log: str, pattern: str) -> None:
    found = [match[1] for line in log.splitlines() if (match := re.search(pattern, line))]
    assert found == FOUND_IN_LINES[pattern], log


def test_fields_are_separated_by_bars(log: str) -> None:
    """Each field between bars consists of a name, a colon and a number, so that `grep -Eo 'name [^|]*'` and `cut -d'|'`
    can extract the field."""
    lines = [line for line in log.splitlines() if re.search(r"\] iteration +\d+/", line)]
    fields = [dict(field.split(":", 1) for field in line.split("|")[1:-1]) for line in lines]
    assert len(fields) == 5 and all(each.keys() == fields[0].keys() for each in fields)
    losses = [float(each[" lm loss"]) for each in fields]
    assert losses == [float(text) for text in re.findall(f"lm loss: {NUMBER}", log)] and losses[-1] < losses[0]
    assert [float(each[" consumed samples"]) for each in fields] == [4, 8, 12, 16, 20]


def test_tensorboard_uses_megatrons_tags(log: str, folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "board"))
    events.Reload()
    losses = losses_in(folder / "run" / "metrics.jsonl")
    found = {event.step: event.value for event in events.Scalars("lm loss")}
    assert found == pytest.approx(dict(zip(range(1, 6), losses, strict=True)), rel=1e-6)
    wanted = {"lm loss validation", "learning-rate", "grad-norm vs samples", "num-zeros", "params-norm", "throughput"}
    assert wanted <= set(events.Tags()["scalars"])
