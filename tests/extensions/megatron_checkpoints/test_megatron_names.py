"""Names of parameters in Megatron-LM's checkpoints, and of the files that they are recognized by."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.extensions.interop.megatron_checkpoints.megatron_args import refuse_inexpressible
from megatron.extensions.interop.megatron_checkpoints.megatron_names import (
    WrittenNames,
    find_ways,
    stacked_misfits,
    stacked_ways,
    their_shape,
)
from megatron.training.config.run_config import RunConfig
from tests.gpt_cases import GPT, STYLES
from tests.pure.test_path_kind import LATEST, check_kind


@pytest.mark.parametrize("style", ["gpt", "qwen3", "sinks", "latent", "latent-whole-queries", "multi-token"])
def test_a_written_name_is_found_again(style: str) -> None:
    config = replace(STYLES[style], num_layers=2)
    metas = {meta.name: meta for meta in stage_metas(config)}
    names = WrittenNames(metas, stacked=False)
    written = {names.of(name)[0][0]: their_shape(meta) for name, meta in metas.items()}
    assert len(written) == len(metas)
    ways = find_ways(metas, stacked_ways, written, partial(stacked_misfits, written, config.num_layers))
    assert {each for way in ways.values() for each in way.names} == set(written)


def test_a_sink_has_the_name_it_has_there() -> None:
    ours = "decoder.layers.3.self_attention.core.softmax_offset"
    (name,), layer = WrittenNames([ours], stacked=True).of(ours)
    assert (name, layer) == ("decoder.layers.self_attention.core_attention.softmax_offset", 3)


@pytest.mark.parametrize("files", [f"{LATEST} iter_0000000/mp_rank_00/model_optim_rng.pt", "common.pt metadata.json"])
def test_their_checkpoints_are_recognized_before_ours(tmp_path: Path, files: str) -> None:
    check_kind(tmp_path, files, "", "megatron")


def test_models_that_megatron_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="Megatron-LM has no --scale-word-embeddings, --activation-func geglu"):
        refuse_inexpressible(RunConfig(model=replace(GPT, scale_word_embeddings=True, activation_func="geglu")))
