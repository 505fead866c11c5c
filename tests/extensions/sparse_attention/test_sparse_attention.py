"""Tests that compare sparse attention with dense attention that masks all keys that were not selected. The tests also
cover the loss of the indexer, ties between scores, and saved tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.attention.tiles import rank_spans
from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.core.transformer.rotary import apply_rotary_interleaved
from megatron.extensions.attention.latent_attention.multi_latent_attention import Latents, MultiLatentAttention
from megatron.extensions.attention.sparse_attention import selection, sparse_attention
from megatron.extensions.attention.sparse_attention.hooks import IndexerTallies
from megatron.extensions.attention.sparse_attention.selection import chunks_of, largest
from megatron.testing.local_run import local_run
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import named_value, values_by_section, with_fields
from megatron.training.config.saved_flags import with_saved_flags
from megatron.training.config.validation import resolve
from megatron.training.progress import Interval
from megatron.training.train_step import train_step
from tests.extensions.planner.test_planned_activations import kept_in_bf16
from tests.gpt_cases import FP64, model_of, packed_documents, random_batch
from tests.harness import run_world
from tests.tiny import TINY

SPARSE, IN_SOME = model_of("sparse"), model_of("sparse-in-some")
COEFF, SCALE = 0.7, 1.3


def literal(layer: Any, x: Tensor, context: BatchContext, sparse_loss: bool, topk: int) -> tuple[Tensor, Tensor]:
    """Compute the output of a layer with dense attention and a mask. The mask is computed by sorting the scores in
    Python. Return the output and the sum of the indexer's divergences."""
    whole = MultiLatentAttention._latents(layer, x)
    q, k, v = MultiLatentAttention._heads(layer, Latents(*whole), context)
    (s, b, *_), indexer = q.shape, layer.indexer
    tables = context.rotary[layer.rotation]
    norm, of_x, latent = indexer.k_norm, x.detach(), whole.q.detach()
    index_q = (latent @ indexer.linear_wq_b.weight.t()).unflatten(-1, (indexer.heads, -1))
    index_k = F.layer_norm(of_x @ indexer.linear_wk.weight.t(), norm.shape, norm.weight, norm.bias, norm.eps)
    index_q = apply_rotary_interleaved(index_q, *tables)
    index_k = apply_rotary_interleaved(index_k.unsqueeze(2), *tables).squeeze(2)
    products = F.relu(torch.einsum("ibhd,jbd->bhij", index_q, index_k)) * indexer.width**-0.5
    weights = of_x @ indexer.linear_weights_proj.weight.t() * indexer.heads**-0.5
    index = torch.einsum("bhij,ibh->bij", products, weights)
    seen = torch.ones(s, s, dtype=torch.bool).tril().repeat(b, 1, 1)
    for sample, starts in enumerate(context.documents or ()):
        for start, stop in pairwise((*starts, s)):
            seen[sample, start:stop, :start] = False
    chosen = torch.zeros_like(seen)
    for sample in range(b):
        for query in range(s):
            scores = index[sample, query].tolist()
            keys = sorted(seen[sample, query].nonzero().flatten().tolist(), key=lambda key: (-scores[key], -key))
            chosen[sample, query, keys[:topk]] = True
    every = torch.einsum("ibhd,jbhd->bhij", q, k) * layer.core.scale
    attended = every.masked_fill(~chosen[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("bhij,jbhd->ibhd", attended, v).flatten(2) @ layer.linear_proj.weight.t()
    compared = chosen if sparse_loss else seen
    target = every.detach().masked_fill(~compared[:, None], -torch.inf).softmax(-1).mean(1)
    logs = index.masked_fill(~compared, -torch.inf).log_softmax(-1).masked_fill(~compared, 0.0)
    return out, (torch.xlogy(target, target) - target * logs).sum()


def layer_and_context(config: TransformerConfig, packed: bool, number: int = 0) -> tuple[Any, Tensor, BatchContext]:
    more = packed_documents(config) if packed else {}
    batch = random_batch(config, **more).local_to(ParallelState().cp)
    model = GPTModel(config, FP64).train()
    generator = torch.Generator().manual_seed(1)
    layer: Any = model.decoder.layers[number].self_attention
    for parameter in layer.parameters():  # change the initial values, so that the scores differ
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x = torch.randn(config.seq_length, 3, config.hidden_size, generator=generator, dtype=torch.float64)
    context = model.decoder._complete(BatchContext.of(batch), x)
    return layer, x.requires_grad_(), replace(context, aux_scale=torch.tensor(SCALE, dtype=torch.float64))


def check_layer(layer: Any, x: Tensor, context: Any, expected: Tensor, loss: Tensor, count: int) -> None:
    """Assert that outputs, gradients and the indexer's loss equal those of a plain implementation. The loss is a sum
    over `count` tokens."""
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    inputs = dict(layer.named_parameters()) | {"x": x}
    names = [name for name in inputs if "indexer" not in name]
    wanted = dict(zip(names, torch.autograd.grad((expected * weights).sum(), [inputs[n] for n in names]), strict=True))
    if len(names) < len(inputs):
        names = [name for name in inputs if "indexer" in name]
        of_loss = torch.autograd.grad(loss, [inputs[n] for n in names])
        wanted |= {name: COEFF * SCALE * grad for name, grad in zip(names, of_loss, strict=True)}
    found = layer(x, context)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (found * weights).sum().backward()
    for name, tensor in inputs.items():
        assert (tensor.grad - wanted[name]).norm() <= 1e-9 * wanted[name].norm(), name
    torch.testing.assert_close(layer.core.tally, torch.stack((loss.detach(), torch.tensor(float(count)).double())))


@pytest.mark.parametrize("recompute", [None, "core_attn", "mla_up_proj"])
@pytest.mark.parametrize("sparse_loss", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("chunk", "topk"), [(1, 5), (600, 5), (2**25, 5), (600, 16)])
def test_gradients_match_the_dense_formula_with_a_mask(
    recompute: str | None, sparse_loss: bool, packed: bool, chunk: int, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If 16 keys are selected, each query of a sequence of 16 tokens attends to all keys that the causal mask allows,
    as in multi-latent attention."""
    monkeypatch.setattr(sparse_attention, "CHUNK", chunk)
    options = {"dsa_indexer_loss_coeff": COEFF, "dsa_indexer_use_sparse_loss": sparse_loss, "dsa_indexer_topk": topk}
    config = with_fields(SPARSE, options)
    if recompute:
        config = replace(config, recompute_granularity="selective", recompute_modules=(recompute,))
    layer, x, context = layer_and_context(config, packed)
    expected, loss = literal(layer, x, context, sparse_loss, topk)
    check_layer(layer, x, context, expected, loss, 48)


@pytest.mark.parametrize(("sparse", "dense"), [("sparse", "latent"), ("sparse-in-some", "latent-whole-queries")])
def test_selecting_all_keys_is_multi_latent_attention(sparse: str, dense: str) -> None:
    config = with_fields(model_of(sparse), {"dsa_indexer_topk": SPARSE.seq_length})
    models = [GPTModel(each, FP64).train() for each in (config, replace(model_of(dense), window_size=None))]
    batch = random_batch(config, **packed_documents(config)).local_to(ParallelState().cp)
    losses = [model(None, batch) for model in models]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for loss in losses:
        loss.backward()
    ours, theirs = (model.named_metas() for model in models)
    for name, (parameter, _) in theirs.items():
        grad = ours[name][0].grad
        assert (grad - parameter.grad).norm() <= 1e-12 * parameter.grad.norm(), name
    assert {name for name in ours if name not in theirs} == {name for name in ours if ".indexer." in name}
    assert not any(ours[name][0].grad.any() for name in ours if ".indexer." in name)


def test_selection_prefers_the_later_of_equal_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    for topk in (1, 3, 7):
        scores = torch.randint(3, (5, 2, 9), generator=generator).double()
        scores[0, 0, :7] = -torch.inf
        for row, found in zip(scores.flatten(0, 1).tolist(), largest(scores, topk).flatten(0, 1).tolist(), strict=True):
            legal = [key for key in range(9) if row[key] > -torch.inf]
            assert [key for key in found if key >= 0] == sorted(sorted(legal, key=lambda k: (-row[k], -k))[:topk])


def test_nan_scores_select_existing_keys() -> None:
    scores = torch.arange(12.0).view(2, 1, 6)
    scores[1, 0, 2:] = torch.nan
    found = largest(scores, 3)
    assert found[0, 0].tolist() == [3, 4, 5] and (found < 6).all()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("longest", [1, 3, 100])
def test_chunks_cover_all_rows_of_a_shard(size: int, shards: int, longest: int) -> None:
    for rank in range(size):
        spans = rank_spans(64, rank, size)
        places, row = [place for span in spans for place in span], 0
        for chunk in chunks_of(spans, shards, longest):
            assert chunk.rows.start == row < chunk.rows.stop <= row + longest
            assert row * shards // len(places) == (chunk.rows.stop - 1) * shards // len(places)
            assert places[chunk.rows] == [*range(chunk.keys - (chunk.rows.stop - row), chunk.keys)]
            row = chunk.rows.stop
        assert row == len(places)


def test_merged_chunks_contain_the_same_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MERGED_ROWS", 6)
    for rank in range(2):
        chunks = chunks_of(rank_spans(64, rank, 2), 2, 3)
        whole = selection.merged(chunks, 1)
        found = list[int]()
        for each in whole:
            count = each.rows.stop - each.rows.start
            assert count <= 6
            found += range(each.keys - count, each.keys)
        assert found == [place for span in rank_spans(64, rank, 2) for place in span] and len(whole) < len(chunks)
    monkeypatch.setattr(selection, "MERGED", 1)
    assert selection.merged(chunks, 1) == chunks


def test_attention_kinds_can_vary_by_layer() -> None:
    assert [(kind.attends, kind.linear) for kind in IN_SOME.layers] == [(True, "dsa"), (True, None)]
    assert all(kind.rotation is not None for kind in IN_SOME.layers)
    letters = {"num_layers": 4, "experimental_attention_variant": None, "hybrid_layer_pattern": "D-+-"}
    lettered = with_fields(SPARSE, letters)
    assert [(kind.attends, kind.linear, kind.mlp) for kind in lettered.layers] == [
        (True, "dsa", False),
        (False, None, True),
        (True, None, False),
        (False, None, True),
    ]


def test_memory_grows_linearly_with_the_sequence() -> None:
    """Layers save their operands and outputs, the selected keys, and the gradients of the indexer."""
    assert kept_in_bf16(replace(SPARSE, seq_length=512)) <= 2 * kept_in_bf16(replace(SPARSE, seq_length=256))


MODEL = (
    f"{TINY} --seq-length 16 --vocab-size 12 --fp64 --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --multi-latent-attention --kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 5 --init-method-std 0.3 --experimental-attention-variant dsa --dsa-indexer-n-heads 4 "
    "--dsa-indexer-head-dim 8 --dsa-indexer-loss-coeff 1 "
)


def logged(rank: int, world_size: int, flags: str, steps: int = 2) -> tuple[list[float], list[str]]:
    """Return the logged indexer loss of each step, and the names of the parameters that the steps changed."""
    config = resolve(parse_args((MODEL + flags).split()), world_size)
    with local_run(config, rank, world_size) as run:
        (losses,) = (meter for meter in run.meters if isinstance(meter, IndexerTallies))
        named = {name: p for model in run.stages.values() for name, (p, _) in model.named_metas().items()}
        before, found = {name: p.detach().clone() for name, p in named.items()}, []
        for _ in range(steps):
            train_step(run)
            taken = losses.take()
            if world_size > 1:
                dist.all_reduce(taken)
            found.append(losses.report(taken, Interval())["indexer_loss"])
        run.ddp.gather_params_()
        return found, [name for name, p in named.items() if not p.equal(before[name])]


WIDE = (
    f"{TINY} --hidden-size 64 --ffn-hidden-size 128 --seq-length 32 --bf16 --multi-latent-attention --q-lora-rank 32 "
    "--qk-head-dim 16 --qk-pos-emb-head-dim 16 --position-embedding-type rope --dsa-indexer-n-heads 16 "
    "--dsa-indexer-head-dim 32 --dsa-indexer-topk 8 --dsa-indexer-loss-coeff 1 --experimental-attention-variant "
)
VARIANTS = (
    "dsa --v-head-dim 16 --kv-lora-rank 32",
    "dsv4_hybrid --v-head-dim 32 --csa-compress-ratios [4,16] --csa-window-size 8 --o-groups 2 --o-lora-rank 32",
)


def trained(rank: int, world_size: int, flags: str) -> dict[str, Tensor]:
    """Take one step of plain gradient descent. Return the change of each parameter, and the sums of the indexer's
    loss."""
    config = resolve(parse_args((WIDE + flags).split()), world_size)
    with local_run(config, rank, world_size) as run:
        (losses,) = (meter for meter in run.meters if isinstance(meter, IndexerTallies))
        named = {name: p for model in run.stages.values() for name, (p, _) in model.named_metas().items()}
        before = {name: p.detach().clone() for name, p in named.items()}
        train_step(run)
        return {name: (p - before[name]).detach().float() for name, p in named.items()} | {"loss": losses.take()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_in_fp8_follows_bf16(variant: str) -> None:
    """Linear layers run in fp8. The latent projection stays in bf16, because attention multiplies its weights by
    queries and outputs directly."""
    flags = f"{variant} --optimizer sgd --sgd-momentum 0 --lr 10"
    (plain,) = run_world(1, trained, flags)
    (found,) = run_world(1, trained, f"{flags} --fp8-format hybrid --fp8-recipe tensorwise")
    torch.testing.assert_close(found["loss"], plain["loss"], rtol=0.02, atol=0)
    for name, change in plain.items():
        if change.ndim > 1:  # one-dimensional parameters are close to 1, where bf16 cannot represent their changes
            assert (found[name] - change).norm() <= 0.3 * change.norm(), name


@pytest.mark.parametrize("loss", ["", "--dsa-indexer-use-sparse-loss "])
def test_every_layout_logs_the_same_loss(loss: str) -> None:
    flags = f"--dsa-indexer-topk 5 --tokenizer-type NullTokenizer --reset-attention-mask {loss}"
    ((expected, _),) = run_world(1, logged, flags)
    for world_size, layout in ((4, "--tp 2 --sequence-parallel --dp 2"), (4, "--tp 2 --cp 2"), (2, "--pp 2")):
        for found, _ in run_world(world_size, logged, flags + layout):
            assert found == pytest.approx(expected, rel=1e-10)


def test_a_warm_up_trains_only_the_indexer() -> None:
    """With dense attention and all other parameters frozen, the indexer learns which keys attention uses."""
    flags = "--dsa-indexer-topk 16 --freeze ^(?!.*indexer) --lr 3e-2 --weight-decay 0 --train-iters 40"
    ((losses, changed),) = run_world(1, logged, flags, 40)
    assert changed and all(".indexer." in name for name in changed)
    assert losses[-1] < 0.5 * losses[0]


def test_a_checkpoint_keeps_its_default_after_the_default_changed(tmp_path: Path) -> None:
    """If the default of a flag has changed, a resumed run prints a notice only if it uses the feature and the flag is
    not given."""
    sparse = "--multi-latent-attention --experimental-attention-variant dsa"
    for flags, kept in ((sparse, True), ("", False)):
        saved = parse_args(f"{TINY} {flags}".split())
        sections = values_by_section(saved)
        sections["sparse attention"]["dsa_indexer_loss_coeff"] = 1.0
        sections["compressed attention"]["csa_compress_rotary_base"] = 160000.0
        (tmp_path / "metadata.json").write_text(json.dumps({"config": sections}))
        asked = f"{TINY} {flags} --load {tmp_path}".split()
        config, notes = with_saved_flags(parse_args(asked), frozenset(asked))
        told = "--dsa-indexer-loss-coeff is 1.0, as in the checkpoint, not 0.0: the default has changed"
        assert notes == ([told] if kept else [])
        assert named_value(config, "dsa_indexer_loss_coeff") == (1.0 if kept else 0.0)
        asked += ["--dsa-indexer-loss-coeff", "0.5"]
        config, notes = with_saved_flags(parse_args(asked), frozenset(asked))
        assert (named_value(config, "dsa_indexer_loss_coeff"), notes) == (0.5, [])
        assert with_saved_flags(parse_args([*asked[:-2], "--finetune"]), frozenset(asked[:-2]))[1] == []
