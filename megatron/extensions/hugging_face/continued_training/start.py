"""Loads the weights of a Hugging Face folder, of which each rank reads its own part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dist_checkpointing.path_kind import OURS, kind_of
from megatron.core.dist_checkpointing.state_dict import MODEL, StateDict, load_targets
from megatron.core.dist_checkpointing.storage import on_first_rank
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.extensions.conversion.formats import Options, Origin
from megatron.extensions.hugging_face.folder import HFFolder
from megatron.extensions.hugging_face.hf_format import HFSource, origin_of
from megatron.extensions.hugging_face.read_config import config_from_hf
from megatron.extensions.hugging_face.weights import HFWeights
from megatron.training.checkpoints.checkpointing import (
    Checkpointer,
    Fingerprint,
    ModelLoader,
    no_fingerprint,
    stages_without_weights,
)
from megatron.training.config.run_config import RunConfig
from megatron.training.progress import Progress


def load_start(
    checkpointer: Checkpointer, say: Callable[[str], None] = lambda line: None, data: Fingerprint = no_fingerprint
) -> Progress:
    """Loads the folder in --load into parameters and the optimizer, and returns where the run stands. Collective.

    It has the weights of iteration 0. If --save holds checkpoints already, the run resumes from these, so that the same
    command resumes it; --finetune starts again. Raises ValueError if something does not fit.
    """
    config, world = checkpointer.config, checkpointer.state.world
    options, load = config.checkpoint, config.checkpoint.load
    assert load is not None
    save = options.save
    if save and not options.finetune and on_first_rank(lambda: kind_of(save) in OURS, world):
        resumed = replace(config, checkpoint=replace(options, load=save))
        return replace(checkpointer, config=resumed).load(say, data, f" (--save), not the model in --load {load}")
    depths, origin = load_hf_weights(checkpointer, Path(load))
    if config.model.mtp_depths > depths:
        found = f"{depths} of {config.model.mtp_depths} modules" if depths else "none"
        say(f" multi-token prediction starts with weights of its own: the folder has {found}")
    say(f" loaded weights from {load}: starting at iteration 0 with a fresh optimizer")
    return Progress(data_fingerprint=data(0), origin=asdict(origin))


@torch.no_grad()
def load_hf_weights(checkpointer: Checkpointer, path: Path) -> tuple[int, Origin]:
    """Reads this rank's boxes of all parameters, and of the optimizer's main parameters, from a Hugging Face folder.
    Returns the depths of multi-token prediction that it has, and what checkpoints remember of it."""
    config, state = checkpointer.config, checkpointer.state
    folder = HFFolder(path)
    theirs = config_from_hf(folder.config)
    if theirs.vocab_size != config.model.vocab_size:
        raise ValueError(
            f"--load {path} has a vocabulary of {theirs.vocab_size} tokens, and the run one of "
            f"{config.model.vocab_size} (--vocab-size, or the tokenizer's): give a tokenizer that fits the model"
        )
    weights = HFWeights(folder.tensors, config.model, str(folder.config["model_type"]))
    on_first_rank(weights.check_copies, state.world)
    with checkpointer.optimizer.loading_state() as pieces:
        _read_boxes(weights, load_targets(checkpointer.stages.values(), pieces, state, (), load_optimizer=False))
    return weights.depths, origin_of(folder.config)


def _read_boxes(weights: HFWeights, targets: StateDict) -> None:
    for key, target in targets.items():
        name = key.removeprefix(MODEL)
        for offset, data in target.boxes if name in weights.placements else ():
            box = tuple(slice(start, start + size) for start, size in zip(offset, data.shape, strict=True))
            data.copy_(weights.read(name, box, data.dtype))


@torch.no_grad()
def load_trained_stages(
    path: Path,
    layout_of: Callable[[RunConfig], ModelParallelConfig],
    state: ParallelState,
    device: torch.device | str = "cpu",
    number_format: str | None = None,
) -> tuple[dict[int, GPTModel], RunConfig]:
    """As `megatron.training.checkpoints.checkpointing.load_stages`. Raises ValueError if the folder holds no model that
    can be read."""
    source = HFSource(path, Options())
    on_first_rank(source.check_data, state.world)
    stages = stages_without_weights(source.config, layout_of(source.config), state, device, number_format)
    _read_boxes(source.weights, load_targets(stages.values(), [], state, (), load_optimizer=False))
    return stages, source.config


HF_LOADER = ModelLoader(load_start, load_trained_stages)
