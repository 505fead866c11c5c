"""Names of parameters in Megatron-LM's checkpoints, and of the files that they are recognized by."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch

from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.extensions.interop.megatron_checkpoints.megatron_args import refuse_inexpressible
from megatron.extensions.interop.megatron_checkpoints.megatron_names import (
    Names,
    Way,
    find_ways,
    stacked_misfits,
)
from megatron.training.config.run_config import RunConfig
from tests.gpt_cases import GPT, STYLES
from tests.pure.test_path_kind import LATEST, check_kind

FOUND = ["gpt", "qwen3", "sinks", "latent", "latent-whole-queries", "multi-token", "sparse", "delta-net", "mamba"]


@pytest.mark.parametrize("style", FOUND)
def test_a_written_name_is_found_again(style: str) -> None:
    config = STYLES[style]
    metas = {meta.name: meta for meta in stage_metas(config)}
    names = Names(metas.values(), hybrid=config.stated_layers is not None)
    pieces = [piece for meta in metas.values() for piece in names.written(meta, stacked=False)[0]]
    written = {piece.names[0]: piece.shape for piece in pieces}
    assert sum(map(prod, written.values())) == sum(meta.numel for meta in metas.values())
    ways = find_ways(metas, names.ways, written, partial(stacked_misfits, written, config.num_layers))
    assert {each for way in ways.values() for each in way.names} == set(written)


def test_kinds_of_channels_are_apart() -> None:
    """Of two groups with one channel of z, two of x, and one of B, C and the step size each."""
    way = Way(("z", "x", "B", "C", "dt"), kinds=(1, 2, 1, 1, 1))
    tensors = [torch.tensor([rows]).t() for rows in ([0, 6], [1, 2, 7, 8], [3, 9], [4, 10], [5, 11])]
    assert torch.equal(way.whole(tensors, (2, 6, 1)), torch.arange(12).view(2, 6, 1))


def test_a_sink_has_the_name_it_has_there() -> None:
    ours = ParamMeta("decoder.layers.3.self_attention.core.softmax_offset", (8,), role="sink")
    (piece,), layer = Names([ours], hybrid=False).written(ours, stacked=True)
    assert (piece.names, layer) == (["decoder.layers.self_attention.core_attention.softmax_offset"], 3)


@pytest.mark.parametrize("files", [f"{LATEST} iter_0000000/mp_rank_00/model_optim_rng.pt", "common.pt metadata.json"])
def test_their_checkpoints_are_recognized_before_ours(tmp_path: Path, files: str) -> None:
    check_kind(tmp_path, files, "", "megatron")


def test_models_that_megatron_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="Megatron-LM has no --scale-word-embeddings, --activation-func geglu"):
        refuse_inexpressible(RunConfig(model=replace(GPT, scale_word_embeddings=True, activation_func="geglu")))
