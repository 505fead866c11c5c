"""A run with custom components trains, is stopped by a callback, resumes, and generates text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.apart import read_records
from tests.forked import ROOT, run_forked, run_program

EXTENSION = ROOT / "tests" / "fixtures" / "own_parts.py"
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 257 --lr 1e-2 --cpu "
    "--tokenizer-type ByteTokenizer --train-iters 8 --global-batch-size 4 --log-interval 2 --save-interval 4 "
    "--eval-interval 4 --eval-iters 1 --dataset-type own_data --normalization own_norm "
    "--activation-func own_activation --loss-func own_loss --optimizer own_optimizer --lr-decay-style own_schedule"
).split()


def records(folder: Path) -> dict[int, dict]:
    return {line["iteration"]: line for line in read_records(folder / "metrics.jsonl") if "lm_loss" in line}


def test_a_run_with_custom_parts_is_stopped_resumed_and_used(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train = (*FLAGS, "--extension", str(EXTENSION))
    done = run_program("pretrain_gpt.py", *train, "--save", str(whole), code=0)
    assert "callback: start" in done.stdout and "callback: checkpoint 8" in done.stdout
    assert done.stdout.rstrip().endswith("callback: end")

    # Only rank 1 requests a stop, but both ranks stop after the same step.
    said = run_forked(2, [*train, "--save", str(cut), "--own-patience", "5", "--pp", "2"], tmp_path / "screen")
    assert "exiting at iteration 6: patience is over" in said and "callback: checkpoint 6" in said

    # If an option of an extension changes the computation, the option must have the same value as in the checkpoint.
    resume = ("pretrain_gpt.py", "--config", cut / "run_config.yaml", "--load", cut, "--pp", "1")
    done = run_program(*resume, "--own-decay", "0.5")
    assert done.returncode != 0
    assert "--own-decay 0.9 in the checkpoint, 0.5 in the run" in done.stderr and "patience" not in done.stderr

    # The saved configuration names the extension, so a resumed run loads the extension. The optimizer states of the
    # extension are restored under a different layout.
    done = run_program(*resume, "--own-patience", "0", code=0)
    assert "loaded checkpoint of iteration 6" in done.stdout
    one, two = records(whole), records(cut)
    assert one.keys() == two.keys() == {2, 4, 6, 8}
    for iteration in one:
        assert abs(one[iteration]["lm_loss"] - two[iteration]["lm_loss"]) < 1e-4
        assert one[iteration]["share_of_threes"] == two[iteration]["share_of_threes"]
        assert 0.2 < one[iteration]["share_of_threes"] < 0.5

    generate = ("tools/generate_text.py", "--load", str(cut), "--prompt", "ab", "--max-new-tokens", "2")
    done = run_program(*generate, code=0)


def test_a_renamed_extension_must_be_given_again(tmp_path: Path) -> None:
    before, now, run = tmp_path / "before.py", tmp_path / "now.py", tmp_path / "run"
    before.write_bytes(EXTENSION.read_bytes())
    train = [*FLAGS, "--save", str(run), "--load", str(run), "--own-patience", "0"]
    train[train.index("--train-iters") + 1] = "2"
    done = run_program("pretrain_gpt.py", *train, "--extension", str(before), code=0)
    before.rename(now)
    generate = ("tools/generate_text.py", "--load", str(run), "--prompt", "ab", "--max-new-tokens", "2")
    done = run_program(*generate, code=2)
    told = f"there is no such file or module as {before}: if it was moved or renamed, give --extension NEWPATH"
    assert f"checkpoint {run}/iter_0000002 names the extension {before}; " in done.stderr and told in done.stderr
    resume = ("pretrain_gpt.py", "--config", str(run / "run_config.yaml"), "--train-iters", "4")
    done = run_program(*resume, code=2)
    assert f"--config {run}/run_config.yaml names the extension {before}; " in done.stderr and told in done.stderr
    for command in (generate, resume):
        done = run_program(*command, "--extension", str(now), code=0)
    assert "loaded checkpoint of iteration 2" in done.stdout


RAISES = """
from megatron.training.extensions import CALLBACKS
from megatron.training.hooks import Callback

@CALLBACKS.register("uploads")
class Uploads(Callback):
    def on_end(self, run):
        if run.optimizer.ddp.state.world.rank == 1:
            raise OSError("no network")

@CALLBACKS.register("says")
class Says(Callback):
    def on_end(self, run):
        run.say("the other callback")
"""


def test_a_callback_that_raises_at_the_end_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uploads.py").write_text(RAISES)
    monkeypatch.setenv("OUTCOME_FILE", str(tmp_path / "outcome"))
    flags = [*FLAGS[: FLAGS.index("--save-interval")], "--mock-data", "--extension", str(tmp_path / "uploads.py")]
    said = run_forked(2, [*flags, "--save", str(tmp_path / "run")], tmp_path / "screen", code=3)
    assert "saved checkpoint at iteration 8" in said and "the other callback" in said
    line = "callback Uploads raised in on_end on rank 1"
    assert said.rstrip().splitlines()[-1].startswith("the run has ended and is saved, but " + line), said[-500:]
    assert said.rstrip().endswith("OSError: no network") and "Traceback" in said
    outcome = (tmp_path / "outcome").read_text()
    assert outcome.startswith("name=CALLBACK_FAILED\n") and line in outcome


PROGRAM = """
import sys
from megatron.training.config.arguments import command_line
from megatron.training.config.prepare import prepare
from megatron.training.hooks import Callback, Parts
from megatron.training.reliability.launch import Launch
from megatron.training.training import pretrain

def count(step):
    return RETURNED

class Tell(Callback):
    def on_log(self, run, record):
        run.say(f"told: {record['iteration']} {record['count']}")
        if record["iteration"] == 4:
            run.stop("told enough")

launch = Launch.from_environment()
config = prepare(command_line(sys.argv[1:], launch), launch)
sys.exit(pretrain(config, launch, Parts([Tell(config)], {"count": count})))
"""


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("step.run.progress.iteration, 1", "told: 4 "),
        ("None", "metric count must return a pair (sum, count) of numbers or one-element tensors, not None"),
    ],
)
def test_a_program_can_add_its_own_components(returned: str, said: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + PROGRAM.replace("RETURNED", returned))
    flags = "--mock-data --global-batch-size 4 --train-iters 8 --log-interval 2 --eval-iters 0"
    done = run_program(program, *FLAGS[: FLAGS.index("--tokenizer-type")], *flags.split())
    assert said in done.stdout + done.stderr, done.stdout + done.stderr
    assert ("exiting at iteration 4: told enough" in done.stdout) == (returned != "None")
