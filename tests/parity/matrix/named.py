"""Combinations behind published reports of silently wrong gradients (docs/layouts.md), and others that are known to be
delicate."""

from __future__ import annotations

from tests.parity.matrix.combination import Combination

NAMED = {
    "replicated parameters under TP and sequence parallelism": Combination.of(
        world="2", tp="2sp", heads="gqa", style="llama"
    ),
    "tied embeddings over pipeline stages": Combination.of(world="4", pp="4", optimizer="replicated"),
    "tied embeddings, overlapped reduction": Combination.of(world="8", pp="2", tp="2sp", optimizer="overlapped"),
    "tied embeddings on one rank": Combination.of(world="2", pp="2", schedule="zb-v", optimizer="overlapped"),
    "loss under context and pipeline parallelism": Combination.of(world="4", pp="2", cp="2ring"),
    "loss under context and data parallelism": Combination.of(world="8", cp="2ulysses", tp="2sp"),
    "experts and data parallelism": Combination.of(world="8", mlp="moe", ep="4", tp="2sp", etp="1"),
    "experts and pipeline parallelism": Combination.of(world="8", mlp="moe", ep="2", pp="2", schedule="zb-h1"),
    "experts whose messages are hidden, interleaved": Combination.of(
        world="4", mlp="moe", ep="2", pp="2", schedule="interleaved2", expert_messages="in turns"
    ),
    "experts whose messages are hidden, with sequence parallelism": Combination.of(
        world="8", mlp="drops", ep="2", pp="2", tp="2sp", schedule="zb-h2", expert_messages="in turns"
    ),
    "experts with biases": Combination.of(world="8", mlp="biased", tp="2sp", ep="2", etp="2", dispatcher="allgather"),
    "experts with biases, weight gradients later": Combination.of(
        world="4", mlp="biased", pp="2", ep="2", schedule="zb-h1", recompute="full uniform", layers="windows"
    ),
    "weights on experts' inputs, positions of a rank's own": Combination.of(
        world="8", mlp="moe", routing="weighted inputs", layers="tempered", style="gptj", cp="2ring", tp="2sp", ep="2"
    ),
    "experts and context parallelism": Combination.of(world="8", mlp="moe", ep="2", cp="2ring", tp="2sp"),
    "fused norms, recomputed": Combination.of(
        world="2", tp="2sp", regions="fused", style="llama", recompute="mlp", optimizer="overlapped"
    ),
    "fused norms and dropout": Combination.of(world="4", pp="2", tp="2", regions="fused", micro_batch="2"),
    "sharded gradients of tied embeddings": Combination.of(
        world="4", pp="2", optimizer="gradients", recompute="selective"
    ),
    "sharded gradients on both ends of one rank": Combination.of(
        world="4", pp="2", schedule="zb-v", optimizer="gradients"
    ),
    "sharded parameters, split backwards": Combination.of(
        world="4", pp="2", schedule="zb-h1", optimizer="parameters", embeddings="untied", style="llama"
    ),
    "sharded parameters, computed again": Combination.of(
        world="4", tp="2sp", optimizer="parameters", recompute="full uniform", regions="fused"
    ),
    "sharded parameters of experts": Combination.of(
        world="4",
        pp="2",
        ep="2",
        mlp="moe",
        optimizer="parameters",
        schedule="interleaved2",
        expert_messages="in turns",
    ),
    "sharded parameters under context parallelism": Combination.of(world="4", cp="2ring", optimizer="parameters"),
    "sharded parameters, further tokens, whole matrices": Combination.of(
        world="4", pp="2", optimizer="parameters", multi_token="2", update="muon"
    ),
    "offloaded activations, weight gradients later": Combination.of(
        world="2", pp="2", schedule="zb-h1", activations="2 offloaded", recompute="selective"
    ),
    "offloaded activations of experts, passes in turns": Combination.of(
        world="4",
        mlp="moe",
        ep="2",
        pp="2",
        schedule="interleaved2",
        expert_messages="in turns",
        activations="1 offloaded",
    ),
    "offloaded activations, sharded parameters": Combination.of(
        world="4", tp="2sp", optimizer="parameters", activations="2 offloaded", recompute="full block", regions="fused"
    ),
    "hybrid sharding": Combination.of(world="4", optimizer="parameters", instances="2"),
    "hybrid sharding of experts over pipeline stages": Combination.of(
        world="8", pp="2", ep="2", mlp="moe", optimizer="gradients", instances="2", schedule="zb-h1"
    ),
    "hybrid sharding of states": Combination.of(world="4", cp="2ring", optimizer="overlapped", instances="2"),
    "overlapped gather of parameters": Combination.of(world="4", optimizer="overlapped", recompute="full uniform"),
    "states on the host beside sharded parameters": Combination.of(
        world="4", pp="2", optimizer="parameters", offload="part", groups="own", style="llama"
    ),
    "states in 16 bits on the host, of experts too": Combination.of(
        world="4", mlp="moe", ep="2", offload="part", states="bf16", optimizer="overlapped"
    ),
    "norm known after the forward passes of the next step": Combination.of(
        world="4", pp="4", schedule="zb-h2", norm="validated later", embeddings="untied"
    ),
    "norm known later, biases of experts": Combination.of(
        world="4", pp="2", ep="2", schedule="zb-v", mlp="moe", routing="groups", norm="validated later"
    ),
    "latents under tensor parallelism": Combination.of(world="4", tp="2", pp="2", heads="mla", style="llama"),
    "latents under sequence and context parallelism": Combination.of(
        world="8", tp="2sp", cp="2ulysses", heads="mla", style="llama", mlp="moe", ep="2", recompute="latents"
    ),
    "multi-token prediction over pipeline stages": Combination.of(
        world="4", pp="2", tp="2sp", embeddings="untied", multi_token="2"
    ),
    "multi-token prediction and context parallelism": Combination.of(world="2", cp="2ring", multi_token="2"),
    "multi-token prediction and experts": Combination.of(
        world="4", mlp="moe", ep="2", pp="2", schedule="zb-h1", multi_token="1"
    ),
    "delta nets under sequence and pipeline parallelism": Combination.of(
        world="8", tp="2sp", pp="2", layers="delta nets", mlp="moe", ep="2", recompute="selective"
    ),
    "delta nets under context parallelism": Combination.of(
        world="8", cp="4ring", tp="2sp", layers="delta nets", documents="packed", recompute="full block"
    ),
    "delta nets under context and pipeline parallelism": Combination.of(
        world="4", cp="2ulysses", pp="2", schedule="zb-v", layers="delta nets", micro_batch="2"
    ),
    "delta nets, whole matrices": Combination.of(
        world="4", tp="2", pp="2", schedule="zb-h1", layers="delta nets", update="muon", heads="gqa", style="gemma"
    ),
    "recomputation under sequence parallelism": Combination.of(world="4", tp="4sp", recompute="selective"),
    "whole matrices over tensor and data parallelism": Combination.of(
        world="4", tp="2sp", update="muon", heads="gqa", style="llama"
    ),
    "whole matrices of experts": Combination.of(world="4", tp="2sp", update="muon", mlp="moe", ep="2", etp="2"),
    "whole matrices, replicated": Combination.of(world="4", cp="2ring", update="muon", optimizer="replicated"),
    "states in 16 bits and groups over tensor and pipeline parallelism": Combination.of(
        world="8", tp="2sp", pp="2", states="bf16", groups="own", optimizer="overlapped"
    ),
    "clipped logits under context and tensor parallelism": Combination.of(
        world="4", tp="2", cp="2ring", update="clipped", heads="gqa"
    ),
    "clipped logits of latents": Combination.of(world="4", cp="2ulysses", update="clipped", heads="mla"),
    "whole matrices over pipeline parallelism": Combination.of(
        world="4", pp="2", schedule="zb-v", update="muon", optimizer="overlapped", style="llama"
    ),
}
NAMED = {name: combination for name, combination in NAMED.items() if combination.is_there}
