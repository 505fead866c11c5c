"""In-memory conversion of whole models between Hugging Face tensors and this program's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta
from megatron.extensions.interop.hugging_face.layouts import Box
from megatron.extensions.interop.hugging_face.weights import HFWeights, copies, placements
from tests.gpt_cases import FP64


def from_hf(state_dict: Mapping[str, Tensor], config: TransformerConfig, model_type: str) -> dict[str, Tensor]:
    """Convert Hugging Face tensors to this program's unsharded parameters, keyed by this program's parameter names.
    Raise ValueError with a list of all mismatches if the tensors do not match."""
    weights = HFWeights(state_dict, config, model_type)
    weights.check_copies()
    return {name: weights.read(name) for name in weights.placements}


def to_hf(parameters: Mapping[str, Tensor], config: TransformerConfig, model_type: str) -> dict[str, Tensor]:
    """Convert this program's unsharded parameters, keyed by name, to Hugging Face tensors. A tied output layer is
    omitted, as in Hugging Face files."""
    found = [*placements(config, model_type), *copies(config, model_type)]
    missing = [each.meta.name for each in found if each.meta.name not in parameters]
    if missing:
        raise ValueError(f"parameters missing: {', '.join(missing)}")
    tensors = dict[str, Tensor]()
    for each in found:
        for name, tensor in zip(each.theirs, each.to_theirs(parameters[each.meta.name]), strict=True):
            tensors[name] = tensors[name] + tensor if name in tensors else tensor
    return tensors


@torch.no_grad()
def copy_shards_(
    parameters: Iterable[Tensor], whole: Mapping[str, Tensor], coords: Mapping[str, tuple[int, int]]
) -> None:
    """Copy the matching shard of the unsharded parameter with the same name into each parameter. Frozen parameters may
    be missing from `whole`."""
    for parameter in parameters:
        meta: ParamMeta = parameter.meta  # type: ignore[attr-defined]
        if meta.name not in whole and not parameter.requires_grad:
            continue
        parameter.copy_(whole[meta.name][shard_of(meta, coords)])


def shard_of(meta: ParamMeta, coords: Mapping[str, tuple[int, int]]) -> Box:
    """Return the index ranges of the parameter that a rank's shard contains."""
    offset, shape = meta.box(coords)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def there_and_back(stored: Mapping[str, Tensor], config: TransformerConfig, model_type: str) -> dict[str, Tensor]:
    """Convert Hugging Face tensors to this program's parameters, and assert that converting the parameters back gives
    bit-identical tensors."""
    read = from_hf(stored, config, model_type)
    back = to_hf(read, config, model_type)
    assert back.keys() == stored.keys()
    for name, value in stored.items():
        assert torch.equal(back[name], value) and back[name].is_contiguous(), name
    return read


def model_of(read: Mapping[str, Tensor], config: TransformerConfig) -> GPTModel:
    """Build an fp64 model for one process, and copy the given parameters into the model."""
    model = GPTModel(config, FP64, weights=WeightSetup(initialize=False)).eval()
    copy_shards_(model.parameters(), read, ParallelState().coords)
    return model


def gradients_of(model: GPTModel, batch: Batch, divisor: Tensor | float = 1.0) -> dict[str, Tensor]:
    """Return the loss gradients, keyed by parameter name, with zeros for parameters without a gradient."""
    (model(None, batch) / divisor).backward()
    return {p.meta.name: torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()}  # type: ignore[attr-defined]
