"""Tests of parameter names in Megatron-LM checkpoints, and of the file names that identify a Megatron-LM checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch

from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.extensions.interop.megatron_checkpoints.megatron_args import refuse_inexpressible, unequal_parts
from megatron.extensions.interop.megatron_checkpoints.megatron_names import (
    Names,
    Way,
    find_ways,
    stacked_misfits,
    their_shape,
    with_rows,
)
from megatron.training.config.flags import run_of
from megatron.training.config.run_config import RunConfig
from tests.gpt_cases import GPT, STYLES
from tests.pure.test_path_kind import LATEST, check_kind

FOUND = ["gpt", "qwen3", "sinks", "latent", "latent-whole-queries", "multi-token", "sparse", "delta-net", "mamba"]
FOUND += ["own-widths", "streams", "hybrid-multi-token"]


@pytest.mark.parametrize("style", FOUND)
def test_written_names_are_read_back(style: str) -> None:
    config = STYLES[style]
    metas = {meta.name: meta for meta in stage_metas(config)}
    names = Names(metas.values(), hybrid=config.stated_layers is not None)
    pieces = [piece for meta in metas.values() for piece in names.written(meta, stacked=False)[0]]
    written = {piece.names[0]: piece.shape for piece in pieces}
    assert sum(map(prod, written.values())) == sum(meta.numel for meta in metas.values())
    ways = find_ways(metas, names.ways, written, partial(stacked_misfits, written, config.num_layers))
    assert {each for way in ways.values() for each in way.names} == set(written)


def test_kinds_of_channels_are_separate() -> None:
    """The rows of an input projection of Mamba-2 form two groups. Each group has two channels of x, and one channel
    each for z, B, C and the step size."""
    way = Way(("z", "x", "B", "C", "dt"), kinds=(1, 2, 1, 1, 1))
    tensors = [torch.tensor([rows]).t() for rows in ([0, 6], [1, 2, 7, 8], [3, 9], [4, 10], [5, 11])]
    assert torch.equal(way.whole(tensors, (2, 6, 1)), torch.arange(12).view(2, 6, 1))


def test_attention_sinks_have_megatrons_name() -> None:
    ours = ParamMeta("decoder.layers.3.self_attention.core.softmax_offset", (8,), role="sink")
    (piece,), layer = Names([ours], hybrid=False).written(ours, stacked=True)
    assert (piece.names, layer) == (["decoder.layers.self_attention.core_attention.softmax_offset"], 3)


def test_each_sublayer_of_a_hybrid_model_is_a_layer() -> None:
    ours = [
        f"mtp.layers.1.transformer_layer.{name}" for name in ("self_attention.linear_proj.weight", "mlp.router.weight")
    ]
    metas = [ParamMeta(name, (4, 4), role="hidden") for name in ours]
    pieces = [Names(metas, hybrid=True).written(meta, stacked=False)[0][0] for meta in metas]
    front = "mtp.layers.1.mtp_model_layer.layers"
    assert [piece.names for piece in pieces] == [
        [f"{front}.0.self_attention.linear_proj.weight"],
        [f"{front}.1.mlp.router.weight"],
    ]
    (alone,), _ = Names(metas[1:], hybrid=True).written(metas[1], stacked=False)
    assert alone.names == [f"{front}.0.mlp.router.weight"]


def test_a_token_table_gains_padding_rows() -> None:
    table = torch.tensor([[3, 1], [0, 2]])
    assert torch.equal(with_rows(table, 3), torch.tensor([[3, 1], [0, 2], [0, 0]]))
    assert torch.equal(with_rows(table, 1), table[:1])


def test_expert_biases_have_one_row_per_expert() -> None:
    bias = ParamMeta("decoder.layers.0.mlp.experts.linear_fc1.bias", (4, 2, 6), role="bias", expert=True)
    ways = [way.names for way in Names([bias], hybrid=False).ways(bias)]
    experts = "decoder.layers.0.mlp.experts.experts"
    assert their_shape(bias) == (4, 12)
    assert ("decoder.layers.mlp.experts.experts.linear_fc1.bias",) in ways
    halves = tuple(f"{experts}.{each}.linear_fc1.bias_{half}" for each in range(4) for half in "wv")
    assert halves in ways
    assert not list(stacked_misfits(dict.fromkeys(halves, (6,)), 1, bias, Way(halves)))
    assert len(list(stacked_misfits(dict.fromkeys(halves, (5,)), 1, bias, Way(halves)))) == 8


@pytest.mark.parametrize("files", [f"{LATEST} iter_0000000/mp_rank_00/model_optim_rng.pt", "common.pt metadata.json"])
def test_megatron_checkpoints_are_recognized_before_ours(tmp_path: Path, files: str) -> None:
    check_kind(tmp_path, files, "", "megatron")


UNEQUAL = {
    "streams-mean": "--enable-mhc-connections and --mtp-num-layers",
    "hybrid-multi-token": "whose multi-token prediction modules differ",
    "own-widths": "--ffn-hidden-size-pattern",
}


@pytest.mark.parametrize("style", UNEQUAL)
def test_parameters_without_megatron_names_are_listed(style: str) -> None:
    parts = unequal_parts(run_of(replace(STYLES[style], mtp_num_layers=STYLES[style].mtp_num_layers or 1)))
    assert any(UNEQUAL[style] in part for part in parts)


def test_models_that_megatron_does_not_support_are_refused() -> None:
    with pytest.raises(
        ValueError, match="Megatron-LM does not support --scale-word-embeddings, --activation-func geglu"
    ):
        refuse_inexpressible(RunConfig(model=replace(GPT, scale_word_embeddings=True, activation_func="geglu")))
