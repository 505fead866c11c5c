"""Recomputation changes no bit: not by any choice of modules, nor under schedules that put weight gradients off."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from tests.extensions import needs
from tests.harness import Snapshot, train_in_world

COMMON = (
    "--num-layers 5 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 50 "
    "--make-vocab-size-divisible-by 4 --lr 1e-2 --mock-data --global-batch-size 4 "
    "--train-iters 2 --eval-iters 0 --num-workers 0 --fp64 --cpu"
)
STYLES = {
    "gpt": COMMON,
    "llama": COMMON
    + " --untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm --swiglu"
    " --disable-bias-linear --qk-layernorm --attention-dropout 0",
    "relu": COMMON + " --squared-relu --window-size 3",
    "latent": COMMON + " --position-embedding-type rope --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10"
    " --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5 --qk-layernorm",
    "delta-net": COMMON + " --experimental-attention-variant gated_delta_net --linear-attention-freq 2"
    " --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 6 --linear-value-head-dim 5",
    "moe": COMMON + " --disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1"
    " --moe-layer-freq ([1]*3+[0]*2) --moe-shared-expert-intermediate-size 24",
}
LAYOUTS = {
    "one": (1, ""),
    "sequence": (4, "--tp 2 --sequence-parallel --pp 2 --pipeline-schedule zb-h1"),
    "v": (2, "--pp 2 --pipeline-schedule zb-v --overlap-grad-reduce --overlap-param-gather"),
    "context": (2, "--cp 2"),
}
FULL = [
    "--recompute-granularity full",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
]
SELECTIVE = [
    "--recompute-activations",
    *(
        f"--recompute-granularity selective --recompute-modules {modules}"
        for modules in ("layernorm", "mlp_act", "mlp", "core_attn layernorm mlp_act", "layernorm mlp")
    ),
]
OF_LATENTS = [
    f"--recompute-granularity selective --recompute-modules {modules}"
    for modules in ("mla_up_proj", "mla_up_proj core_attn", "layernorm mla_up_proj")
]
OF_EXPERTS = [
    f"--recompute-granularity selective --recompute-modules {modules}"
    for modules in ("moe", "moe_act", "shared_experts moe_act", "layernorm mlp moe_act")
]


@lru_cache
def kept(style: str, layout: str) -> Snapshot:
    world_size, flags = LAYOUTS[layout]
    return train_in_world(world_size, [*STYLES[style].split(), *flags.split()], steps=1)


@pytest.mark.parametrize(
    ("style", "layout", "recompute"),
    [("gpt", "one", flags) for flags in FULL + SELECTIVE]
    + [("llama", "one", flags) for flags in FULL[:1] + SELECTIVE]
    + [("relu", "one", flags) for flags in SELECTIVE[2:5]]
    + [needs("latent_attention", "latent", "one", flags) for flags in OF_LATENTS]
    + [needs("latent_attention", "latent", where, OF_LATENTS[n]) for where, n in (("sequence", 2), ("context", 0))]
    + [needs("linear_attention", "delta-net", "one", flags) for flags in (FULL[2], SELECTIVE[0])]
    + [needs("linear_attention", "delta-net", "sequence", flags) for flags in (FULL[0], SELECTIVE[4])]
    + [("moe", "one", flags) for flags in (FULL[0], SELECTIVE[1], *OF_EXPERTS)]
    + [("moe", "sequence", flags) for flags in OF_EXPERTS[::2]]
    + [("gpt", "sequence", flags) for flags in (FULL[0], SELECTIVE[0], SELECTIVE[4], SELECTIVE[5])]
    + [("llama", "sequence", flags) for flags in (FULL[1], SELECTIVE[4])]
    + [("gpt", "v", flags) for flags in (FULL[2], SELECTIVE[5])]
    + [("llama", "context", flags) for flags in (FULL[0], SELECTIVE[4])],
    ids=lambda value: value.replace("--recompute-", ""),
)
def test_recomputation_changes_no_bit(style: str, layout: str, recompute: str) -> None:
    world_size, flags = LAYOUTS[layout]
    argv = [*STYLES[style].split(), *flags.split(), *recompute.split()]
    found = train_in_world(world_size, argv, steps=1)
    expected = kept(style, layout)
    assert found.tensors.keys() == expected.tensors.keys()
    assert [key for key, value in expected.tensors.items() if not torch.equal(value, found[key])] == []
