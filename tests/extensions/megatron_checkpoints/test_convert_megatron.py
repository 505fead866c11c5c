"""tools/convert_checkpoint.py reads megatron-core checkpoints. The tool refuses malicious and damaged checkpoints."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.extensions.interop.megatron_checkpoints.common_state import load_common
from megatron.training.checkpoints.checkpointing import load_whole_model
from tests.extensions.megatron_checkpoints.their_runs import (
    Attack,
    convert,
    loss_of,
    losses_of_a_run,
    of_their_run,
    opened,
    refusal,
    unpack,
)
from tests.forked import run_forked
from tests.pure.test_pickle_calls import LARGE, older

RUNS = {
    **dict.fromkeys(("dense", "moe"), "--pp 2"),
    **dict.fromkeys(("legacy_interleaved", "legacy_moe"), "--tp 2 --sequence-parallel --lr-decay-iters 13"),
    **dict.fromkeys(("deepseek", "hybrid"), "--tp 2 --sequence-parallel"),
}
"""Layout flags with which a run resumes from each checkpoint. The legacy checkpoints have one file per rank. One legacy
checkpoint contains a GPT-2 model with tied embeddings, trained with the plain optimizer under TP 2 and PP 2, with two
model chunks per rank. The other legacy checkpoint, from a run under TP 2 and EP 2, has experts in two of three layers,
stages of two layers and one layer, and distrib_optim.pt."""


@pytest.fixture(params=["dense", "moe", "deepseek", "hybrid"])
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpack(request.param, tmp_path)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return unpack("dense", tmp_path)


@pytest.mark.parametrize("name", RUNS)
def test_the_run_resumes_at_its_position_with_the_same_losses(name: str, tmp_path: Path) -> None:
    """The fourth loss depends on the update of the third step, and therefore on Adam's moments, the step count and the
    learning rate. The learning rate is still warming up in the legacy checkpoints."""
    convert("--input", unpack(name, tmp_path), "--output", tmp_path / "ours")
    expected = of_their_run(name)
    assert loss_of(tmp_path / "ours", expected["tokens"][2]) == pytest.approx(expected["losses"][2], abs=1e-6)
    checkpoint = opened(tmp_path / "ours")
    assert checkpoint.folder.name == "iter_0000002"
    payload = checkpoint.payload
    assert (payload["iteration"], payload["consumed_samples"], payload["optimizer"]["step_count"]) == (2, 8, 2)
    assert payload["scheduled_samples"] == 8
    parameters = [key.removeprefix("model.") for key in checkpoint.tensors if key.startswith("model.")]
    for each in (name for name in parameters if not name.endswith("expert_bias")):
        assert checkpoint.read(f"optimizer.exp_avg_sq.{each}").amin() >= 0
        assert checkpoint.read(f"optimizer.exp_avg.{each}").abs().amax() > 0
    found = losses_of_a_run(name, tmp_path / "ours", tmp_path, *RUNS[name].split())
    assert found == {step: pytest.approx(expected["losses"][step - 1], abs=1e-6) for step in (3, 4)}


def test_weights_only_conversion_drops_padding_and_gives_a_release(dense: Path, tmp_path: Path) -> None:
    convert("--input", dense, "--output", tmp_path / "ours", "--weights-only")
    checkpoint = opened(tmp_path / "ours")
    assert checkpoint.payload["iteration"] == 0 and not any(key.startswith("optimizer.") for key in checkpoint.tensors)
    assert load_whole_model(tmp_path / "ours")[1].model.vocab_size == 13
    convert("--input", tmp_path / "ours", "--output", tmp_path / "back", "--to", "megatron")
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "release"
    convert("--input", tmp_path / "back", "--output", tmp_path / "again", "--weights-only")
    name = "model.embedding.word_embeddings.weight"
    assert torch.equal(opened(tmp_path / "again").read(name), checkpoint.read(name))


def test_round_trip_keeps_every_tensor_and_state(theirs: Path, tmp_path: Path) -> None:
    convert("--input", theirs, "--output", tmp_path / "ours")
    convert("--input", tmp_path / "ours", "--output", tmp_path / "back", "--to", "megatron", "--workers", "2")
    before, after = (Checkpoint(folder / "iter_0000002") for folder in (theirs, tmp_path / "back"))
    assert before.payload == after.payload
    for key, info in before.tensors.items():
        assert after.tensors[key].shape == info.shape
        assert torch.equal(before.read(key), after.read(key)), key
    objects = {key for key in before.index.state_dict_metadata if key not in before.tensors}
    assert objects <= after.index.state_dict_metadata.keys()
    common = [load_common(folder / "iter_0000002" / "common.pt") for folder in (theirs, tmp_path / "back")]
    for key in ("iteration", "checkpoint_version"):
        assert common[0][key] == common[1][key]
    schedule = common[1]["opt_param_scheduler"]
    assert (schedule["num_steps"], schedule["max_lr"], schedule["wd_incr_style"]) == (8, 0.01, "constant")
    convert("--input", tmp_path / "back", "--output", tmp_path / "again")
    first, again = opened(tmp_path / "ours"), opened(tmp_path / "again")
    assert first.payload["config"]["model"] == again.payload["config"]["model"]
    assert first.tensors.keys() == again.tensors.keys()
    assert all(torch.equal(first.read(key), again.read(key)) for key in first.tensors)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_that_older_versions_flattened_are_read(dense: Path, tmp_path: Path) -> None:
    """The test writes blocks [layers, 2, 1, elements of a block] for TP 2, as older versions did."""
    folder = dense / "iter_0000002"
    whole = Checkpoint(folder)
    name = "decoder.layers.self_attention.linear_qkv.weight"
    old: dict[str, Tensor] = {}
    for key in whole.tensors:
        value = whole.read(key)
        old["chained_0." + key if key.startswith("optimizer.") else key] = value
    key = f"chained_0.optimizer.state.exp_avg.{name}"
    shape = tuple(old[key].shape)
    old[key] = old[key].reshape(shape[0], 2, 1, -1)
    shutil.move(folder / "common.pt", tmp_path)
    shutil.rmtree(folder)
    dcp.save(old, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    shutil.move(tmp_path / "common.pt", folder)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))

    def say_shape(index: Metadata) -> None:
        index.mcore_data = {key: {"nd_reformulated_orig_global_shape": shape}}  # type: ignore[attr-defined]

    change_index(folder, say_shape)
    convert("--input", dense, "--output", tmp_path / "old")
    found = opened(tmp_path / "old").read("optimizer.exp_avg.decoder.layers.1.self_attention.linear_qkv.weight")
    assert torch.equal(found.flatten(), old[key][1].flatten())


def test_a_decoupled_learning_rate_is_converted(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lie("decoupled_lr", 0.02)(dense / "iter_0000002")
    convert("--input", dense, "--output", tmp_path / "ours")
    convert("--input", tmp_path / "ours", "--output", tmp_path / "back", "--to", "megatron")
    common = load_common(tmp_path / "back" / "iter_0000002" / "common.pt")
    groups = common["optimizer"]["optimizer"]["param_groups"]
    found = [(each["wd_mult"], each["is_decoupled_lr"], each["max_lr"], each["step"]) for each in groups]
    assert found == [(1.0, False, 0.01, 2), (1.0, True, 0.02, 2), (0.0, False, 0.01, 2), (0.0, True, 0.02, 2)]
    assert "note: --decoupled-lr" in capsys.readouterr().err


def test_states_of_muon_are_refused(dense: Path, tmp_path: Path) -> None:
    convert("--input", dense, "--output", tmp_path / "ours", "--weights-only")
    flags = ["--config", tmp_path / "ours/run_config.yaml", "--load", tmp_path / "ours", "--save", tmp_path / "run"]
    flags += "--optimizer muon --mock-data --train-iters 1 --cpu --eval-iters 0 --num-workers 0".split()
    run_forked(1, [str(flag) for flag in flags], tmp_path / "screen")
    with pytest.raises(
        ValueError, match=r"momentum_buffer for some parameters but not for embed.+as with --optimizer muon"
    ):
        convert("--input", tmp_path / "run", "--output", tmp_path / "back", "--to", "megatron")
    convert("--input", tmp_path / "run", "--output", tmp_path / "back", "--to", "megatron", "--weights-only")


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:999])


def lie(name: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        common = torch.load(folder / "common.pt", weights_only=False)
        setattr(common["args"], name, value)
        torch.save(common, folder / "common.pt")

    return change


def save_by_buckets(folder: Path) -> None:
    """Set the optimizer's state format in a checkpoint to dp_reshardable, and remove the optimizer's tensors from the
    checkpoint, so that only the model's tensors remain."""
    common = torch.load(folder / "common.pt", weights_only=False)
    common["optimizer"]["param_state_sharding_type"] = "dp_reshardable"
    torch.save(common, folder / "common.pt")

    def drop_optimizer(index: Metadata) -> None:
        kept = {key: value for key, value in index.state_dict_metadata.items() if not key.startswith("optimizer.")}
        index.state_dict_metadata = kept

    change_index(folder, drop_optimizer)


def change_index(folder: Path, change: Callable[[Metadata], None]) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def blocks(*attentions: dict[str, object], **mlp: object) -> str:
    """Return the JSON text that describes the shapes of the layers. Layers that do not state a number of query groups
    have two query groups."""
    layers = [{"attention": {"num_query_groups": 2} | each, "mlp": mlp} for each in attentions]
    return json.dumps({"block_configs": layers})


CASES: dict[str, Callable[[Path], object]] = {
    "its optimizer state is in dp_reshardable": save_by_buckets,
    "common.pt is refused": lambda folder: torch.save({"args": Attack()}, folder / "common.pt"),
    "is not a readable checkpoint: UnpicklingError": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Attack()))
    ),
    "__1_0.distcp": lambda folder: (folder / "__1_0.distcp").unlink(),
    "cannot load checkpoint": cut("__0_0.distcp"),
    "is not a readable checkpoint": cut(".metadata"),
    "common.pt is refused: it calls builtins.bytearray": lambda folder: (folder / "common.pt").write_bytes(
        older(LARGE["bytes by a number"])
    ),
    "common.pt is damaged": cut("common.pt"),
    "common.pt is missing": lambda folder: (folder / "common.pt").unlink(),
    "has shape [2, 24, 8], not [2, 40, 8]": lie("ffn_hidden_size", 20),
    "decoder.layers.0.mlp.router.weight is missing": lie("num_experts", 4),
    "muP": lie("use_mup", True),
    "layers with [1, 2] query groups": lie(
        "heterogeneous_layers_config_encoded_json", blocks({}, {"num_query_groups": 1})
    ),
    "layers without attention or without an MLP": lie(
        "heterogeneous_layers_config_encoded_json", blocks({"no_op": True})
    ),
    "cannot be read (JSONDecodeError)": lie("heterogeneous_layers_config_encoded_json", "{"),
    "has shape [2, 24, 8], not [2, 1024, 8]": lie(
        "heterogeneous_layers_config_encoded_json", blocks({}, {}, ffn_mult=90.0)
    ),
    "position_embedding_type mrope": lie("position_embedding_type", "mrope"),
    "hybrid_layer_pattern MW: layers W": lie("hybrid_layer_pattern", "MW"),
    "its argument hidden_size is a Tensor": lie("hidden_size", torch.zeros(1)),
}


@pytest.mark.parametrize("message", CASES)
def test_damage_is_reported_in_one_line_and_leaves_no_output(
    message: str, dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CASES[message](dense / "iter_0000002")
    assert message in refusal(dense, capsys)
