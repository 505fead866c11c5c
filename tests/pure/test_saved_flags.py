"""Test that a run that resumes from a checkpoint takes the values of some flags from the configuration in the
checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import values_by_section
from megatron.training.config.saved_flags import changed_fields, with_saved_flags

SAVED = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 8 --swiglu --recompute-granularity full --lr 3e-4 "
    "--min-lr 1e-5 --lr-decay-style cosine --train-iters 500 --weight-decay 0.1 --clip-grad 0.5"
)
ASKS = ["--use-checkpoint-args", "--use-checkpoint-opt_param-scheduler"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    (tmp_path / "iter_0000007").mkdir()
    payload = {"config": values_by_section(parse_args(SAVED.split()))}
    (tmp_path / "iter_0000007" / "metadata.json").write_text(json.dumps(payload))
    return tmp_path


def test_the_model_and_the_schedule_come_from_the_checkpoint(folder: Path) -> None:
    given = parse_args(["--lr", "1", "--hidden-size", "32", "--seq-length", "9", "--load", str(folder), *ASKS])
    config, notes = with_saved_flags(given)
    model, optimizer = config.model, config.optimizer
    assert (model.num_layers, model.hidden_size, model.swiglu) == (6, 64, True)
    taken = optimizer.lr, optimizer.min_lr, optimizer.lr_decay_style, optimizer.weight_decay
    assert taken == (3e-4, 1e-5, "cosine", 0.1)
    assert optimizer.lr_decay_iters == 500  # the decay length is the length of the saved run
    assert model.recompute_granularity == "none" and optimizer.clip_grad == 1.0
    assert "--hidden-size is 64, as in the checkpoint, not 32" in notes
    assert "--lr is 0.0003, as in the checkpoint, not 1.0" in notes


def test_the_tokenizer_comes_from_the_checkpoint_unless_given(tmp_path: Path) -> None:
    """If the original tokenizer files are missing, the run uses the copies that it keeps next to its checkpoints."""
    gone, kept, asks = tmp_path / "gone", tmp_path / "tokenizer", ["--load", str(tmp_path), ASKS[0]]
    kept.mkdir()
    (kept / "tokenizer.json").write_text("{}")
    (kept / "a.model").write_text("")
    for name, path, found in (
        ("HuggingFaceTokenizer", gone, kept),
        ("Llama2Tokenizer", gone / "a.model", kept / "a.model"),
    ):
        saved = parse_args([*SAVED.split(), "--tokenizer-type", name, "--tokenizer-model", str(path)])
        (tmp_path / "metadata.json").write_text(json.dumps({"config": values_by_section(saved)}))
        config, notes = with_saved_flags(parse_args(asks))
        assert (config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model) == (name, str(found))
        why = f"because the path in the checkpoint does not exist: {path}"
        assert notes == [f"--tokenizer-model is {found}, the copy that the run saved, {why}"]
    config, notes = with_saved_flags(parse_args([*asks, "--tokenizer-type", "ByteTokenizer"]))
    assert (config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model) == ("ByteTokenizer", None)
    assert with_saved_flags(parse_args(asks[:2]))[0].tokenizer.tokenizer_type is None


def test_each_flag_restores_its_part_of_the_configuration(folder: Path) -> None:
    given = parse_args(["--lr", "1", "--load", str(folder), ASKS[0]])
    config, _ = with_saved_flags(given)
    assert (config.model.num_layers, config.optimizer) == (6, given.optimizer)
    given = parse_args(["--lr", "1", "--load", str(folder), ASKS[1]])
    config, _ = with_saved_flags(given)
    assert (config.model, config.optimizer.lr) == (given.model, 3e-4)
    assert with_saved_flags(parse_args(["--load", str(folder)]))[1] == []


def test_modules_keep_the_layer_kind_of_the_checkpoint(tmp_path: Path) -> None:
    flags = f"{SAVED} --vocab-size 9 --mtp-num-layers 1 --window-size 4 --window-attn-skip-freq 2".split()
    saved = parse_args([*flags, "--mtp-layer-kind", "last_layer"])
    (tmp_path / "metadata.json").write_text(json.dumps({"config": values_by_section(saved)}))
    config, notes = with_saved_flags(parse_args([*flags, "--load", str(tmp_path)]))
    assert notes == ["--mtp-layer-kind is last_layer, as in the checkpoint, not own_number"]
    assert changed_fields(saved, config, ("model",)) == []
    assert changed_fields(saved, parse_args(flags), ("model",)) == [
        "--mtp-layer-kind last_layer in the checkpoint, own_number in the run"
    ]


def test_without_a_checkpoint_the_flags_apply(tmp_path: Path) -> None:
    given = parse_args(["--lr", "1", "--load", str(tmp_path), *ASKS])
    config, notes = with_saved_flags(given)
    assert config == given and "so the flags apply" in notes[0]
    for damaged in ("{", "[1, 2]", '{"config": {"num_layers": 3}}'):
        (tmp_path / "metadata.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"metadata.json is damaged: it contains no configuration"):
            with_saved_flags(given)


def test_a_damaged_checkpoint_is_skipped(folder: Path) -> None:
    (folder / "iter_0000009").mkdir()
    (folder / "iter_0000009" / "metadata.json").write_text("{")
    (folder / "latest_checkpointed_iteration.txt").write_text("9")
    config, _ = with_saved_flags(parse_args(["--load", str(folder), ASKS[0]]))
    assert config.model.num_layers == 6
