"""An extension with a family of Hugging Face, for tests."""

from dataclasses import replace

from megatron.core.parts import HF_FAMILIES
from megatron.extensions.hugging_face.families import LLAMA, Rule


def _own_name(name: str) -> str:
    return name.replace("model.layers", "model.blocks")


HF_FAMILIES.register(
    "own_family",
    replace(
        LLAMA,
        model_type="own_family",
        architecture="OwnForCausalLM",
        rules=tuple(Rule(rule.ours, tuple(map(_own_name, rule.theirs)), rule.layout) for rule in LLAMA.rules),
    ),
)
