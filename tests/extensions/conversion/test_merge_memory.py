"""Test that a merge needs memory for only a few tensors, however many checkpoints are merged and however large the
model is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.dist.test_load_memory import CLEAR, give_back_pages, resident
from tests.harness import run_world
from tools import convert_checkpoint, merge_checkpoints

LAYERS, HIDDEN, FFN, VOCAB = 12, 512, 1536, 256
LARGEST = 2 * HIDDEN * FFN * 4
"""Size in bytes of the largest tensor: the fused gate and up projections of a layer in fp32."""

MODEL = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN) * 4
FORMATS = ("dcp", "hf", "megatron")


def save_llama(folder: Path, seed: int) -> None:
    """Save a Llama model as a Hugging Face folder."""
    folder.mkdir()
    noise = torch.Generator().manual_seed(seed)
    shapes = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    shapes |= {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {f"mlp.{name}_proj": (FFN, HIDDEN) for name in ("gate", "up")} | {"mlp.down_proj": (HIDDEN, FFN)}
    names = {f"model.layers.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in shapes.items()}
    names |= {f"{name}.weight": (VOCAB, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    names["model.norm.weight"] = (HIDDEN,)
    save_file(
        {name: torch.randn(shape, generator=noise) for name, shape in names.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    settings = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    settings |= {"num_attention_heads": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    config = {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(settings | config))


def peak(rank: int, world_size: int, inputs: list[Path], output: Path, to: str) -> int:
    """Merge checkpoints, and return how many bytes the merge adds to the peak memory of the process."""
    give_back_pages()
    CLEAR.write_text("5")
    before = resident("VmRSS")
    assert merge_checkpoints.main(["--input", *map(str, inputs), "--output", str(output), "--to", to]) == 0
    return resident("VmHWM") - before


@pytest.mark.skipif(not CLEAR.exists(), reason="the kernel does not tell the peak of a process anew")
def test_a_merge_needs_memory_for_only_a_few_tensors(tmp_path: Path) -> None:
    folders: dict[str, list[Path]] = {name: [tmp_path / f"{name}_{number}" for number in range(6)] for name in FORMATS}
    for number, hf in enumerate(folders["hf"]):
        save_llama(hf, number)
        for name in ("dcp", "megatron") if number < 2 else ():
            words = ["--input", hf if name == "dcp" else folders["dcp"][number], "--output", folders[name][number]]
            assert convert_checkpoint.main([*map(str, words), "--to", name]) == 0
    found: dict[tuple[str, str, int], int] = {}
    for source, to, count in (
        *(("hf", to, count) for to in FORMATS for count in (2, 6)),
        *((source, "dcp", 2) for source in ("dcp", "megatron")),
    ):
        output = tmp_path / f"merged_{source}_{to}_{count}"
        (found[source, to, count],) = run_world(1, peak, folders[source][:count], output, to)
    print({"/".join(map(str, key)): f"{taken / LARGEST:.1f} of the largest" for key, taken in found.items()})
    assert MODEL > 20 * LARGEST
    assert all(taken < MODEL / 2 for taken in found.values()), (found, MODEL)
    for to in FORMATS:
        # The next tensor may already be read while a tensor is written, depending on the load of the machine.
        assert found["hf", to, 6] < found["hf", to, 2] + 2 * LARGEST, (found, LARGEST)
