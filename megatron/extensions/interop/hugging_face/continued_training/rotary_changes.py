"""Changes to the rotary embedding and context length in continued training from a Hugging Face folder. This module does
not import torch.

The shapes of the weights do not depend on the rotary embedding or the context length, so a run's flags may differ from
config.json. The run's checkpoints and exports record the new values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.config_json.config_values import whole
from megatron.extensions.interop.hugging_face.config_json.read_rotary import LLAMA3_SCALING, YARN_SCALING
from megatron.extensions.interop.hugging_face.write_config import settings_of
from megatron.training.config.flags import field_table, with_fields
from megatron.training.config.problem import Problem

SCHEMES: Mapping[str, object] = {
    "rope_type": "rope",
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
}
"""Values that disable YaRN, Llama 3.1 scaling and linear interpolation, keyed by the fields that enable them."""

ROTARY_FIELDS = (
    *("rotary_base", "window_rotary_base"),
    *SCHEMES,
    *LLAMA3_SCALING.values(),
    *YARN_SCALING.values(),
    *("mscale", "mscale_all_dim", "yarn_correction_range_round_to_int"),
)
"""Rotary fields that flags may change in continued training."""


def replaced_scaling(model: TransformerConfig, own: Mapping[str, object], given: Collection[str]) -> dict[str, object]:
    """Return the configuration fields that must change because the run's flags select a different rotary scaling than
    the folder's config.json.

    The folder's scaling is disabled, and the new scaling starts from the folder's original context length. `own`
    contains the run's fields. `given` contains the names of the fields that the user set.
    """
    schemes = [field for field in SCHEMES if field in given]
    in_use = {field for field in SCHEMES if (model.yarn if field == "rope_type" else getattr(model, field))}
    fields = {field: value for field, value in SCHEMES.items() if schemes and field in in_use and field not in given}
    originals = {
        "original_max_position_embeddings": own["rope_type"] == "yarn" and not _stretches(model),
        "rope_scaling_original_max_position_embeddings": own["use_rope_scaling"] and not model.use_rope_scaling,
    }
    return fields | {
        field: _original_length(model) for field, new in originals.items() if schemes and new and field not in given
    }


def longest_sequence(
    model: TransformerConfig, own: Mapping[str, object], source: Path, given: Collection[str]
) -> tuple[dict[str, object], list[Problem]]:
    """Check whether the run's sequences are longer than the folder's config.json allows. Return a dict and a list of
    problems. The dict contains the new max_position_embeddings, or is empty if no change is needed. Longer sequences
    are a problem if they exceed the size of a learned position embedding, or if no flag confirms that they are
    intended.

    Args:
        model: Model of the folder.
        own: Configuration fields of the run, by name.
        source: Path of config.json, for messages.
        given: Names of the fields that the user set.
    """
    longest, length = model.max_position_embeddings, whole(own, "seq_length")
    if longest is None or longest >= length or "max_position_embeddings" in given:
        return {}, []
    raised: dict[str, object] = {"max_position_embeddings": length}
    rule = f"is above max_position_embeddings {longest} in {source}"
    if model.position_embedding_type == "learned_absolute":
        return raised, [
            Problem("--seq-length", length, f"{rule}, the number of rows of the learned table", f"nearest: {longest}")
        ]
    if changed_fields(model, own):
        return raised, []
    remedy = f"add --max-position-embeddings {length} to train on longer sequences"
    if model.rotary:
        factor = length / _original_length(model)
        remedy += f", and usually a larger --rotary-base, or --rope-type yarn --rotary-scaling-factor {factor:g}"
    return raised, [Problem("--seq-length", length, rule, remedy)]


def changed_fields(model: TransformerConfig, own: Mapping[str, object]) -> list[str]:
    """Return the names of the rotary fields that change the model's outputs, because their values in `own` differ from
    the folder's model. The list is empty if a value is invalid, because other rules report invalid values.
    """
    try:
        read = settings_of(model).keys() | settings_of(with_fields(model, own)).keys()
    except (ValueError, ArithmeticError, TypeError):
        return []
    return [field for field in ROTARY_FIELDS if field in read and own[field] != getattr(model, field)]


def rotary_notices(model: TransformerConfig, own: Mapping[str, object], source: Path) -> Iterator[str]:
    """Yield a notice that lists the flags whose values differ from config.json, together with both values."""
    changed = changed_fields(model, own)
    before, after = model.max_position_embeddings, own["max_position_embeddings"]
    if before and isinstance(after, int) and after > before:
        changed.append("max_position_embeddings")
    shown = [
        f"{field_table()[field].name} {_shown(field, getattr(model, field))} -> {_shown(field, own[field])}"
        for field in changed
    ]
    if shown:
        yield (
            f"this run changes the positions of {source}: {', '.join(shown)}; checkpoints and exports get the new "
            "values"
        )


def _shown(field: str, value: object) -> str:
    if isinstance(value, bool):
        return "on" if value != field_table()[field].name.startswith("--no-") else "off"
    return f"{value:.15g}" if isinstance(value, float) else "none" if value is None else str(value)


def _stretches(model: TransformerConfig) -> bool:
    return model.yarn and model.rotary_scaling_factor != 1


def _original_length(model: TransformerConfig) -> int:
    """Return the context length for which the model was trained before rotary scaling."""
    if _stretches(model):
        return model.original_max_position_embeddings
    if model.use_rope_scaling:
        return model.rope_scaling_original_max_position_embeddings
    return round(model.max_positions / (model.rotary_seq_len_interpolation_factor or 1))
