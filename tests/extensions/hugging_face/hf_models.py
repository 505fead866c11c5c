"""Create tiny random models of each Hugging Face family with transformers. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.extensions import installed

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
BASES: dict[str, dict[str, Any]] = TABLES["bases"] | {"NONE": {}}
SIZES, GPT2_SIZES, MIXTURE, YARN = (BASES[name] for name in ("SIZES", "GPT2_SIZES", "MIXTURE", "YARN"))

NEEDS = (
    *(("axk2", "gated_norms"), ("axk2", "sparse_attention"), ("deepseek", "latent_attention")),
    *(("gemma4", "normed_values"), ("gemma4", "per_layer_embeddings"), ("gemma4", "scaled_layer")),
    *(("qwen3-next", "linear_attention"), ("granite4", "mamba")),
)
"""Pairs (prefix of case names, extension that the models of these cases need)."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (model_type, BASES[base] | changes)
    for name, (model_type, base, changes) in TABLES["cases"].items()
    if all(installed(extension) for start, extension in NEEDS if name.startswith(start))
}
"""Model type and configuration settings of each case. These are the settings of a base in `BASES`, updated with the
changes of the case."""


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Return all tensors in the safetensors files of a folder."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def assert_same_weights(one: Path, two: Path) -> None:
    """Assert that two folders hold the same tensors, byte for byte."""
    expected, found = weights_in(one), weights_in(two)
    assert expected and found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name].flatten().view(torch.uint8), value.flatten().view(torch.uint8)), name


def change_json(path: Path, **values: Any) -> None:
    """Replace entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
