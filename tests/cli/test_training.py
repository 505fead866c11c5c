"""End-to-end tests of `pretrain_gpt.py`, from the flags to the written files. test_docs.py starts the program under
torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.path_kind import saved_folders
from tests.apart import losses_in, read_records
from tests.corpus import write_documents
from tests.forked import ROOT, run_forked, run_program

MODEL = (
    "--cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 200 "
    "--make-vocab-size-divisible-by 8 --lr 1e-2 --mock-data --global-batch-size 8 --micro-batch-size 2 "
    "--train-iters 20 --log-interval 1 --eval-iters 1 --eval-interval 10 --num-workers 1"
).split()


def losses(folder: Path) -> list[float]:
    return losses_in(folder / "metrics.jsonl")


def write_data(prefix: Path, texts: list[str]) -> None:
    """Write an indexed dataset of the texts' bytes, each text followed by an end-of-document token."""
    write_documents(prefix, ([*text.encode(), 256] for text in texts))


def test_resume_is_bitwise_and_fits_another_layout(tmp_path: Path) -> None:
    whole, halves, other, alone = (tmp_path / name for name in ("whole", "halves", "other", "alone"))
    screen = tmp_path / "screen"
    model = [*MODEL, "--train-iters", "12", "--eval-interval", "6", "--micro-batch-size", "4", "--num-workers", "0"]
    run_forked(2, [*model, "--tp", "2", "--save", str(whole)], screen)
    half = [*model, "--tp", "2", "--save", str(halves), "--load", str(halves)]
    run_forked(2, [*half, "--exit-interval", "6"], screen)
    assert (halves / "latest_checkpointed_iteration.txt").read_text().strip() == "6"
    # The run resumes after iteration 6 with pipeline parallelism instead of tensor parallelism.
    run_forked(2, [*model, "--pp", "2", "--load", str(halves), "--save", str(other)], screen)
    # An evaluation-only run with pipeline parallelism must print the same evaluation loss.
    said = run_forked(2, [*model, "--pp", "2", "--load", str(halves), "--save", str(alone), "--skip-train"], screen)
    (valid, test) = read_records(alone / "metrics.jsonl")
    (logged,) = (
        each for each in read_records(whole / "metrics.jsonl") if each["iteration"] == 6 and "valid_loss" in each
    )
    assert valid["iteration"] == test["iteration"] == 6 and "test_loss" in test
    assert valid["valid_loss"] == pytest.approx(logged["valid_loss"], rel=1e-5)
    assert "valid after iteration 6" in said and "saved checkpoint" not in said and not saved_folders(alone)
    run_forked(2, half, screen)
    assert losses(halves) == losses(whole)
    again = run_forked(2, half, screen)
    complete = " nothing was trained: the run is complete, its 12 iterations are trained; to continue, raise "
    assert again.splitlines()[-1].startswith(complete)
    assert len(losses(whole)) == 12
    assert losses(other) == pytest.approx(losses(whole)[6:], rel=1e-5)
    first, last = losses(whole)[0], losses(whole)[-1]
    assert last < first - 0.2, "the model learns"


def test_metrics_go_to_json_lines(tmp_path: Path) -> None:
    save = tmp_path / "save"
    result = run_program("pretrain_gpt.py", *MODEL, "--save", str(save), code=0)
    found = read_records(save / "metrics.jsonl")
    training = [record for record in found if "lm_loss" in record]
    assert [record["iteration"] for record in training] == list(range(1, 21))
    assert {
        "iteration", "consumed_samples", "consumed_tokens", "lm_loss", "grad_norm", "learning_rate", "loss_scale",
        "skipped_iterations", "nan_iterations", "tokens_per_second", "tflops_per_device", "mfu", "step_time",
        "peak_memory_bytes", "global_batch_size",
    } <= training[0].keys()  # fmt: skip
    assert training[-1]["consumed_samples"] == 160 and training[-1]["consumed_tokens"] == 160 * 32
    assert training[0]["mfu"] is None, "the peak rate of a CPU is unknown"
    assert [record["iteration"] for record in found if "valid_loss" in record] == [10, 20]
    assert sum("test_loss" in record for record in found) == 1
    lines = result.stdout.splitlines()
    subjects = [line.split(":")[0] for line in lines[:7]]
    assert subjects == ["model", "layout", "precision", "batch", "length", "memory", "metrics"]
    assert lines[6] == f"metrics: {save}/metrics.jsonl"
    assert "start-up (s):" in result.stdout
    assert training[-1]["seconds_left"] == 0 < training[0]["seconds_left"]
    lines = [line for line in result.stdout.splitlines() if line.startswith(" iteration ")]
    assert len(lines) == 20 and max(map(len, lines)) < 200 and "MFU" not in result.stdout
    assert (save / "run_config.yaml").exists()


def test_without_save_the_log_names_the_metrics_file(tmp_path: Path) -> None:
    flags = [*MODEL, "--train-iters", "1", "--eval-iters", "0"]
    said = run_program(ROOT / "pretrain_gpt.py", *flags, cwd=tmp_path, code=0).stdout
    remedy = "--save or --metrics-file changes the folder"
    assert f"metrics: metrics.jsonl in the current folder, {tmp_path}; {remedy}\n" in said
    assert len(losses(tmp_path)) == 1


def test_a_saved_configuration_runs_again_and_evaluation_does_not_change_it(tmp_path: Path) -> None:
    first, second, screen = tmp_path / "first", tmp_path / "second", tmp_path / "screen"
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "200"]
    run_forked(1, [*MODEL, *tokenizer, "--save", str(first), "--train-iters", "2"], screen)
    again = ["--config", str(first / "run_config.yaml")]
    run_forked(2, [*again, "--save", str(second)], screen)
    assert "vocab-size: 200" in (second / "run_config.yaml").read_text()
    assert losses(second) == pytest.approx(losses(first), rel=1e-5)
    written = (first / "run_config.yaml").read_bytes()
    said = run_forked(1, [*again, "--load", str(first), "--skip-train", "--eval-iters", "2"], screen)
    assert said.splitlines()[-1].startswith(" nothing was trained: --skip-train is given")
    assert (first / "run_config.yaml").read_bytes() == written
    run_forked(1, [*again, "--load", str(first), "--train-iters", "3"], screen)
    assert len(losses(first)) == 3


def test_a_new_run_keeps_the_metrics_of_an_old_one(tmp_path: Path) -> None:
    nothing = ["--train-iters", "2", "--save", str(tmp_path), "--load", str(tmp_path / "nothing")]
    nothing.append("--allow-missing-checkpoint")
    for _ in range(2):
        said = run_forked(1, [*MODEL, *nothing], tmp_path / "screen")
        assert f"no checkpoint in --load {tmp_path / 'nothing'}: starting at iteration 0" in said
    assert len(losses(tmp_path)) == 2
    assert read_records(tmp_path / "metrics.1.jsonl")[0]["lm_loss"] == losses(tmp_path)[0]


def test_a_run_without_a_length_is_one_epoch(tmp_path: Path) -> None:
    write_data(tmp_path / "data", [f"{n} " * 40 for n in range(30)])
    tokenizer = ["--tokenizer-type", "ByteTokenizer"]
    save = tmp_path / "save"
    without = [word for word in MODEL if word not in ("--mock-data", "--train-iters", "20", "--vocab-size", "200")]
    data = ["--data-path", str(tmp_path / "data"), "--split", "1,0,0", *tokenizer]
    run_forked(1, [*without, *data, "--save", str(save)], tmp_path / "screen")
    tokens = (tmp_path / "data.bin").stat().st_size // 2
    samples = (tokens - 1) // 32
    assert len(losses(save)) == samples // 8


def test_named_validation_sets_are_evaluated_completely_under_any_layout(tmp_path: Path) -> None:
    for name, lines in (("train", 300), ("books", 21), ("code", 9)):
        write_data(tmp_path / name, [f"{name} {number} " + "word " * (number % 17) for number in range(lines)])
    model = [flag for flag in MODEL if flag not in ("--mock-data",)]
    data = ["--no-mock-data", "--tokenizer-type", "ByteTokenizer", "--train-data-path", f"{tmp_path}/train"]
    sets = [*model, *data, "--full-validation", "--train-iters", "2", "--eval-interval", "2", "--vocab-size", "257"]
    named = ["--valid", f"books={tmp_path}/books", "--valid", f"code={tmp_path}/code"]
    paths = ["--multiple-validation-sets", "--valid-data-path", f"{tmp_path}/books", f"{tmp_path}/code"]
    found = {}
    for name, world_size, flags in (("a", 1, named), ("b", 2, [*named, "--tp", "2"]), ("c", 2, paths)):
        said = run_forked(world_size, [*sets, *flags, "--save", str(tmp_path / name)], tmp_path / "screen")
        (found[name],) = (each for each in read_records(tmp_path / name / "metrics.jsonl") if "valid_loss" in each)
    assert "valid books after iteration 2 | loss: " in said
    keys = ("valid_loss", "valid_books_loss", "valid_code_loss")
    (alone, tensor, data_parallel) = ([found[run][key] for key in keys] for run in "abc")
    assert tensor == pytest.approx(alone, rel=1e-5) and data_parallel == pytest.approx(alone, rel=1e-5)
    assert min(alone[1:]) < alone[0] < max(alone[1:])
