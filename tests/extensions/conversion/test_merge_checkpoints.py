"""Tests of tools/merge_checkpoints.py: means of checkpoints in every format, the record of a merge, and refused
merges."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.core.dist_checkpointing.file_storage import UrlPath
from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.core.parallel_state import Axis
from megatron.extensions.interop.conversion.convert import recognize
from megatron.extensions.interop.conversion.formats import Options, Source
from megatron.extensions.interop.conversion.merge import _record
from megatron.extensions.interop.conversion.merge_weights import Decay, decay_weights
from megatron.extensions.interop.conversion.merged_source import MergedSource
from megatron.training.checkpoints.loading import choose_checkpoint
from megatron.training.extensions import load_extensions
from tests.apart import ROOT
from tests.extensions.megatron_checkpoints.their_runs import unpack
from tests.forked import run_forked, run_program
from tools import convert_checkpoint, merge_checkpoints
from tools.common import run_tool

MODEL = """--tokenizer-type ByteTokenizer --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --swiglu --cpu --position-embedding-type rope --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --num-workers 0 --mock-data --global-batch-size 4 --eval-iters 2""".split()
RUN = """--train-iters 8 --lr 1e-2 --lr-decay-style WSD --lr-warmup-iters 1 --lr-wsd-decay-iters 2 --save-interval 1
    --eval-interval 100""".split()
FORMATS = ("dcp", "hf", "megatron")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run eight fp32 steps, with learning rate warmup in the first step and decay in the last step. Return the folder
    with the checkpoints of all eight steps."""
    folder = tmp_path_factory.mktemp("runs")
    run_forked(1, [*MODEL, *RUN, "--save", str(folder / "fp32")], folder / "screen")
    return folder / "fp32"


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_forked(1, [*MODEL, *RUN, "--bf16", "--save", str(folder / "bf16")], folder / "screen")
    return folder / "bf16"


@pytest.fixture(scope="module")
def converted(run: Path) -> dict[str, list[Path]]:
    """Return the checkpoints of iterations 4, 5 and 6 in each format. Converted checkpoints do not record their
    iteration."""
    found = {"dcp": [at(run, iteration) for iteration in (4, 5, 6)]}
    for name in ("hf", "megatron"):
        found[name] = [run.parent / name / str(iteration) for iteration in (4, 5, 6)]
        for source, target in zip(found["dcp"], found[name], strict=True):
            words = ["--input", source, "--output", target, "--to", name, "--weights-only"]
            assert convert_checkpoint.main([str(word) for word in words]) == 0
    return found


def at(run: Path, iteration: int) -> Path:
    return run / f"iter_{iteration:07d}"


def merge(*words: object) -> None:
    assert merge_checkpoints.main([str(word) for word in words]) == 0


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run a command that must fail and leave no output. Return the command's error message without the preceding
    notices."""
    with pytest.raises(SystemExit) as error:
        run_tool(lambda: merge_checkpoints.main([str(word) for word in words]))
    assert error.value.code == 2
    return "\n".join(line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: "))


def parameters(folder: Path) -> dict[str, Tensor]:
    """Return the parameters of a model in any format, keyed by this program's parameter names, without vocabulary
    padding."""
    source: Source = recognize(folder).open(folder, Options(weights_only=True))
    tokens = source.config.model.vocab_size
    assert tokens is not None and tokens < source.config.model.padded_vocab_size
    return {name: source.read(name, None)[: tokens if name in VOCABULARY else None] for name in source.metas}


def opened(folder: Path) -> Checkpoint:
    checkpoint = choose_checkpoint(folder, Axis())
    assert checkpoint is not None
    return checkpoint


def assert_mean(found: dict[str, Tensor], models: list[dict[str, Tensor]], weights: list[float]) -> None:
    """Assert that the merged parameters equal a mean computed in fp64. The tolerance allows for the rounding errors of
    an fp32 sum and of one conversion to fp32."""
    assert found.keys() == models[0].keys()
    for name, tensor in found.items():
        terms = torch.stack([weight * model[name].double() for weight, model in zip(weights, models, strict=True)])
        bound = 2.0**-24 * (len(weights) + 2) * terms.abs().sum(0)
        assert tensor.dtype == torch.float32
        assert ((tensor.double() - terms.sum(0)).abs() <= bound).all(), name


def test_the_last_k_checkpoints_are_averaged(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merge("--input", run, "--last", 3, "--output", tmp_path / "out")
    models = [parameters(at(run, iteration)) for iteration in (6, 7, 8)]
    assert_mean(parameters(tmp_path / "out"), models, [1 / 3] * 3)
    assert any(not torch.equal(models[0][name], models[2][name]) for name in models[0])
    out, err = capsys.readouterr()
    assert f"  0.33333333  {at(run, 6)}\n" in out and "the learning rate was not constant from iteration 6 to 8" in err


def test_the_last_stable_k_exclude_the_decay(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Update 7 still uses the peak learning rate, because the decay begins with the next update."""
    merge("--input", run, "--last", 6, "--stable", "--output", tmp_path / "out", "--workers", 2)
    assert_mean(parameters(tmp_path / "out"), [parameters(at(run, each)) for each in range(2, 8)], [1 / 6] * 6)
    assert "note:" not in capsys.readouterr().err
    said = refused(capsys, "--input", run, "--last", 7, "--stable", "--output", tmp_path / "more")
    assert "has 6 checkpoints at the peak learning rate (2, 3, 4, 5, 6, 7); use a lower number" in said


def test_a_decay_is_emulated(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input", run, "--iterations", 2, 5, 7, "--emulate-decay", "minus_sqrt", "--decay-floor", 0.1]
    merge(*words, "--output", tmp_path / "out")
    weights = decay_weights(Decay("minus_sqrt", 0.1), [8, 20, 28], [2, 5, 7])
    assert_mean(parameters(tmp_path / "out"), [parameters(at(run, each)) for each in (2, 5, 7)], weights)
    record = json.loads((tmp_path / "out/merge.json").read_text())
    sources = [
        {"path": str(at(run, each)), "iteration": each, "weight": weight}
        for each, weight in zip((2, 5, 7), weights, strict=True)
    ]
    decay = {"style": "minus_sqrt", "floor": 0.1}
    assert record == {"version": 1, "sources": sources, "emulated_decay": decay, "optimizer_state": False}
    assert opened(tmp_path / "out").payload["merged"] == record
    assert "note: the iterations 2, 5, 7 are not evenly spaced" in capsys.readouterr().err


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_and_written(name: str, to: str, converted: dict[str, list[Path]], tmp_path: Path) -> None:
    weights = [0.5, 0.25, 0.25]
    words = ["--weights", *weights, "--to", to, "--max-shard-size", "20KB", "--workers", 2]
    merge("--input", *converted[name], "--output", tmp_path / "out", *words)
    found = parameters(tmp_path / "out")
    assert_mean(found, [parameters(path) for path in converted["dcp"]], weights)
    merge("--input", *converted["dcp"], "--output", tmp_path / "other", "--weights", *weights)
    assert all(torch.equal(found[key], value) for key, value in parameters(tmp_path / "other").items())
    record = json.loads((tmp_path / "out/merge.json").read_text())
    assert [each["path"] for each in record["sources"]] == [str(path) for path in converted[name]]


def test_formats_may_be_mixed(converted: dict[str, list[Path]], tmp_path: Path) -> None:
    mixed = [converted[name][number] for number, name in enumerate(FORMATS)]
    for output, inputs in (("mixed", mixed), ("ours", converted["dcp"])):
        words = ["--iterations", 4, 5, 6, "--emulate-decay", "linear"]
        merge("--input", *inputs, *words, "--output", tmp_path / output)
    ours = parameters(tmp_path / "ours")
    assert all(torch.equal(ours[name], value) for name, value in parameters(tmp_path / "mixed").items())


def test_a_run_in_16_bits_contributes_its_fp32_weights(half: Path, tmp_path: Path) -> None:
    merge("--input", half, "--iterations", 5, 6, "--output", tmp_path / "out")
    merge("--input", half, "--iterations", 5, 6, "--output", tmp_path / "wide", "--dtype", "float32")
    wide, found, models = parameters(tmp_path / "wide"), parameters(tmp_path / "out"), []
    for checkpoint in (Checkpoint(at(half, 5)), Checkpoint(at(half, 6))):
        models.append({name: checkpoint.read(f"optimizer.main_param.{name}")[: len(wide[name])] for name in wide})
    assert_mean(wide, models, [0.5, 0.5])
    assert all(
        value.dtype == torch.bfloat16 and torch.equal(value, wide[name].bfloat16()) for name, value in found.items()
    )


def test_the_output_has_the_widest_number_format(run: Path, half: Path, tmp_path: Path) -> None:
    merge("--input", at(run, 5), at(half, 5), "--output", tmp_path / "out")
    assert {value.dtype for value in parameters(tmp_path / "out").values()} == {torch.float32}


def test_fp64_is_summed_in_fp64(converted: dict[str, list[Path]], tmp_path: Path) -> None:
    models = []
    for number, path in enumerate(converted["hf"]):
        folder = shutil.copytree(path, tmp_path / str(number))
        tensors = {name: value.double() / 3 for name, value in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        models.append(parameters(folder))
    merge("--input", *(tmp_path / str(number) for number in range(3)), "--output", tmp_path / "out")
    for name, value in parameters(tmp_path / "out").items():
        expected = sum(model[name] / 3 for model in models)
        assert value.dtype == torch.float64 and torch.allclose(value, expected, rtol=1e-14, atol=1e-16), name


def test_the_optimizer_state_is_merged_on_request_and_resumes(run: Path, tmp_path: Path) -> None:
    merge("--input", run, "--iterations", 5, 6, "--optimizer-state", "--output", tmp_path / "out")
    found, sources = opened(tmp_path / "out"), [Checkpoint(at(run, each)) for each in (5, 6)]
    assert found.tensors.keys() == sources[0].tensors.keys()
    for key in found.tensors:
        expected = (sources[0].read(key).double() + sources[1].read(key).double()) / 2
        assert torch.allclose(found.read(key).double(), expected, rtol=1e-6, atol=1e-12), key
    assert found.payload["optimizer"]["step_count"] == 6 and found.payload["consumed_samples"] == 24
    flags = [*MODEL, *RUN, "--load", str(tmp_path / "out"), "--save", str(tmp_path / "on")]
    screen = run_forked(2, [*flags, "--tp", "2"], tmp_path / "screen")
    assert "loaded checkpoint of iteration 6" in screen and at(tmp_path / "on", 8).is_dir()


def losses_of_an_evaluation(merged: Path, folder: Path, ranks: int, *flags: str) -> float:
    words = ["--config", str(merged / "run_config.yaml"), "--load", str(merged), "--save", str(folder), "--skip-train"]
    run_forked(ranks, [*words, *MODEL, *flags], folder.with_suffix(".screen"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (loss,) = [line["valid_loss"] for line in lines if "valid_loss" in line]
    return loss


def test_a_merge_is_evaluated_by_the_usual_commands_under_any_layout(run: Path, tmp_path: Path) -> None:
    merge("--input", run, "--last", 4, "--output", tmp_path / "out")
    one = losses_of_an_evaluation(tmp_path / "out", tmp_path / "one", 1)
    four = losses_of_an_evaluation(tmp_path / "out", tmp_path / "four", 4, "--tp", "2", "--pp", "2")
    assert four == pytest.approx(one, rel=1e-6)
    words = "--prompt abc --max-new-tokens 4 --device cpu".split()
    assert run_program("tools/report.py", tmp_path / "one", "--no-plan", code=0).stdout
    run_program("tools/generate_text.py", "--load", tmp_path / "out", *words, code=0)


# Refusals


def test_missing_or_unequal_inputs_are_refused(
    run: Path, converted: dict[str, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, hf = ["--output", tmp_path / "out"], converted["hf"]
    two, decay = ["--input", at(run, 5), at(run, 6)], ["--emulate-decay", "linear"]
    there = "its checkpoints are 1, 2, 3, 4, 5, 6, 7, 8"
    for words, message in (
        (["--input", run], "a merge needs several checkpoints"),
        (["--input", run, "--iterations", 5, 9, 11], f"has no checkpoint of 9, 11; {there}"),
        (["--input", run, "--last", 9], "has 8 checkpoints; use a lower number"),
        (["--input", run, "--last", 1], "--last 1: must be at least 2"),
        ([*two, "--last", 2], "--last takes the folder of one run, not 2 inputs"),
        ([*two, "--iterations", 5], "--iterations has 1 values for 2 inputs"),
        ([*two, "--iterations", 5, 7], "is of iteration 6, not 7"),
        ([*two, "--weights", 1, 1], "--weights sum to 2, but must sum to 1; give 0.5 0.5, or --allow-unnormalized"),
        ([*two, "--weights", 1], "--weights has 1 values for 2 checkpoints"),
        ([*two, "--weights", 0.5, 0.5, *decay], "--weights and --emulate-decay both give weights"),
        ([*two, "--stable"], "--stable needs --last"),
        ([*two, "--allow-unnormalized"], "--allow-unnormalized needs --weights"),
        ([*two, "--decay-floor", 0.5], "--decay-floor needs --emulate-decay"),
        (["--input", run, "--last", 4, *decay], "was not constant from iteration 5 to 8 (0.01 to 0.00414)"),
        (["--input", at(run, 6), at(run, 5), *decay], "the iterations 6, 5 must increase"),
        (["--input", *hf, *decay], f"--emulate-decay: {hf[0]} does not record its iteration"),
        (["--input", *hf, "--optimizer-state"], f"--optimizer-state: {hf[0]} has no optimizer state"),
        ([*two, "--optimizer-state", "--weights", 2, -1], f"the weight of {at(run, 6)} is negative"),
        (["--input", at(run, 5), tmp_path / "none"], "none is missing"),
        ([*two, "--dtype", "int8"], "'int8' must be one of"),
    ):
        assert message in refused(capsys, *words, *out), words
        assert list(tmp_path.iterdir()) == []


def test_an_output_is_never_replaced(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input", at(run, 5), at(run, 6), "--output", tmp_path / "out"]
    merge(*words)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert refused(capsys, *words) == f"error: --output {tmp_path / 'out'} exists already; choose another folder"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def with_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_another_model_is_refused(
    run: Path, converted: dict[str, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One model has different shapes. Another model has equal shapes, but a different rotary base."""
    other = [*MODEL, *RUN, "--save", str(tmp_path / "wide"), "--hidden-size", "48", "--train-iters", "4"]
    run_forked(1, other, tmp_path / "screen")
    said = refused(capsys, "--input", at(run, 4), at(tmp_path / "wide", 4), "--output", tmp_path / "out")
    assert f"{at(tmp_path / 'wide', 4)} is a different model from {at(run, 4)}: " in said
    assert "has shape [48], not [32]" in said and "more" in said
    theirs = shutil.copytree(converted["hf"][0], tmp_path / "theirs")
    change_json(theirs / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_theta=5e5)
    said = refused(capsys, "--input", at(run, 4), theirs, "--output", tmp_path / "out")
    assert "--rotary-base 10000.0 in iter_0000004, 500000.0 in theirs; merge checkpoints of one model" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "contains NaN"), (float("-inf"), "contains infinite values")]
)
def test_non_finite_tensors_are_named_with_their_source(
    value: float,
    what: str,
    to: str,
    converted: dict[str, list[Path]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = shutil.copytree(converted["hf"][1], tmp_path / "broken")
    with_tensor(
        broken, "model.layers.1.mlp.down_proj.weight", lambda tensor: tensor.index_fill(1, torch.tensor(7), value)
    )
    for workers in (1, 2):
        words = ["--input", converted["dcp"][0], broken, "--output", tmp_path / "out", "--to", to, "--workers", workers]
        said = refused(capsys, *words)
        expected = f"{broken}: decoder.layers.1.mlp.linear_fc2.weight {what}; remove this checkpoint from the merge"
        assert said == f"error: {expected}"
        assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def dies_in_the_middle(words: list[str]) -> None:
    left, original = iter(range(20)), MergedSource.read

    def read(self: MergedSource, *args: Any) -> Tensor:
        if next(left) == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args)

    MergedSource.read = read  # type: ignore[method-assign]
    merge_checkpoints.main(words)


@pytest.mark.parametrize("to", FORMATS)
def test_a_kill_in_the_middle_leaves_nothing_visible(to: str, run: Path, tmp_path: Path) -> None:
    words = ["--input", str(run), "--last", "2", "--output", str(tmp_path / "out"), "--to", to]
    process = mp.get_context("fork").Process(target=dies_in_the_middle, args=(words,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".out.incomplete"]
    merge(*words)
    assert_mean(parameters(tmp_path / "out"), [parameters(at(run, each)) for each in (7, 8)], [0.5, 0.5])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_record_has_no_credentials() -> None:
    load_extensions([str(ROOT / "examples" / "memory_storage.py")])
    path = UrlPath("mem://someone:secret-word@host/run/iter_0000001")
    record = _record([path, Path("runs/b")], [1, None], [0.5, 0.5], None)
    assert "secret-word" not in json.dumps(record) and "host/run/iter_0000001" in json.dumps(record)


def test_expert_biases_are_merged(tmp_path: Path) -> None:
    """Expert biases are states, not parameters. The test merges the biases of a run's checkpoints and the biases of
    checkpoints in Megatron-LM's format."""
    experts = "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    flags = [*MODEL, *RUN, *experts.split(), "--train-iters", "3", "--save", str(tmp_path / "run")]
    run_forked(1, flags, tmp_path / "screen")
    run, megatron = tmp_path / "run", tmp_path / "megatron"
    words = ["--input", str(at(run, 2)), "--output", str(megatron), "--to", "megatron", "--weights-only"]
    assert convert_checkpoint.main(words) == 0
    merge("--input", megatron, at(run, 3), "--weights", 0.25, 0.75, "--output", tmp_path / "out")
    found, sources = opened(tmp_path / "out"), [Checkpoint(at(run, each)) for each in (2, 3)]
    assert found.tensors.keys() == {key for key in sources[0].tensors if key.startswith("model.")}
    biases = [key for key in found.tensors if key.endswith("expert_bias")]
    assert len(biases) == 2 and any(sources[1].read(key).count_nonzero() for key in biases)
    for key in found.tensors:
        expected = 0.25 * sources[0].read(key).double() + 0.75 * sources[1].read(key).double()
        assert torch.allclose(found.read(key).double(), expected, rtol=1e-6, atol=1e-9), key


@pytest.mark.parametrize("name", ["dense", "moe", "legacy_interleaved", "legacy_moe"])
def test_megatron_lm_checkpoints_are_merged(name: str, tmp_path: Path) -> None:
    theirs, ours = unpack(name, tmp_path), tmp_path / "ours"
    assert convert_checkpoint.main(["--input", str(theirs), "--output", str(ours), "--weights-only"]) == 0
    merge("--input", theirs, ours, "--output", tmp_path / "out")
    one, two = opened(ours), opened(tmp_path / "out")
    assert one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(one.read(key), two.read(key)) for key in one.tensors)
