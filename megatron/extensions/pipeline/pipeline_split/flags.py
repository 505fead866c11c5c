"""Registers the manual division of layers among pipeline stages, and defines its flags. This module does not import
torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import Condition, flag
from megatron.core.config.parallel import STAGE_SPLITS
from megatron.training.extensions import extension_flags

FIRST_LAYERS = "--decoder-first-pipeline-num-layers"
LAYOUT = "--pipeline-model-parallel-layout"
LAST_LAYERS = "--decoder-last-pipeline-num-layers"

FIRST_FIXED = Condition(
    f"{FIRST_LAYERS}: it sets the number of layers at that end",
    lambda config: config.options(SplitFlags).decoder_first_pipeline_num_layers is not None,
)
LAST_FIXED = Condition(
    f"{LAST_LAYERS}: it sets the number of layers at that end",
    lambda config: config.options(SplitFlags).decoder_last_pipeline_num_layers is not None,
)


@extension_flags("layers of pipeline stages", may_change=True, rules=f"{__package__}.rules:problems")
@dataclass(frozen=True)
class SplitFlags:
    pipeline_model_parallel_layout: str | None = flag(
        None,
        excludes=(
            "--num-virtual-stages-per-pipeline-rank",
            "--num-layers-per-virtual-pipeline-stage",
            FIRST_FIXED,
            LAST_FIXED,
            "--account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
        ),
        same_setting_as="num_virtual_stages_per_pipeline_rank",
    )
    """Explicit pipeline stages, such as "Et*3|(tt|)*6t*2L": E is the embedding, t is a layer, m is a multi-token
    prediction module (right before L), and L is the loss. | begins the next stage, and *n repeats a symbol or group.
    The number of stages must be a multiple of PP; the stages are assigned to the pipeline ranks in round-robin
    order."""

    decoder_first_pipeline_num_layers: int | None = flag(None, at_least=0)
    """Number of layers on the first pipeline rank, which divides them among its stages. With zb-v: number of layers in
    the first stage."""

    decoder_last_pipeline_num_layers: int | None = flag(None, at_least=0)
    """Number of layers on the last pipeline rank, which divides them among its stages. With zb-v: number of layers in
    the last stage."""

    account_for_embedding_in_pipeline_split: bool = flag(False, excludes=FIRST_FIXED)
    """Count the embedding as one layer when layers are divided into stages, instead of counting its FLOPs (zero)."""

    account_for_loss_in_pipeline_split: bool = flag(False, excludes=LAST_FIXED)
    """Count the output layer and the loss together as one layer when layers are divided into stages, instead of
    counting their FLOPs."""


STAGE_SPLITS.register(
    "by hand",
    f"{__package__}.split:StagesByHand",
    when=lambda parallel: parallel.options(SplitFlags) != SplitFlags(),
)
