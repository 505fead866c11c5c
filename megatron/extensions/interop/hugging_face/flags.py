"""Flags for Hugging Face exports and model families. This module also registers the built-in families,
and Hugging Face folders as path kinds.

This module does not import torch.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.dist_checkpointing.path_kind import LATEST, PATH_KINDS
from megatron.extensions.interop.hugging_face.families import FAMILIES
from megatron.training.extensions import CALLBACKS, extension_flags

CONFIG = "config.json"


@extension_flags("Hugging Face", may_change=True, rules=f"{__package__}.rules:exports")
@dataclass(frozen=True)
class HuggingFaceConfig:
    export_hf_interval: int | None = flag(None, above=0, no_effect_without="--save")
    """Number of iterations between exports of checkpoints to Hugging Face folders. Exports run in the background. This
    number must be a multiple of --save-interval."""

    export_hf_dir: str | None = flag(None, path="stored", writes="folder", no_effect_without="--export-hf-interval")
    """Folder for the exports of --export-hf-interval; default: hf in --save."""

    hf_family: tuple[str, ...] | None = flag(None, path="local", repeats=True)
    """Hugging Face family. FILE.json adds a custom family, whose model_type is the name of the file. NAME selects the
    family of exports. The flag may be given more than once."""

    new_token_init: str = flag("mean", choices=("mean", "normal"), no_effect_without="--load")
    """Initialization of embedding and output rows for tokens that the Hugging Face folder in --load lacks. mean uses
    the mean of the folder's rows. normal draws the rows from the same normal distribution as in a new model."""


PATH_KINDS.register(
    "hugging_face",
    f"{__package__}.path_kind:FOLDER",
    about="is a Hugging Face model",
    order=35,
    loaded_as="the folder of a Hugging Face model",
)
PATH_KINDS.register(
    "hugging_face_exports",
    lambda path: (
        not os.path.exists(os.path.join(path, LATEST))
        and bool(glob.glob(os.path.join(glob.escape(path), "iter_*", CONFIG)))
    ),
    about="contains Hugging Face exports, each in a separate folder",
    order=25,
)
CALLBACKS.register(
    "exports to Hugging Face",
    f"{__package__}.export:HFExports",
    when=lambda config: config.options(HuggingFaceConfig).export_hf_interval is not None,
)

_USUAL = (
    *("gpt2", "bloom", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"),
    *("gemma", "starcoder2", "gpt_neox", "smollm3", "olmo2", "olmo3", "olmoe", "granite"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2", "exaone_moe", "afmoe", "qwen3_next", "apertus"),
    *("bailing_moe", "exaone4", "mimo_v2_flash", "step3p5", "gpt_oss", "gemma2", "gemma3_text", "llama4_text"),
)
"""Families that an export tries first, in this order."""

_FILES = sorted(name[: -len(".json")] for name in os.listdir(os.path.join(os.path.dirname(__file__), "families")))

for _family in dict.fromkeys((*_USUAL, *_FILES)):
    FAMILIES.register(_family, f"{__package__}.family_files:{_family.upper()}")
