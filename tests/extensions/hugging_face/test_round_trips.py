"""Test that a folder that is converted to a checkpoint and back keeps its family, token ids and number formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.extensions.interop.conversion.formats import Origin
from megatron.extensions.interop.hugging_face import hf_format
from megatron.extensions.interop.hugging_face.read_config import config_from_hf, unread_keys
from megatron.extensions.interop.hugging_face.write_config import config_to_hf
from tests.extensions.hugging_face import missing_keys, sweep
from tests.extensions.hugging_face.hf_exact import model_with, transformers
from tests.extensions.hugging_face.hf_models import assert_same_weights, weights_in
from tests.extensions.hugging_face.test_missing_keys import FAMILIES
from tools import convert_checkpoint, generate_text


def convert(source: Path, target: Path, *more: str) -> int:
    return convert_checkpoint.main(["--input", str(source), "--output", str(target), *more])


@pytest.mark.parametrize("family", ["opt", "gpt_neox", "phi3", "gptj", "lfm2", "glm_moe_dsa", "qwen3_5_text"])
def test_a_folder_comes_back_as_its_own_family(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exported folder keeps the token ids of config.json even without a tokenizer, and --check fails if logits
    differ."""
    ids = {"bos_token_id": 5, "eos_token_id": 0, "pad_token_id": 7}
    model_with(family, sweep.tiny(family) | ids).float().save_pretrained(tmp_path / "first")
    checked = ["--check", "some text"] if family == "opt" else []
    assert convert(tmp_path / "first", tmp_path / "ours") == 0
    assert convert(tmp_path / "ours", tmp_path / "second", *checked) == 0
    written = json.loads((tmp_path / "second/config.json").read_text())
    assert {key: written[key] for key in ids} == ids and written["model_type"] == family
    assert_same_weights(tmp_path / "first", tmp_path / "second")
    if not checked:
        return
    different = hf_format.LogitDifference(4.6, 10.0, 9)
    monkeypatch.setattr(hf_format, "compare_logits", lambda *_: different)
    assert convert(tmp_path / "ours", tmp_path / "second", "--check", "some text", "--force") == 1
    assert "error: --check: the models differ" in capsys.readouterr().err


RENAMED = ("longcat_flash", "olmo_hybrid", "deepseek_v4", "kimi_linear")


@pytest.mark.parametrize("family", [family for family in RENAMED if family in FAMILIES])
def test_a_folder_that_transformers_saved_survives_a_round_trip(family: str, tmp_path: Path) -> None:
    """The transformers class saves some tensors under different names than in published files, or splits them
    differently. Exports follow the published files. The class can load both kinds of files completely."""
    settings = sweep.tiny(family)
    if family == "olmo_hybrid":
        settings |= {"linear_value_head_dim": 7}
    model = model_with(family, settings).float()
    model.save_pretrained(tmp_path / "first")
    assert convert(tmp_path / "first", tmp_path / "ours") == 0
    assert convert(tmp_path / "ours", tmp_path / "second") == 0
    assert json.loads((tmp_path / "second/config.json").read_text())["model_type"] == family
    back, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second", output_loading_info=True)
    assert not any(told.values()), told
    unused = model.config.n_routed_experts if family == "longcat_flash" else None
    for (name, one), two in zip(model.state_dict().items(), back.state_dict().values(), strict=True):
        used = slice(unused if name.endswith("gate_up_proj") else None)
        assert torch.equal(one[used], two[used]) if one.ndim else torch.equal(one, two), name
        assert used.stop is None or not two[used.stop :].any()


def test_buffers_of_minimax_are_restored(tmp_path: Path) -> None:
    """The restored buffers contain the decay factors of MiniMax's lightning attention. MiniMax's files store these
    buffers in addition to the weights."""
    config = transformers.AutoConfig.for_model("minimax", **sweep.tiny("minimax"))
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "first")
    assert convert(tmp_path / "first", tmp_path / "ours") == 0
    assert convert(tmp_path / "ours", tmp_path / "second", "--max-shard-size", "100KB") == 0
    assert any(name.endswith(".diagonal_decay") for name in weights_in(tmp_path / "second"))
    assert_same_weights(tmp_path / "first", tmp_path / "second")


def test_class_ids_beyond_the_vocabulary_are_ignored() -> None:
    stated = {key: value for key, value in missing_keys.tiny("smollm3").items() if not key.endswith("token_id")}
    assert hf_format.stated_token_ids(stated) == dict.fromkeys(hf_format.TOKEN_IDS)
    assert hf_format.stated_token_ids(missing_keys.tiny("smollm3"))["eos_token_id"] == 2


def test_a_model_that_no_longer_fits_its_family_is_refused() -> None:
    model = config_from_hf(missing_keys.tiny("llama"))
    chosen, notice = hf_format._family_to_write(model, "gpt2", None)
    assert chosen == "llama" and notice is not None and "instead of gpt2, the family of the model's origin" in notice
    assert hf_format._family_to_write(model, "mistral", None) == ("mistral", None)
    chosen, notice = hf_format._family_to_write(model, "pebbles", None)
    assert chosen == "llama" and str(notice).endswith("this family is unknown; add --hf-family FILE")


def test_an_origin_of_wrong_types_is_ignored() -> None:
    """Because a metadata.json file may come from an untrusted source, the types of its values are checked."""
    ids = {"bos_token_id": "x", "eos_token_id": [3, 4], "pad_token_id": -1}
    assert Origin.of({"model_type": ["llama"], "token_ids": ids}) == Origin(None, {"eos_token_id": [3, 4]})
    assert Origin.of({"token_ids": 7}) == Origin()


def test_a_family_can_be_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_with("llama", sweep.tiny("llama")).float().save_pretrained(tmp_path / "first")
    assert convert(tmp_path / "first", tmp_path / "ours") == 0
    for flag in ("--hf-family", "--model-type"):
        assert convert(tmp_path / "ours", tmp_path / flag, flag, "mistral") == 0
        assert json.loads((tmp_path / flag / "config.json").read_text())["model_type"] == "mistral"
    with pytest.raises(ValueError, match="--hf-family: mistrall: is not a Hugging Face family; nearest: mistral;"):
        convert(tmp_path / "ours", tmp_path / "second", "--hf-family", "mistrall")
    with pytest.raises(ValueError, match="--hf-family: llama and qwen2 both select the family of exports; give only"):
        convert(tmp_path / "ours", tmp_path / "second", "--hf-family", "llama", "--hf-family", "qwen2")
    with pytest.raises(ValueError, match="model_type gpt2 cannot have"):
        convert(tmp_path / "ours", tmp_path / "second", "--hf-family", "gpt2")
    with pytest.raises(SystemExit):
        generate_text.main(["--load", str(tmp_path / "first"), "--hf-family", "llama", "--prompt", "5"])
    assert "--hf-family: llama: must be a file NAME.json" in capsys.readouterr().err


def whole_numbers(model_type: str) -> dict[str, Any]:
    """Return a tiny model's config.json in which every factor is a whole number."""
    stated = missing_keys.tiny(model_type)
    factors = {
        key: 1.0
        for key, value in stated.items()
        if key.endswith(("multiplier", "_scale", "_factor")) and type(value) is float
    }
    return missing_keys.whole(model_type, stated | factors)


@pytest.mark.parametrize("families", [["falcon_h1", "granite", "cohere", "minicpm3"], FAMILIES], ids=["some", "every"])
def test_a_written_config_is_accepted_by_the_strict_classes(families: list[str]) -> None:
    refused = {}
    for family in families if families is FAMILIES else [each for each in families if each in FAMILIES]:
        for stated in (missing_keys.tiny(family), whole_numbers(family)):
            try:
                written = config_to_hf(config_from_hf(stated), family)
            except ValueError:
                continue  # the value cannot be expressed in this program's configuration
            try:
                transformers.AutoConfig.for_model(**json.loads(json.dumps(written)))
            except Exception as error:
                refused[family] = str(error)[-300:]
    assert refused == {}


def test_unknown_keys_are_listed() -> None:
    stated = missing_keys.tiny("qwen2")
    assert list(unread_keys(stated)) == []
    (notice,) = unread_keys(stated | {"sliding_windw": 4})
    assert notice == "config.json: qwen2 has no sliding_windw: not read"
