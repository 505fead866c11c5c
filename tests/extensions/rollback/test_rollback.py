"""The results of a run that rolls back at a spike are bitwise equal to those of a run whose flags skip the same
batches. The tests restore the states from each possible source, such as copies in memory and checkpoints on disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatron.extensions.operate.peer_copies.client import HOST
from megatron.training import training
from megatron.training.reliability.launch import START
from megatron.training.run import TrainingRun
from tests.apart import read_records
from tests.extensions.peer_copies.runs import await_copies
from tests.extensions.rollback.runs import Run, poisoned
from tests.forked import run_forked
from tests.parity.matrix.combination import Combination
from tests.parity.mutants import Mutant, planted

SPIKE = 14
BACK = "--rollback-on-spike --rollback-steps 2"
SHARDED = "--bf16 --data-parallel-sharding-strategy"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return poisoned(tmp_path_factory.mktemp("data"))


LAYOUTS = [
    (1, "--log-noise-scale --micro-batch-size 1"),
    (2, f"{SHARDED} optim --overlap-grad-reduce --overlap-param-gather"),
    (2, f"{SHARDED} optim_grads_params"),
    (4, "--tp 2 --pp 2 --fp16 --initial-loss-scale 256 --loss-scale-window 4"),
]


@pytest.mark.parametrize(("ranks", "flags"), LAYOUTS)
def test_the_batches_of_a_spike_are_skipped(ranks: int, flags: str, data: str, tmp_path: Path) -> None:
    told, run = (Run(tmp_path / name, data, flags, ranks) for name in ("told", "run"))
    told.start("--iterations-to-skip 13 14")
    said = run.start(BACK)
    assert "going back to iteration 12 from memory; the samples of iterations 13 to 14 are passed over" in said
    run.assert_equal(told)
    (event,) = run.events("rollback")
    assert (event["iteration"], event["to"], event["passed_over"]) == (SPIKE, 12, [13, 14])


SLOW = """
import time
from megatron.training.extensions import CALLBACKS
from megatron.training.hooks import Callback

@CALLBACKS.register("slow")
class Slow(Callback):
    def on_step_end(self, run):
        time.sleep(0.1)
"""


@pytest.mark.parametrize("interval", [1, 7])
def test_goodput_reports_rolled_back_steps(interval: int, data: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = Run(tmp_path / "run", data, f"--log-goodput --log-interval {interval} --extension {tmp_path / 'slow.py'}")
    said = run.start(BACK)
    (event,) = run.events("rollback")
    (*_, last) = run.events("goodput")
    made = 0.1 * (event["iteration"] - event["to"] - 1)  # in the step of the spike, the callback does not sleep
    assert last["seconds"]["rolled_back"] >= made + event["seconds"]
    records = read_records(run.save / "metrics.jsonl")
    first, last_passed = event["passed_over"]
    kept, begin = 0.0, 0
    for record in records:
        steps = [number for number in range(begin + 1, record["iteration"] + 1) if not first <= number <= last_passed]
        kept, begin = kept + record["step_time"] * max(1, len(steps)), record["iteration"]
    assert last["seconds"]["useful"] + last["seconds"]["skipped"] == pytest.approx(kept, rel=0.02)
    assert "rolled-back steps" in said


def ends_after_going_back(rank: int) -> None:
    """Patch the training step of a rank so that the rank is killed once, before the first step after a rollback."""
    os.environ[HOST], made = f"host{rank}", training.train_step

    def step(run: TrainingRun) -> None:
        if os.environ[START] == "0" and run.progress.iteration + 1 in run.passed_over:
            await_copies(run)
            if rank:
                os.kill(os.getpid(), signal.SIGKILL)
        made(run)

    training.train_step = step


def test_rollback_from_copies_in_peer_memory(data: str, tmp_path: Path) -> None:
    flags = f"{SHARDED} optim"
    told, run = (Run(tmp_path / name, data, flags, 2) for name in ("told", "run"))
    told.start("--iterations-to-skip 13 14")
    (tmp_path / "memory").mkdir()
    copies = f"--peer-copies 1 --peer-copy-path {tmp_path / 'memory'} --restarts-in-job 1"
    words = [*run.flags, *BACK.split(), *copies.split()]
    said = run_forked(2, words, run.screen, prepare=ends_after_going_back)
    assert "going back to iteration 12 from copies in memory of hosts" in said and "incomplete" not in said
    assert "loaded checkpoint of iteration 12 from copies" in said and said.count("going back to") == 1
    run.assert_equal(told)


def resumes_before_the_spike(folder: Path, data: str) -> None:
    """Assert that a run without copies in memory rolls back to a checkpoint on disk, and that it then computes the same
    state at iteration 12."""
    told, run = Run(folder / "told", data), Run(folder / "run", data, f"{BACK} --save-interval 5")
    told.start("--iterations-to-skip 13 14")
    run.start("--exit-interval 13")
    said = run.start()
    assert f"going back to iteration 10 from {run.save}/iter_0000010" in said
    run.assert_equal(told)


def test_a_run_without_copies_rolls_back_to_the_disk(data: str, tmp_path: Path) -> None:
    resumes_before_the_spike(tmp_path, data)


def resumes_after_the_rollback(folder: Path, data: str) -> None:
    """Assert that a checkpoint saved between skipped batches records the skipped batches, and that a run resumes from
    the checkpoint under another layout."""
    told, run = Run(folder / "told", data), Run(folder / "run", data, f"{BACK} --rollback-batches 4")
    told.start("--iterations-to-skip 13 14 15 16")
    run.start("--exit-interval 15")
    run.start("--tp 2", ranks=2)
    assert run.losses().keys() == told.losses().keys()
    for iteration, values in told.losses().items():
        expected = values if None in values else pytest.approx(values, rel=1e-4)
        assert run.losses()[iteration] == expected, iteration


def test_a_checkpoint_after_a_rollback_resumes_under_another_layout(data: str, tmp_path: Path) -> None:
    resumes_after_the_rollback(tmp_path, data)


MUTANTS = {
    "position not restored": (
        "hooks.Rollback._set_position",
        "setattr(run.progress, each.name, getattr(position, each.name))",
        "each.name != 'consumed_samples' and setattr(run.progress, each.name, getattr(position, each.name))",
        resumes_before_the_spike,
    ),
    "batches not recorded": (
        "hooks.Rollback.state",
        "for each in self.passed_over",
        "for each in self.passed_over[:0]",
        resumes_after_the_rollback,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_detected(name: str, data: str, tmp_path: Path) -> None:
    place, old, new, check = MUTANTS[name]
    mutant = Mutant({f"extensions.operate.rollback.{place}": [(old, new)]}, Combination.of())
    with planted(mutant), pytest.raises(AssertionError):
        check(tmp_path, data)


def test_a_run_ends_after_the_maximum_of_rollbacks(data: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", data, f"{BACK} --spiky-loss-factor 1.001 --max-rollbacks 1 --lr 0.9")
    assert "after 1 rollbacks, the maximum set by --max-rollbacks" in run.start(code=1)
