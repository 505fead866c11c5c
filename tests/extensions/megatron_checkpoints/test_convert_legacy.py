"""tools/convert_checkpoint.py reads Megatron-LM checkpoints with one file per rank, including checkpoints with old
names and formats. The tool refuses malicious, damaged and incomplete checkpoints."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.extensions.interop.megatron_checkpoints.legacy_states import layout_of
from tests.extensions.megatron_checkpoints.their_runs import Attack, convert, opened, refusal, unpack


@pytest.fixture(params=["legacy_interleaved", "legacy_moe"])
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpack(request.param, tmp_path)


@pytest.fixture
def interleaved(tmp_path: Path) -> Path:
    return unpack("legacy_interleaved", tmp_path)


# Tests that convert other variants of the same checkpoint


def ranks(folder: Path) -> list[Path]:
    found = sorted((folder / "iter_0000002").glob("mp_rank_*/model_optim_rng.pt"))
    assert len(found) == {"legacy_interleaved": 4, "legacy_moe": 8}[folder.name]
    return found


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None], only: slice = slice(None)) -> None:
    for path in ranks(folder)[only]:
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


def same(first: Checkpoint, second: Checkpoint) -> bool:
    assert first.tensors.keys() == second.tensors.keys() and first.tensors
    return all(torch.equal(first.read(key), second.read(key)) for key in first.tensors)


def assert_converts_to_the_same(
    folder: Path, change: Callable[[dict[str, Any]], None], tmp_path: Path, *flags: str
) -> None:
    convert("--input", folder, "--output", tmp_path / "before", *flags)
    rewrite(folder, change)
    convert("--input", folder, "--output", tmp_path / "after", *flags)
    assert same(opened(tmp_path / "before"), opened(tmp_path / "after"))


def renamed(chunk: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    def change(key: str) -> str:
        for old, new in names.items():
            key = key.replace(old, new)
        return key

    return {change(key): value for key, value in chunk.items()}


TE_NAMES = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".0.pre_mlp_layernorm.": ".0.mlp.linear_fc1.layer_norm_",
}


def test_norms_may_be_fused_and_fp8_states_are_left_out(theirs: Path, tmp_path: Path) -> None:
    """Transformer Engine names a norm as part of the following linear layer, and puts the expert number at the end of a
    name."""
    experts = product(range(2), ("linear_fc1.weight", "linear_fc2.weight"))
    names = {f".experts.local_experts.{number}.{linear}": f".experts.{linear}{number}" for number, linear in experts}

    def change(content: dict[str, Any]) -> None:
        for key in [key for key in content if key.startswith("model")]:
            content[key] = renamed(content[key], TE_NAMES | names)
            content[key]["decoder.layers.0.self_attention.linear_qkv._extra_state"] = io.BytesIO(b"scales")
        content["args"].fp8 = "hybrid"

    assert_converts_to_the_same(theirs, change, tmp_path)


def test_experts_stored_in_one_tensor_are_read(tmp_path: Path) -> None:
    """The tensors weight1 [h, experts * 2 ffn] and weight2 [experts * ffn, h] are views. Each of the two underlying
    tensors has the shape [experts, input channels, output channels]."""

    def change(content: dict[str, Any]) -> None:
        model = content["model"]
        for name in [name for name in model if name.endswith(".local_experts.0.linear_fc1.weight")]:
            front = name.removesuffix("local_experts.0.linear_fc1.weight")
            for linear, grouped in (("linear_fc1", "weight1"), ("linear_fc2", "weight2")):
                each = [model.pop(f"{front}local_experts.{expert}.{linear}.weight").t() for expert in range(2)]
                whole = torch.stack(each)
                model[front + grouped] = whole.reshape((8, -1) if grouped == "weight1" else (-1, 8))

    assert_converts_to_the_same(unpack("legacy_moe", tmp_path), change, tmp_path, "--weights-only")


OLD_NAMES = {
    "decoder.": "",
    ".linear_qkv.": ".query_key_value.",
    ".self_attention.linear_proj.": ".self_attention.dense.",
    ".pre_mlp_layernorm.": ".post_attention_norm.",
    ".input_layernorm.": ".input_norm.",
    ".linear_fc1.": ".dense_h_to_4h.",
    ".linear_fc2.": ".dense_4h_to_h.",
    "final_layernorm.": "final_norm.",
}


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
def test_models_older_than_megatron_core_are_read(version: float, interleaved: Path, tmp_path: Path) -> None:
    """Old files contain nested dictionaries and use different parameter names. Before version 2, each rank's q, k and v
    rows also have a different order."""

    def reordered(name: str, value: Tensor) -> Tensor:
        if ".query_key_value." not in name or version >= 2:
            return value
        parts = value.reshape(2, 3, 2, *value.shape[1:])  # each rank has 2 heads with 2 channels each
        return (parts.movedim(1, 0) if version == 0 else parts.movedim(1, 2)).reshape(value.shape)

    def change(content: dict[str, Any]) -> None:
        content.pop("checkpoint_version")
        content |= {"checkpoint_version": version} if version else {}
        for key in [key for key in content if key.startswith("model")]:
            chunk = content[key]
            layers = {name: chunk[name] for name in chunk if name.startswith("decoder.") and chunk[name] is not None}
            embedding = {
                kind: {"weight": chunk[f"embedding.{kind}.weight"]}
                for kind in ("word_embeddings", "position_embeddings")
                if f"embedding.{kind}.weight" in chunk
            }
            encoder = {name: reordered(name, value) for name, value in renamed(layers, OLD_NAMES).items()}
            content[key] = {"language_model": {"embedding": embedding, "encoder": encoder}}

    assert_converts_to_the_same(interleaved, change, tmp_path, "--weights-only")


def in_16_bits(scaled: bool, content: dict[str, Any]) -> None:
    """Store the model in 16 bits, and store its fp32 parameters in the optimizer, group by group."""
    dtype = torch.float16 if scaled else torch.bfloat16
    chunks = [content[key] for key in ("model0", "model1")]
    everything = [value for chunk in chunks for value in chunk.values() if isinstance(value, Tensor)]
    mains = [[value for value in everything if value.dim() == dim] for dim in (2, 1)]
    for chunk in chunks:
        chunk.update({key: value.to(dtype) for key, value in chunk.items() if isinstance(value, Tensor)})
    content["args"].fp16, content["args"].bf16 = scaled, not scaled
    content["optimizer"] = {"optimizer": content["optimizer"], "fp32_from_fp16_params": mains}
    if scaled:
        scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 3, "hysteresis_tracker": 1}
        content["optimizer"]["grad_scaler"] = scaler


@pytest.mark.parametrize("scaled", [False, True])
def test_fp32_parameters_and_the_loss_scale_are_converted(scaled: bool, interleaved: Path, tmp_path: Path) -> None:
    convert("--input", interleaved, "--output", tmp_path / "before")
    rewrite(interleaved, lambda content: in_16_bits(scaled, content))
    convert("--input", interleaved, "--output", tmp_path / "after")
    before, after = opened(tmp_path / "before"), opened(tmp_path / "after")
    for key in before.tensors:
        main = key.replace("model.", "optimizer.main_param.")
        assert torch.equal(after.read(main), before.read(key))
    samples = 4  # Megatron-LM divides the scaled loss by the number of samples per replica
    expected = {"scale": 4096 / samples, "good_steps": 3, "allowance": 1} if scaled else {}
    assert after.payload["optimizer"]["loss_scaler"] == expected
    convert("--input", tmp_path / "after", "--output", tmp_path / "back", "--to", "megatron")
    convert("--input", tmp_path / "back", "--output", tmp_path / "again")
    again = opened(tmp_path / "again")
    assert again.payload["optimizer"] == after.payload["optimizer"]
    assert same(again, after)


def test_fp32_parameters_in_another_order_are_refused(
    interleaved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(content: dict[str, Any]) -> None:
        in_16_bits(False, content)
        mains = content["optimizer"]["fp32_from_fp16_params"][1]
        mains[0], mains[1] = mains[1], mains[0]

    rewrite(interleaved, change)
    assert "the optimizer's fp32 parameters are not in the order of the model" in refusal(interleaved, capsys)
    convert("--input", interleaved, "--output", tmp_path / "ours", "--weights-only")


PLACES = [
    (None, False, [192, 128, 0], 202),
    (70, False, [164, 100, 0], 174),  # the bucket ends with its last parameter, without padding
    (None, True, [192, 128, 0], 202),
]


@pytest.mark.parametrize(("bucket", "apart", "places", "end"), PLACES)
def test_buffer_offsets_match_megatron(bucket: int | None, apart: bool, places: list[int], end: int) -> None:
    assert layout_of([("a", 10), ("b", 64), ("c", 100)], bucket, apart) == (places, end)


def test_tied_embeddings_have_a_separate_bucket() -> None:
    """The other parameters in the buffer end at a multiple of 64. If the embedding did not have a separate bucket, it
    would begin there."""
    assert layout_of([("embedding.word_embeddings.weight", 10), ("b", 70)], None, True) == ([128, 0], 138)


# Attacks and damage


Damage = Callable[[Path], object]


def rewritten(change: Callable[[dict[str, Any]], object], *only: int) -> Damage:
    """Return a function that damages a checkpoint by applying `change` to the content of the files of all ranks, or of
    the ranks `only`."""
    return lambda folder: [rewrite(folder, change, slice(each, each + 1)) for each in only or range(4)]


def of_model(change: Callable[[dict[str, Any]], object], *only: int) -> Damage:
    return rewritten(lambda content: change(content["model0"]), *only)


def of_optimizer(change: Callable[[dict[str, Any]], object]) -> Damage:
    return rewritten(lambda content: change(content["optimizer"]))


def rank_file(number: int, change: Callable[[Path], object]) -> Damage:
    return lambda folder: change(ranks(folder)[number])


def lie(name: str, value: object) -> Damage:
    return rewritten(lambda content: setattr(content["args"], name, value))


def cut_a_shape(content: dict[str, Any]) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    content["model1"][name] = content["model1"][name][:-1]


FC2 = "decoder.layers.0.mlp.linear_fc2"
CASES: dict[str, Damage] = {
    "mp_rank_01_000/model_optim_rng.pt is refused": rewritten(lambda content: content.update(rng_state=Attack()), 2),
    "mp_rank_00_000/model_optim_rng.pt is": rank_file(0, lambda path: path.write_bytes(pickle.dumps(Attack()))),
    "01_001 is missing; the sizes in its arguments are TP 2, PP 2, EP 1": rank_file(
        3, lambda path: shutil.rmtree(path.parent)
    ),
    "mp_rank_01_001/model_optim_rng.pt is missing": rank_file(3, Path.unlink),
    "00_001/model_optim_rng.pt is damaged": rank_file(1, lambda path: os.truncate(path, path.stat().st_size // 2)),
    "decoder.layers.2.mlp.linear_fc1.weight has shape [5, 8] at TP rank 1": rewritten(cut_a_shape, 2),
    f"{FC2}.bias is missing": of_model(lambda model: model.pop(f"{FC2}.bias")),
    f"{FC2}.weight is missing at TP rank 1, EP rank 0": of_model(lambda model: model.pop(f"{FC2}.weight"), 2),
    "adapter.weight is unknown": of_model(lambda model: model.update({"adapter.weight": torch.zeros(2)}), 0),
    "contains a str as adapter": of_model(lambda model: model.update({"adapter": "text"}), 0),
    "is of iteration 7, unlike the others": rewritten(lambda content: content.update(iteration=7), 1),
    "has no arguments (args)": rewritten(lambda content: content.pop("args")),
    "its ranks have 1 to 2 model chunks": rewritten(lambda content: content.pop("model1"), 0),
    "has a state that is a tensor [3]": of_optimizer(lambda states: states["state"][0].update(exp_avg=torch.zeros(3))),
    "a group has": of_optimizer(lambda states: states["param_groups"][0]["params"].pop()),
    "it is in an unknown format": rewritten(lambda content: content.update(optimizer={"state": 3})),
    "is not a rank of TP 1, PP 2, EP 1": lie("tensor_model_parallel_size", 1),
    "mp_rank_02_000 is missing": lie("tensor_model_parallel_size", 10**9),
    "the parallel size pp in its arguments is -1": lie("pipeline_model_parallel_size", -1),
    "its arguments have num_layers 1000000000": lie("num_layers", 10**9),
    "has shape [6, 8] at TP rank 0, EP rank 0, not [10, 8]": lie("ffn_hidden_size", 20),
    "distrib_optim.pt is missing": lie("use_distributed_optimizer", True),
}


@pytest.mark.parametrize("message", CASES)
def test_damage_is_reported_in_one_line(message: str, interleaved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CASES[message](interleaved)
    assert message in refusal(interleaved, capsys)


def buffers(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Return a function that damages a checkpoint by applying `change` to the flat tensors of every buffer on every
    rank."""

    def damage(folder: Path) -> None:
        for path in (folder / "iter_0000002").glob("mp_rank_*/distrib_optim.pt"):
            content = torch.load(path, weights_only=False)
            for each in content:
                for number in [key for key in each or () if isinstance(key, int)]:
                    for kinds in each[number].values():
                        change(kinds)
            torch.save(content, path)

    return damage


def replaced(content: Any) -> Damage:
    return lambda folder: torch.save(content, folder / "iter_0000002/mp_rank_00_000_000/distrib_optim.pt")


BUFFERS: dict[str, Damage] = {
    "elements, but the model has": buffers(
        lambda kinds: kinds.update({kind: value[1:] for kind, value in kinds.items() if isinstance(value, Tensor)})
    ),
    "the optimizer's fp32 parameters are not in the order of the model": buffers(
        lambda kinds: kinds.update(param=kinds["param"].roll(1))
    ),
    "distrib_optim.pt is refused": replaced([Attack()]),
    "stores each bucket separately": replaced({0: {}}),
}


@pytest.mark.parametrize("message", BUFFERS)
def test_mismatched_buffers_are_refused(message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack("legacy_moe", tmp_path)
    BUFFERS[message](folder)
    line = refusal(folder, capsys)
    assert (message in line and "--weights-only" in line) or "is refused" in line
    convert("--input", folder, "--output", tmp_path / "weights", "--weights-only")
