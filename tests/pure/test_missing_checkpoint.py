"""Tests of runs for which --load names a path without a checkpoint. Depending on its flags, such a run either starts
from scratch or reports an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.training.checkpoints.loading import check_may_start
from megatron.training.config.arguments import command_line
from megatron.training.config.prepare import prepare
from megatron.training.config.run_config import CheckpointConfig
from megatron.training.reliability.launch import Launch

MODEL = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 50".split()
RUN = "--lr 1e-3 --mock-data --train-iters 1 --cpu".split()
ABSENT = "does not exist and is not the --save folder; correct the path, or add --allow-missing-checkpoint to start"
LAUNCH = Launch()


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, launch: Launch = LAUNCH) -> list[str]:
    """Return the problems that are reported for --load. Assert that flags of the model, which the checkpoint would
    provide, are not reported as missing."""
    with pytest.raises(SystemExit) as ended:
        prepare(command_line([*RUN, *argv], launch), launch)
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert "--num-layers" not in text
    return re.findall(r"--load .*", text)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("model", [MODEL, []], ids=["flags of the model", "no flags"])
@pytest.mark.parametrize("more", [[], ["--save", "other"], ["--finetune"], ["--exit-on-missing-checkpoint"]])
def test_a_path_that_does_not_exist_is_refused(
    model: list[str], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (told,) = refusal(capsys, *model, "--load", "./runs/typo", *more)
    needed = {"--finetune", "--exit-on-missing-checkpoint"} & {*more}
    assert told.startswith(f"--load ./runs/typo: {ABSENT.partition(',')[0] if needed else ABSENT}")
    assert "hf download" not in told and ("--allow-missing" in told) == (not needed)


def test_a_hub_name_gets_the_advice_to_download(capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = refusal(capsys, "--load", "Qwen/Qwen3-0.6B")
    assert "hf download Qwen/Qwen3-0.6B --local-dir FOLDER" in told
    Path("Qwen").mkdir()
    (told,) = refusal(capsys, "--load", "Qwen/Qwen3-0.6B")
    assert "hf download" not in told


def test_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("weights.bin.gz").write_text("x")
    (told,) = refusal(capsys, *MODEL, "--load", "weights.bin.gz")
    assert "give a checkpoint, a folder of checkpoints" in told


def test_without_model_flags_a_folder_must_contain_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    Path("folder", "notes").write_text("")
    (told,) = refusal(capsys, "--load", "folder")
    assert told.startswith("--load folder: is a folder without a model")


@pytest.mark.parametrize(
    "argv", ["--load a --save a", "--load ./a/ --save a", "--load folder", "--load a --allow-missing-checkpoint"]
)
def test_other_runs_start_from_scratch(argv: str) -> None:
    Path("folder").mkdir()
    assert prepare(command_line([*RUN, *MODEL, *argv.split()], LAUNCH), LAUNCH).model.num_layers == 2


def test_ranks_of_several_hosts_decide_together(capsys: pytest.CaptureFixture[str]) -> None:
    launch = Launch(several_hosts=True)
    config = prepare(command_line([*RUN, *MODEL, "--load", "./typo"], launch), launch)
    with pytest.raises(ValueError, match="--allow-missing-checkpoint"):
        check_may_start(config.checkpoint)
    check_may_start(CheckpointConfig(load="./typo", save="./typo"))
    assert refusal(capsys, "--load", "./typo", launch=launch)
