"""Tests of tools/convert_checkpoint.py: conversion in both directions, options, and invalid or malicious inputs."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron.core.dist_checkpointing.integrity import SummedFile
from megatron.extensions.interop.hugging_face import hf_format
from megatron.extensions.interop.hugging_face.folder import HFFolder
from megatron.extensions.interop.hugging_face.safetensors_file import FileTensor, SafetensorsWriter
from tests.extensions.hugging_face.hf_exact import save_model
from tests.extensions.hugging_face.hf_models import assert_same_weights, change_json, weights_in
from tests.forked import run_forked
from tests.pure.test_pickle_calls import LARGE, older
from tools import convert_checkpoint, inspect_checkpoint
from tools.common import run_tool

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama3", tmp_path_factory.mktemp("models") / "llama")


def convert(*words: str | Path) -> None:
    assert convert_checkpoint.main([str(word) for word in words]) == 0


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Run a command that must fail, and return its one-line error message."""
    with pytest.raises(SystemExit) as error:
        run_tool(lambda: convert_checkpoint.main([str(word) for word in words]))
    assert error.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    return line


def test_a_round_trip_in_shards_with_two_workers_is_exact(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--workers", "2", "--max-shard-size", "40KB", "--check", "some text")
    convert("--input", llama, "--output", tmp_path / "ours", *words)
    convert("--input", tmp_path / "ours", "--output", tmp_path / "hf", *words)
    out = capsys.readouterr().out
    found = re.findall(r"largest logit difference over 9 tokens: (\S+) \(largest logit: (\S+)\)", out)
    assert len(found) == 2 and all(float(error) < 1e-5 < float(scale) for error, scale in found), out
    assert_same_weights(llama, tmp_path / "hf")
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights_in(llama).values())
    convert("--input", tmp_path / "hf", "--output", tmp_path / "again", "--workers", "2")
    assert inspect_checkpoint.main([str(tmp_path / "ours"), str(tmp_path / "again")]) == 0


def test_dtype_is_converted_and_bin_files_are_read(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "bin")
    tensors = weights_in(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, part in halves.items():
        torch.save({name: tensors[name] for name in part}, folder / file)
    places = {name: file for file, part in halves.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    convert("--input", folder, "--output", tmp_path / "ours", "--dtype", "bfloat16")
    convert("--input", tmp_path / "ours", "--output", tmp_path / "hf")
    found = weights_in(tmp_path / "hf")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in tensors.items())
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"


TOKENIZER, GENERATION = "tokenizer_config.json", "generation_config.json"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({TOKENIZER: {"pad_token": "<pad>"}}, 3),
        ({TOKENIZER: {"pad_token": {"content": "<pad>"}}, GENERATION: {"pad_token_id": 2}}, 3),
        ({GENERATION: {"pad_token_id": 2}}, 2),
        ({GENERATION: {"pad_token_id": 2}, TOKENIZER: {"pad_token": "<pad>"}}, 3),
        ({TOKENIZER: {"pad_token": "<new>"}}, 4),  # transformers appends the padding token to the vocabulary
        ({}, None),
    ],
    ids=["text", "object", "generation", "both", "added", "none"],
)
def test_the_padding_token_is_kept(llama: Path, tmp_path: Path, files: dict[str, Any], expected: int | None) -> None:
    folder = shutil.copytree(llama, tmp_path / "theirs")
    words = {word: number for number, word in enumerate(("a", "<s>", "</s>", "<pad>"))}
    Tokenizer(WordLevel(words, unk_token="a")).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    convert("--input", folder, "--output", tmp_path / "ours")
    convert("--input", tmp_path / "ours", "--output", tmp_path / "hf")
    written = json.loads((tmp_path / "hf/config.json").read_text())
    assert "pad_token_id" in written and written["pad_token_id"] == expected
    assert transformers.AutoConfig.from_pretrained(tmp_path / "hf").pad_token_id == expected


def test_without_a_tokenizer_exports_do_not_use_the_default_padding_token(tmp_path: Path) -> None:
    """SmolLM3's default padding token, 128004, exceeds the ids of a small vocabulary."""
    folder = save_model("smollm3", tmp_path / "theirs")
    convert("--input", folder, "--output", tmp_path / "ours")
    convert("--input", tmp_path / "ours", "--output", tmp_path / "hf", "--check", "some text")


def test_a_run_starts_from_converted_weights_and_resumes(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    convert("--input", llama, "--output", folder)
    flags = f"""--config {folder}/run_config.yaml --load {folder} --save {folder} --cpu --mock-data --seq-length 16
        --global-batch-size 2 --lr 1e-3 --eval-iters 0 --num-workers 0 --train-iters""".split()
    screen = run_forked(1, [*flags, "2"], tmp_path / "first")
    assert f"loaded weights of iteration 0 from {folder}: starting at iteration 0 with a fresh optimizer" in screen
    assert "no checkpoint" not in screen
    screen = run_forked(2, [*flags, "3", "--tp", "2"], tmp_path / "second")
    assert f"loaded checkpoint of iteration 2 from {folder}: starting at iteration 2" in screen
    assert (folder / "iter_0000003").is_dir()


# Tests of invalid and malicious inputs


Damage = Callable[[Path], object]
SAFE = "model.safetensors"


def config(**values: Any) -> Damage:
    return lambda folder: change_json(folder / "config.json", **values)


def content(change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / SAFE).write_bytes(change((folder / SAFE).read_bytes()))


def overlapping(data: bytes) -> bytes:
    """Return a safetensors file in which two tensors have the same offsets."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first, second = (header[f"model.layers.{layer}.input_layernorm.weight"] for layer in range(2))
    first["data_offsets"] = second["data_offsets"]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def index(place: str, *more: str) -> Damage:
    """Return a function that damages a folder by writing an index file. According to the index, all weights and the
    tensors in `more` are in the file `place`. The weights are actually in shard.safetensors."""

    def damage(folder: Path) -> None:
        shutil.copy(folder / SAFE, folder.parent / "outside.safetensors")
        places = {"weight_map": dict.fromkeys([*more, *weights_in(folder)], place)}
        (folder / SAFE).rename(folder / "shard.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(places))

    return damage


class Attack:
    """Object that runs a command when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder.parent / 'executed'}"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def pickled(save: Callable[[Path, Path], object]) -> Damage:
    """Return a function that damages a folder by replacing the weights with a .bin file. `save` is called with the
    folder and the path of the file, and writes the file."""

    def damage(folder: Path) -> None:
        (folder / SAFE).unlink()
        save(folder, folder / "pytorch_model.bin")

    return damage


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no_layers": (config(num_hidden_layers=4), "model.layers.3.input_layernorm.weight is missing"),
    "fewer_layers": (config(num_hidden_layers=2), "model.layers.2.input_layernorm.weight is unknown"),
    "a_billion_layers": (config(num_hidden_layers=10**9), "config.json has num_hidden_layers = 1000000000, but there"),
    "other_vocabulary": (config(vocab_size=84), "model.embed_tokens.weight of shape [83, 32] do not fit"),
    "other_heads": (config(num_attention_heads=8), "layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj"),
    "layers_in_words": (
        config(num_hidden_layers="three"),
        "num_hidden_layers = 'three' must be a whole number above 0",
    ),
    "scaling_without_factor": (
        config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}, rope_scaling=None),
        "lacks factor",
    ),
    "config_of_brackets": (
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        "config.json cannot be read",
    ),
    "no_weights": (lambda folder: (folder / SAFE).unlink(), "contains no weights"),
    "truncated": (content(lambda data: data[:-1]), "model.safetensors is truncated"),
    "empty_file": (content(lambda data: b""), "is not a safetensors file, or is truncated: it has 0 bytes"),
    "endless_header": (content(lambda data: b"\xff" * 64), "model.safetensors is not a safetensors file"),
    "overlapping": (content(overlapping), "model.safetensors is damaged"),
    "absent_shard": (index("absent.safetensors"), "absent.safetensors is missing; model.safetensors.index.json names"),
    "shard_outside": (index("../outside.safetensors"), "names '../outside.safetensors', which is not a file of this"),
    "index_that_lies": (index("shard.safetensors", "model.extra"), "shard.safetensors lacks model.extra"),
    "pickle_that_executes": (
        pickled(lambda folder, file: torch.save({NORM: Attack(folder)}, file)),
        "pytorch_model.bin is refused, because it is not a plain tensor file: it asks for ",
    ),
    "plain_pickle_that_executes": (
        pickled(lambda folder, file: file.write_bytes(pickle.dumps(Attack(folder)))),
        "pytorch_model.bin is refused, because it is not a plain tensor file: it is damaged or not a torch.save file",
    ),
    "bin_of_bytes_by_a_number": (
        pickled(lambda folder, file: file.write_bytes(older(LARGE["bytes by a number"]))),
        "tensor file: it calls builtins.bytearray with something other than bytes",
    ),
    "bin_without_tensors": (
        pickled(lambda folder, file: torch.save({NORM: "text"}, file)),
        "pytorch_model.bin must contain a dict of names and tensors",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_untrusted_inputs_are_refused_in_one_line(
    damage: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (damaged, message) = shutil.copytree(llama, tmp_path / "model"), DAMAGES[damage]
    damaged(folder)
    before = sorted(tmp_path.iterdir())
    told = refused(capsys, "--input", folder, "--output", tmp_path / "ours")
    assert message in told and "weights_only" not in told and "allowlist" not in told
    assert sorted(tmp_path.iterdir()) == before


def test_weights_named_in_config_json_take_precedence(llama: Path, tmp_path: Path) -> None:
    """As in transformers, config.json may name the weight file. The file may be in the folder or a subfolder, or be an
    index of files in the folder."""
    folder = shutil.copytree(llama, tmp_path / "model")
    (folder / "below").mkdir()
    other = {name: value + 1 for name, value in weights_in(llama).items()}
    save_file(other, folder / "below/other.safetensors", {"format": "pt"})
    save_file(other, folder / "shard.safetensors", {"format": "pt"})
    change_json(folder / "config.json", architectures=["LlamaForCausalLM"])
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, "shard.safetensors")}
    (folder / "below/own.safetensors.index.json").write_text(json.dumps(index))
    for named in ("below/other.safetensors", "below/own.safetensors.index.json", f"{folder}/shard.safetensors"):
        change_json(folder / "config.json", transformers_weights=named)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        found = HFFolder(folder).tensors
        for name, value in other.items():
            assert torch.equal(found[name][()], value) and torch.equal(theirs[name], value), (named, name)
    for named, why in (
        ("../other.safetensors", "must name a file inside the folder"),
        ("pytorch_model.bin", r"must be the name of a file that ends in \.safetensors or \.safetensors\.index\.json"),
        (7, r"must be the name of a file that ends in \.safetensors"),
        ("none.safetensors", "is missing; transformers_weights in config.json names it"),
    ):
        change_json(folder / "config.json", transformers_weights=named)
        with pytest.raises(ValueError, match=why):
            HFFolder(folder)
        with pytest.raises(Exception):  # noqa: B017,PT011 - transformers raises several kinds
            transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_a_single_file_takes_precedence_over_an_index(llama: Path, tmp_path: Path) -> None:
    """As in transformers, an index that an earlier model left in the folder is ignored, whatever files the index
    names."""
    folder = shutil.copytree(llama, tmp_path / "model")
    stale = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(stale))
    convert("--input", folder, "--output", tmp_path / "ours", "--to", "hf")
    assert_same_weights(llama, tmp_path / "ours")


def test_usage_errors_are_explained(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "is missing" in refused(capsys, "--input", tmp_path / "absent", "--output", out)
    assert "is an empty folder; give the folder" in refused(capsys, "--input", tmp_path, "--output", out)
    assert "'2 TB' must be a size" in refused(capsys, "--input", llama, "--output", out, "--max-shard-size", "2 TB")
    assert "'int8' must be one of" in refused(capsys, "--input", llama, "--output", out, "--dtype", "int8")
    assert "contains the input" in refused(capsys, "--input", llama, "--output", llama, "--force")
    assert "exists already" in refused(capsys, "--input", llama, "--output", llama)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("")
    assert "contains no model" in refused(capsys, "--input", llama, "--output", tmp_path / "mine", "--force")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    file = llama / "config.json"
    for bad, why in ((file / "x", f"{file} is a file, not a folder"), (tmp_path / ("x" * 300), "file name too long")):
        said = refused(capsys, "--input", llama, "--output", bad)
        assert why in said and "choose another folder" in said and "Errno" not in said
    convert("--input", llama, "--output", out)
    convert("--input", llama, "--output", out, "--to", "hf", "--force")
    assert_same_weights(llama, out)


@pytest.mark.parametrize("to", ["dcp", "hf"])
def test_a_full_disk_is_reported_in_one_line_and_leaves_no_output(
    to: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummedFile, "write", full)
    monkeypatch.setattr(SafetensorsWriter, "_write", full)
    said = refused(capsys, "--input", llama, "--output", tmp_path / "out", "--to", to)
    assert (
        said == f"error: --output {tmp_path / 'out'} cannot be written: no space left on device; "
        "the partial output was deleted"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_check_without_transformers_is_refused_before_anything_is_written(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_format, "find_spec", lambda name: None)
    said = refused(capsys, "--input", llama, "--output", tmp_path / "ours", "--check", "text")
    assert said == "error: --check needs the package transformers: pip install transformers"
    assert list(tmp_path.iterdir()) == []


def test_a_problem_of_one_worker_is_reported_in_one_line(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FileTensor._read

    def fails(self: FileTensor, *args: Any) -> None:
        if self.shape == (56, 32):
            raise OSError(5, "Input/output error", str(self.path))
        read(self, *args)

    monkeypatch.setattr(FileTensor, "_read", fails)
    for target in ("hf", "dcp"):
        words = ("--input", llama, "--output", tmp_path / "out", "--to", target, "--workers", "2")
        assert "input/output error" in refused(capsys, *words)
        assert list(tmp_path.iterdir()) == []


def dies_in_the_middle(folder: Path, output: Path) -> None:
    left = iter(range(20))
    original = SafetensorsWriter.add

    def add(self: SafetensorsWriter, name: str, tensor: torch.Tensor) -> None:
        if next(left) == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, name, tensor)

    SafetensorsWriter.add = add
    convert_checkpoint.main(["--input", str(folder), "--output", str(output), "--to", "hf"])


def test_a_kill_leaves_no_partial_output(llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "hf"
    process = mp.get_context("fork").Process(target=dies_in_the_middle, args=(llama, output))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not output.exists() and len(list(tmp_path.iterdir())) == 1
    convert("--input", llama, "--output", output, "--to", "hf")
    assert_same_weights(llama, output)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
