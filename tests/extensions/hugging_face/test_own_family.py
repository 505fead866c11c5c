"""A family that a user's extension registers, and what is imported without torch."""

from __future__ import annotations

import subprocess
import sys

from tests.forked import ROOT
from tests.limits import HANG
from tests.pure.test_tree import BLOCK_TORCH

HF_ROUND_TRIP = """
import sys, torch
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.hugging_face.read_config import config_from_hf
from megatron.extensions.hugging_face.write_config import config_to_hf
from tests.extensions.hugging_face.whole_models import from_hf, to_hf
from megatron.core.parallel_state import ParallelState
from megatron.training.extensions import load_extensions
from tests.gpt_cases import LLAMA
load_extensions(sys.argv[1:])
written = config_to_hf(LLAMA, "own_family")
assert written["architectures"] == ["OwnForCausalLM"]
config = config_from_hf(written)
assert config.num_layers == LLAMA.num_layers
model = GPTModel(config, ModelParallelConfig(fp32=True), ParallelState())
parameters = {p.meta.name: p.detach() for p in model.parameters()}
theirs = to_hf(parameters, config, "own_family")
assert "model.blocks.1.self_attn.q_proj.weight" in theirs
back = from_hf(theirs, config, "own_family")
assert back.keys() == parameters.keys()
for name, whole in parameters.items():  # rows that pad the vocabulary are not theirs to keep
    rows = config.vocab_size if len(whole) == config.padded_vocab_size else len(whole)
    assert torch.equal(back[name][:rows], whole[:rows]), name
"""


def test_a_family_of_hugging_face_goes_both_ways() -> None:
    command = [sys.executable, "-c", HF_ROUND_TRIP, str(ROOT / "tests/extensions/hugging_face/own_family.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_flags_are_read_from_a_folder_without_torch() -> None:
    names = [f"megatron.extensions.hugging_face.{name}" for name in ("flags", "rules", "pretrained", "write_config")]
    done = subprocess.run([sys.executable, "-c", BLOCK_TORCH, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
