"""Tests of multi-token prediction modules in Hugging Face folders. Losses and gradients equal those of transformers,
and round trips do not change a byte of the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.extensions.interop.conversion.convert import Conversion
from megatron.extensions.interop.conversion.formats import Options
from megatron.extensions.interop.hugging_face.read_config import config_from_hf
from megatron.extensions.interop.hugging_face.weights import HFWeights, multi_token_depths, placements
from megatron.extensions.interop.hugging_face.write_config import config_to_hf
from tests.extensions.hugging_face.hf_exact import exact, random_model, save_model, weights
from tests.extensions.hugging_face.hf_models import CASES, assert_same_weights, weights_in
from tests.extensions.hugging_face.whole_models import from_hf, gradients_of, model_of, there_and_back, to_hf
from tests.gpt_cases import FP64, LLAMA

transformers = pytest.importorskip("transformers")
FACTOR = 0.3


def modules_of(theirs: Any, depths: int) -> Any:
    """Return transformers' draft model, which consists of multi-token prediction modules. The draft model shares the
    embedding and the output layer of `theirs`."""
    from transformers.modeling_layers import MtpModel

    return exact(MtpModel(theirs, depths).double().eval())


def published(module: torch.nn.Module, prefix: str, of: str = "value") -> dict[str, Tensor]:
    """Return the tensors of a module, or their gradients, under the names that transformers expects in files."""
    found = {}
    tensors = {name: p if of == "value" else p.grad for name, p in module.named_parameters()}
    tensors |= dict(module.named_buffers()) if of == "value" else {}
    for name, tensor in tensors.items():
        name = name.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        if name.endswith(("gate_up_proj", "experts.down_proj")):
            base = name.rpartition(".")[0]
            for expert, matrix in enumerate(tensor):
                halves = matrix.chunk(2) if name.endswith("gate_up_proj") else (matrix,)
                for part, half in zip(("gate", "up") if len(halves) > 1 else ("down",), halves, strict=True):
                    found[f"{prefix}{base}.{expert}.{part}_proj.weight"] = half.detach().contiguous()
        elif "rotary" not in name:
            found[prefix + name.replace("shared_head.norm.norm", "shared_head.norm")] = tensor.detach()
    return found


def with_copies(stored: dict[str, Tensor], layers: int, depths: int) -> dict[str, Tensor]:
    """Return the given tensors and copies of the embedding and the output layer. DeepSeek stores these copies in each
    multi-token prediction module."""
    pairs = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    added = {f"model.layers.{layers + d}.{x}": stored[y] for d in range(depths) for x, y in pairs.items()}
    return stored | added


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize(("case", "depths"), [("deepseek-v3", 1), ("glm4-moe", 2)])
def test_losses_gradients_and_files_of_multi_token_modules_match_transformers(case: str, depths: int) -> None:
    theirs, tokens = random_model(case), torch.randint(83, (2, 24))
    model_type, layers = CASES[case][0], theirs.config.num_hidden_layers
    mtp = modules_of(theirs, depths)
    stored = weights(theirs)
    for depth, layer in enumerate(mtp.layers):
        stored |= published(layer, f"model.layers.{layers + depth}.")
    stored = with_copies(stored, layers, depths)
    config = config_from_hf(theirs.config.to_dict())
    assert multi_token_depths(stored, config, model_type) == depths
    config = replace(config, mtp_num_layers=depths, mtp_loss_scaling_factor=FACTOR)
    assert config_to_hf(config, model_type)["num_nextn_predict_layers"] == depths
    read = there_and_back(stored, config, model_type)

    hidden = theirs.model(tokens, use_cache=False).last_hidden_state
    main = F.cross_entropy(theirs.lm_head(hidden[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    further = []
    for depth in range(depths):
        there = tokens[:, depth + 1 :]
        hidden = mtp.forward_layer(
            depth, hidden[:, : there.shape[1]], torch.arange(there.shape[1])[None], None, input_ids=there
        )
        logits, labels = theirs.lm_head(hidden[:, :-1]), tokens[:, depth + 2 :]
        further.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
    s = tokens.shape[1]
    (main + FACTOR / depths * sum(loss * s / (s - k) for k, loss in enumerate(further, 1))).backward()

    mine = model_of(read, config).train()
    ours = to_hf(read | gradients_of(mine, Batch.of_tokens(tokens).with_future(depths)), config, model_type)
    assert mine.mtp is not None
    torch.testing.assert_close(mine.mtp.tally[:, 0], torch.stack(further).detach(), rtol=1e-10, atol=1e-10)
    for depth, layer in enumerate(mtp.layers):
        for name, gradient in published(layer, f"model.layers.{layers + depth}.", of="gradient").items():
            assert (ours[name] - gradient).norm() < 1e-9 * gradient.norm().clamp(min=1e-9), name
    for name in ("model.embed_tokens", "lm_head", "model.norm"):
        gradient = theirs.get_submodule(name).weight.grad
        assert (ours[f"{name}.weight"] - gradient).norm() < 1e-9 * gradient.norm(), name


def test_qwen3_next_modules_keep_their_names() -> None:
    """A round trip of one module does not change a byte. In the files, the weights of the module that are not part of
    its decoder layer have special names. transformers renames the weights of such files in the same way."""
    config = replace(config_from_hf(random_model("qwen3-next").config.to_dict()), mtp_num_layers=1)
    mine = GPTModel(config, FP64, weights=WeightSetup(seed=3))
    parameters = {p.meta.name: p.detach() for p in mine.parameters()}
    stored = to_hf(parameters, config, "qwen3_next")
    around = {name for name in stored if name.startswith("mtp.") and not name.startswith("mtp.layers.0.")}
    assert around == {f"mtp.{x}.weight" for x in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    layer = {name.removeprefix("mtp.layers.0.") for name in stored if name.startswith("mtp.layers.0.")}
    assert layer == {name.removeprefix("model.layers.3.") for name in stored if name.startswith("model.layers.3.")}
    assert multi_token_depths(stored, config, "qwen3_next") == 1
    assert there_and_back(stored, config, "qwen3_next").keys() == parameters.keys()
    with pytest.raises(ValueError, match=r"model_type qwen3_next cannot have mtp.layers.1.enorm.weight"):
        to_hf(parameters, replace(config, mtp_num_layers=2), "qwen3_next")


def test_modules_that_the_model_or_the_folder_lacks_are_handled() -> None:
    config = config_from_hf(random_model("deepseek-v3").config.to_dict())
    one, two = (replace(config, mtp_num_layers=depths) for depths in (1, 2))
    parameters = {p.meta.name: p.detach() for p in GPTModel(two, FP64).parameters()}
    parameters |= {
        f"{name}.router.expert_bias": torch.zeros(8)
        for name in (
            "decoder.layers.1.mlp",
            "decoder.layers.2.mlp",
            *(f"mtp.layers.{d}.transformer_layer.mlp" for d in (0, 1)),
        )
    }
    stored = to_hf(parameters, two, "deepseek_v3")
    assert [HFWeights(stored, c, "deepseek_v3").depths for c in (config, one, two)] == [0, 1, 2]
    without = {
        name: value for name, value in stored.items() if not name.startswith(("model.layers.3", "model.layers.4"))
    }
    assert HFWeights(without, two, "deepseek_v3").depths == 0
    changed = stored | {"model.layers.3.embed_tokens.weight": torch.zeros(83, 32, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"model.layers.3.embed_tokens.weight differs from model.embed_tokens.weight"):
        from_hf(changed, two, "deepseek_v3")
    lacking = {name: value for name, value in stored.items() if name != "model.layers.4.hnorm.weight"}
    with pytest.raises(ValueError, match=r"model.layers.4.hnorm.weight is missing"):
        HFWeights(lacking, two, "deepseek_v3")


def test_folders_with_a_module_survive_a_round_trip(tmp_path: Path) -> None:
    folder = save_model("deepseek-v3", tmp_path / "hf")
    stored, generator = weights_in(folder), torch.Generator().manual_seed(1)
    behind, module = "model.layers.3.", {name: value for name, value in stored.items() if ".layers.2." in name}
    stored |= {name.replace("model.layers.2.", behind): value.clone() for name, value in module.items()}
    for part, shape in {"enorm": (32,), "hnorm": (32,), "eh_proj": (32, 64), "shared_head.norm": (32,)}.items():
        stored[f"{behind}{part}.weight"] = torch.randn(shape, generator=generator)
    stored = {name: value.clone() for name, value in with_copies(stored, 3, 1).items()}
    save_file(stored, folder / "model.safetensors")
    Conversion(folder, tmp_path / "ours", None, Options()).run(1)
    Conversion(tmp_path / "ours", tmp_path / "back", None, Options(family="deepseek_v3")).run(1)
    assert_same_weights(folder, tmp_path / "back")


def test_llama_exports_omit_multi_token_modules() -> None:
    with_modules = replace(LLAMA, mtp_num_layers=1)
    assert config_to_hf(with_modules, "llama") == config_to_hf(LLAMA, "llama")
    assert placements(with_modules, "llama") == placements(LLAMA, "llama")
