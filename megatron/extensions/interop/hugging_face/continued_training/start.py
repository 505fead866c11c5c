"""Loading of weights from a Hugging Face folder. Each rank reads only the slices of the weights that it stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.dist_checkpointing.path_kind import OURS, kind_of
from megatron.core.dist_checkpointing.state_dict import MODEL, StateDict, load_targets
from megatron.core.dist_checkpointing.storage import on_first_rank
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.extensions.interop.conversion.formats import Options, Origin
from megatron.extensions.interop.conversion.stored_input import local_model
from megatron.extensions.interop.hugging_face.continued_training.new_tokens import (
    NewTokens,
    refused_vocabulary,
    rows_of_tokens,
)
from megatron.extensions.interop.hugging_face.flags import HuggingFaceConfig
from megatron.extensions.interop.hugging_face.folder import HFFolder
from megatron.extensions.interop.hugging_face.hf_format import HFSource, origin_of
from megatron.extensions.interop.hugging_face.read_config import config_from_hf
from megatron.extensions.interop.hugging_face.weights import HFWeights
from megatron.training.checkpoints.checkpointing import (
    Fingerprint,
    RunCheckpoint,
    no_fingerprint,
    stages_without_weights,
)
from megatron.training.config.run_config import RunConfig
from megatron.training.progress import Progress


def load_start(
    checkpoint: RunCheckpoint, say: Callable[[str], None] = lambda line: None, data: Fingerprint = no_fingerprint
) -> Progress:
    """Load the Hugging Face folder in --load into the parameters and the optimizer, and return the run's progress. All
    ranks must call this function.

    The run starts at iteration 0 with the weights of the folder. If --save already contains checkpoints, the run
    resumes from them, so that the same command also resumes an interrupted run. With --finetune, the run always starts
    from the folder. Raises ValueError if the shapes of the weights do not match the run's model.
    """
    config, world = checkpoint.config, checkpoint.state.world
    options, load = config.checkpoint, config.checkpoint.load
    assert load is not None
    save = options.save
    if save and not options.finetune and on_first_rank(lambda: kind_of(save) in OURS, world):
        return checkpoint.resume_from(save, say, data, f" (--save), not the model in --load {load}")
    depths, origin = load_hf_weights(checkpoint, local_model(located(load)), say)
    if config.model.mtp_depths > depths:
        found = f"{depths} of {config.model.mtp_depths} modules" if depths else "none"
        say(f" multi-token prediction modules are initialized: the folder has {found}")
    say(f" loaded weights from {load}: starting at iteration 0 with a fresh optimizer")
    return Progress(data_fingerprint=data(0), origin=asdict(origin))


@torch.no_grad()
def load_hf_weights(checkpoint: RunCheckpoint, path: Path, say: Callable[[str], None]) -> tuple[int, Origin]:
    """Read this rank's shards of all parameters and main parameters from a Hugging Face folder.

    If the run's vocabulary has tokens that the folder lacks, the embedding and output rows of these tokens are
    initialized, and a line is logged. Return the number of multi-token prediction depths in the folder, and the
    `Origin` that the run's checkpoints will record. Raises ValueError if the run's vocabulary is smaller than the
    folder's vocabulary, or if the weights do not match the run's model.
    """
    config, state = checkpoint.config, checkpoint.state
    folder = HFFolder(path)
    model_type, model = str(folder.config["model_type"]), config.model
    theirs, tokens = config_from_hf(folder.config).vocab_size or 0, model.vocab_size or 0
    if tokens < theirs:
        raise ValueError(refused_vocabulary(str(path), theirs, tokens))
    weights = HFWeights(folder.tensors, replace(model, vocab_size=theirs, pad_vocab_size_to=None), model_type)
    on_first_rank(weights.check_copies, state.world)
    new = None
    if tokens > theirs:
        averaged, source = rows_of_tokens(path, theirs)
        drawn = config.options(HuggingFaceConfig).new_token_init == "normal"
        new = NewTokens(weights, tokens, averaged, drawn)
        say(new.described(source))
    with checkpoint.optimizer.loading_state() as pieces:
        _read_boxes(weights, load_targets(checkpoint.stages.values(), pieces, state, (), load_optimizer=False), new)
    return weights.depths, origin_of(folder.config)


def _read_boxes(weights: HFWeights, targets: StateDict, new: NewTokens | None = None) -> None:
    for key, target in targets.items():
        name = key.removeprefix(MODEL)
        for offset, data in target.boxes if name in weights.placements else ():
            if new is not None and new.concerns(name, tuple(target.shape)):
                new.fill(name, (offset, data))
                continue
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
    """Load this rank's pipeline stages of a trained model from a Hugging Face folder. For checkpoints, use
    `megatron.training.checkpoints.checkpointing.load_stages`.

    Raises ValueError if the folder contains no readable model.

    Args:
        path: Hugging Face folder.
        layout_of: Function that returns the parallelism settings for a configuration.
        state: Process groups.
        device: Device of the stages.
        number_format: Number format of the stages; None selects the folder's number format.
    """
    source = HFSource(path, Options())
    on_first_rank(source.check_data, state.world)
    stages = stages_without_weights(source.config, layout_of(source.config), state, device, number_format)
    _read_boxes(source.weights, load_targets(stages.values(), [], state, (), load_optimizer=False))
    return stages, source.config
