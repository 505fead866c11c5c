"""Gradients saved with --save-wgrads-interval are combined from the files of all ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.extensions.interop.megatron_checkpoints.gradient_folder import GradientFolder
from megatron.extensions.interop.megatron_checkpoints.megatron_names import Names, their_shape
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal

MODEL = "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 32 --lr 1e-3 --mock-data "
MODEL += "--untie-embeddings-and-output-weights --disable-bias-linear --swiglu --make-vocab-size-divisible-by 8 "
MODEL += "--train-iters 1"
EXPERTS = "--num-experts 4 --moe-layer-freq [0,1,0,1] --moe-ffn-hidden-size 8"


def writers(tp: int, ep: int, expt_tp: int) -> list[tuple[int, int]]:
    """Return one tuple (TP rank, EP rank) for each rank that writes files. These ranks form the first replica of the
    experts in a pipeline stage."""
    return [(rank % tp, rank // expt_tp % ep) for rank in range(ep * expt_tp)]


def write(folder: Path, metas: dict[str, ParamMeta], sizes: tuple[int, int, int, int]) -> dict[str, Tensor]:
    """Write random gradients of a 4-layer model under the layout (TP, PP, EP, expert TP) as Megatron-LM does."""
    tp, pp, ep, expt_tp = sizes
    whole = {name: torch.randn(meta.global_shape, dtype=torch.float64) for name, meta in metas.items()}
    names = Names(metas.values(), hybrid=False)
    for (tp_rank, ep_rank), pp_rank in product(writers(tp, ep, expt_tp), range(pp)):
        coords = {"tp": (tp_rank, tp), "ep": (ep_rank, ep), "expt_tp": (tp_rank % expt_tp, expt_tp)}
        chunk: dict[str, Tensor] = {}
        for name, meta in metas.items():
            first = 4 // pp * pp_rank
            layer = meta.layer if meta.layer is not None else (0 if name.startswith("embedding.") else 3)
            if not first <= layer < first + 4 // pp:
                continue
            offset, shape = meta.box(coords)
            cut = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            local = re.sub(r"layers\.\d+", f"layers.{layer - first}", next(iter(names.inside(meta))))
            if meta.expert:
                front, linear = re.sub(r"layers\.\d+", f"layers.{layer - first}", name).rsplit("experts.", 1)
                for expert, part in enumerate(whole[name][cut]):
                    key = f"{front}experts.local_experts.{expert}.{linear}"
                    chunk[key] = part.reshape(their_shape(replace(meta, global_shape=shape))[1:]).clone()
            else:
                chunk[local] = whole[name][cut].reshape(their_shape(replace(meta, global_shape=shape))).clone()
        rank = f"mp_rank_{tp_rank:02d}" + f"_{pp_rank:03d}" * (pp > 1) + f"_{ep_rank:03d}" * (ep > 1)
        torch.save({"model_chunk0": chunk}, folder / f"{rank}.pth")
    return whole


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        pytest.param("", (2, 2, 1, 2), id="dense"),
        pytest.param(EXPERTS, (2, 1, 1, 2), id="experts cut by TP"),
        pytest.param(EXPERTS, (2, 1, 2, 2), id="experts cut by TP and EP"),
        pytest.param(f"{EXPERTS} --add-bias-linear", (2, 1, 2, 2), id="experts with biases"),
        pytest.param(EXPERTS, (1, 1, 2, 1), id="experts apart"),
        pytest.param(EXPERTS, (2, 2, 2, 1), id="experts over the ranks of TP"),
        pytest.param(EXPERTS, (2, 1, 4, 1), id="more experts than ranks of TP"),
    ],
)
def test_gradients_of_all_ranks_are_combined(flags: str, sizes: tuple[int, int, int, int], tmp_path: Path) -> None:
    model = resolve_legal(parse_args(f"{MODEL} {flags}".split()), 1).model
    expected = write(tmp_path, {meta.name: meta for meta in stage_metas(model)}, sizes)
    found = GradientFolder(tmp_path, model)
    assert dict.fromkeys(expected, True) == {
        name: torch.equal(found.read(name), grad) for name, grad in expected.items()
    }


def test_a_folder_without_a_dump_is_refused(tmp_path: Path) -> None:
    model = resolve_legal(parse_args(MODEL.split()), 1).model
    with pytest.raises(ValueError, match=r"has no mp_rank_\*.pth of --save-wgrads-interval"):
        GradientFolder(tmp_path, model)
    write(tmp_path, {meta.name: meta for meta in stage_metas(model)}, (2, 1, 1, 2))
    torch.save({"model": {}}, tmp_path / "mp_rank_01.pth")
    with pytest.raises(ValueError, match=r"mp_rank_01.pth contains no gradients"):
        GradientFolder(tmp_path, model)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("mp_rank_00_001", r"mp_rank_00_001 is missing; the sizes in the file names are TP 2, PP 2, EP 1"),
        (
            "mp_rank_01",
            r"model at TP 1, PP 2, EP 1, the sizes in the names mp_rank_00_000, mp_rank_00_001, .* has shape",
        ),
    ],
    ids=["a stage", "a TP rank"],
)
def test_a_missing_file_is_named(lost: str, message: str, tmp_path: Path) -> None:
    model = resolve_legal(parse_args(MODEL.split()), 1).model
    write(tmp_path, {meta.name: meta for meta in stage_metas(model)}, (2, 2, 1, 2))
    for path in tmp_path.glob(f"{lost}*"):
        path.unlink()
    with pytest.raises(ValueError, match=message):
        GradientFolder(tmp_path, model)
