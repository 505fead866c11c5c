"""The parity matrix: legal combinations of parallelisms, each against one process in fp64.

A pairwise-covering design picks combinations over worlds of 1, 2, 4 and 8 such that every legal pair of choices
occurs; `NAMED` adds the pairs that have gone wrong in published frameworks. Of each combination two training
steps are compared: loss, every gradient, gradient norm, every weight and moment. Fused regions are those of --compile,
run as they are written: tests/pure/test_regions.py compares them with what a compiler makes of them.

    python -m tests.parity.matrix             the whole matrix, a line each, and a summary
    python -m tests.parity.matrix --list      what it would run
    python -m tests.parity.matrix --with optimizer=gradients,parameters instances=2    those with one of these choices

CI runs a part, see test_matrix.py.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from math import inf
from random import Random
from unittest import mock

from megatron.core import compiled_regions
from megatron.core.datasets import mock as mock_data
from megatron.core.distributed import param_layout
from megatron.testing.parity import TOLERANCE
from megatron.testing.snapshot import Snapshot, differences, train_in_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate

COMMON = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 8 --seq-length 16 --vocab-size 60 "
    "--make-vocab-size-divisible-by 8 --lr 1e-2 --weight-decay 0.1 --mock-data --global-batch-size 8 "
    "--train-iters 2 --eval-iters 0 --num-workers 0 --fp64 --cpu"
)

# What a choice adds to the flags. Model factors are part of the one-process reference too, layout factors are not.
BIASED_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1"
    " --moe-router-load-balancing-type seq_aux_loss --moe-z-loss-coeff 0.01"
)
EXPERTS = f"--disable-bias-linear {BIASED_EXPERTS}"
MODEL_FACTORS: dict[str, dict[str, str]] = {
    "heads": {
        "mha": "",
        "gqa": "--group-query-attention --num-query-groups 4",
        "mqa": "--group-query-attention --num-query-groups 1",
        "wide": "--kv-channels 8 --add-qkv-bias",
        "mla": "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 4"
        " --v-head-dim 5 --rotary-scaling-factor 4 --original-max-position-embeddings 8 --mscale-all-dim 0.7",
    },
    "embeddings": {"tied": "", "untied": "--untie-embeddings-and-output-weights"},
    "style": {
        "gpt": "",
        "llama": "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
        " --attention-dropout 0 --hidden-dropout 0 --qk-layernorm",
        "gemma": "--position-embedding-type rope --normalization RMSNorm --activation-func geglu_tanh"
        " --disable-bias-linear --apply-layernorm-1p --scale-word-embeddings --hidden-dropout 0",
        "bloom": "--position-embedding-type alibi --embed-layernorm",
        "yarn": "--position-embedding-type rope --rope-type yarn --rotary-scaling-factor 4"
        " --original-max-position-embeddings 8 --rotary-percent 0.5 --normalization RMSNorm --activation-func xielu"
        " --attention-dropout 0",
        "gptj": "--position-embedding-type rope --rotary-interleaved --rotary-seq-len-interpolation-factor 2",
    },
    "block": {
        "plain": "",
        "output norms": "--norm-placement output --logits-scaling 3 --embedding-multiplier 2",
        "sandwich": "--norm-placement sandwich --attention-output-gate --final-logit-softcapping 2",
        "parallel": "--parallel-residual --residual-multiplier 0.7 --softmax-scale 0.3 --head-wise-attn-gate",
        "wide norms": "--normalization RMSNorm --qk-layernorm --qk-layernorm-scope all",
    },
    "softmax": {
        "plain": "",
        "sinks": "--softmax-type learnable",
        "off by one": "--softmax-type off-by-one --attn-logit-softcapping 0.7",
    },
    "layers": {
        "alike": "",
        "windows": "--window-size 5 --window-attn-skip-freq 3",
        "chunks": "--attention-chunk-size 6 --window-attn-skip-freq ([1]*2+[0]*2+[1]*2) --no-rope-freq 2",
        "delta nets": "--experimental-attention-variant gated_delta_net --linear-attention-freq ([1]*2+[0]+[1]*3)"
        " --linear-num-key-heads 8 --linear-num-value-heads 16 --linear-key-head-dim 4 --linear-value-head-dim 3",
        "tempered": "--attention-chunk-size 6 --window-attn-skip-freq 2 --no-rope-freq 2 --qk-l2-norm"
        " --attention-temperature-coeff 0.5 --attention-temperature-floor 3",
        "bases": "--window-size 4 --window-attn-skip-freq ([0]+[1]*5) --window-rotary-base 500 --no-rope-freq 4",
        "own heads": "--window-size 5 --window-attn-skip-freq 3 --window-num-attention-heads 16"
        " --window-num-query-groups 8 --window-softmax-type learnable --window-rotary-percent 0.5 --value-channels 6"
        " --attention-value-scale 0.7 --ffn-hidden-size-pattern ([48]*2+[64]*3+[96])",
    },
    "mlp": {
        "dense": "",
        "moe": EXPERTS,
        "drops": f"{EXPERTS} --moe-expert-capacity-factor 1.1",
        "biased": f"{BIASED_EXPERTS} --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 0.02",
    },
    "routing": {
        "softmax": "",
        "groups": "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 2"
        " --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5 --moe-latent-size 12",
        "shared": "--moe-router-pre-softmax --moe-shared-expert-intermediate-size 16 --moe-layer-freq ([0]*2+[1]*4)",
        "weighted inputs": "--moe-router-score-function sigmoid --moe-apply-probs-on-input"
        " --moe-shared-expert-intermediate-size 16 --moe-layer-freq ([0,1]*3)",
        "gated": "--moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate --moe-layer-freq 2",
    },
    "update": {
        "adam": "",
        "muon": "--optimizer muon --muon-nesterov --muon-momentum 0.8 --muon-extra-scale-factor 0.2",
        "clipped": "--qk-clip --qk-clip-threshold 1e-4 --qk-clip-alpha 0.3",
    },
    "states": {
        "main": "",
        "bf16": "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        "fp16": "--use-precision-aware-optimizer --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16",
    },
    "groups": {
        "usual": "",
        "own": "--param-group 'linear_(qkv|fc1|q) lr_mult=0.3 weight_decay=0.5' --weight-decay-on matrices norms",
    },
    "multi token": {"0": "", "1": "--mtp-num-layers 1", "2": "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"},
    "documents": {
        "whole": "",
        "packed": "--tokenizer-type NullTokenizer --reset-attention-mask --reset-position-ids --eod-mask-loss",
    },
}
LAYOUT_FACTORS: dict[str, dict[str, str]] = {
    "world": {"1": "", "2": "", "4": "", "8": ""},
    "tp": {
        "1": "",
        "2": "--tp 2",
        "2sp": "--tp 2 --sequence-parallel",
        "4": "--tp 4",
        "4sp": "--tp 4 --sequence-parallel",
    },
    "pp": {"1": "", "2": "--pp 2", "4": "--pp 4"},
    "schedule": {
        "1f1b": "--pipeline-schedule 1f1b",
        "gpipe": "--pipeline-schedule gpipe",
        "interleaved2": "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
        "interleaved3": "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 3",
        "zb-h1": "--pipeline-schedule zb-h1",
        "zb-h2": "--pipeline-schedule zb-h2",
        "zb-v": "--pipeline-schedule zb-v",
    },
    "cp": {
        "1": "",
        "2ring": "--cp 2 --cp-comm-type p2p",
        "2gather": "--cp 2 --cp-comm-type all_gather",
        "2ulysses": "--cp 2 --cp-comm-type a2a",
        "4ring": "--cp 4 --cp-comm-type p2p",
    },
    "ep": {"1": "", "2": "--ep 2", "4": "--ep 4"},
    "etp": {"as tp": "", "1": "--etp 1", "2": "--etp 2", "4": "--etp 4"},
    "dispatcher": {
        "alltoall": "--moe-token-dispatcher-type alltoall",
        "allgather": "--moe-token-dispatcher-type allgather",
    },
    "expert messages": {
        "plain": "",
        "padded": "--moe-pad-expert-input-to-capacity",
        "in turns": "--overlap-moe-expert-parallel-comm",
    },
    "optimizer": {
        "zero1": "",
        "replicated": "--no-use-distributed-optimizer",
        "overlapped": "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000",
        "gradients": "--data-parallel-sharding-strategy optim_grads",
        "parameters": "--data-parallel-sharding-strategy optim_grads_params",
        "replicated overlapped": "--no-use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 2000",
    },
    "norm": {"awaited": "", "validated later": "--optimizer-post-validation"},
    "instances": {"1": "", "2": "--num-distributed-optimizer-instances 2"},
    "offload": {"none": "", "part": "--optimizer-cpu-offload --optimizer-offload-fraction 0.7"},
    "recompute": {
        "none": "",
        "selective": "--recompute-granularity selective",
        "latents": "--recompute-granularity selective --recompute-modules mla_up_proj layernorm",
        "full uniform": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "full block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    },
    "activations": {
        "kept": "",
        **{
            f"{count} offloaded": f"--cpu-offloading --cpu-offloading-num-layers {count} --min-offloaded-tensor-size 1"
            for count in (1, 2)
        },
    },
    "micro batch": {"1": "--micro-batch-size 1", "2": "--micro-batch-size 2"},
    "regions": {"plain": "", "fused": "--compile"},
}
FACTORS = LAYOUT_FACTORS | MODEL_FACTORS
OF_EXPERTS = ("ep", "etp", "dispatcher", "expert messages", "routing")
"""Factors that only models with experts have."""

STEPS = 2

HOST_CHUNK = 2048
"""Elements of offloaded states that are updated at a time, so that there are several chunks."""

DOCUMENT_ENDS = 1 / 5
"""Share of tokens that end a document, where documents are packed."""


@dataclass(frozen=True)
class Combination:
    """One choice of each factor, in the order of `FACTORS`."""

    choices: tuple[str, ...]

    @classmethod
    def of(cls, **changed: str) -> Combination:
        """The first choice of every factor, but for those named (underscores stand for spaces)."""
        named = {name.replace("_", " "): choice for name, choice in changed.items()}
        assert named.keys() <= FACTORS.keys(), named
        return cls(tuple(named.get(name, next(iter(options))) for name, options in FACTORS.items()))

    @property
    def world_size(self) -> int:
        return int(self["world"])

    @property
    def argv(self) -> list[str]:
        return self._flags(tuple(FACTORS))

    @property
    def model_argv(self) -> list[str]:
        """Flags of the same model on one process."""
        return self._flags(tuple(MODEL_FACTORS))

    def _flags(self, names: Sequence[str]) -> list[str]:
        moe = self["mlp"] != "dense"
        named = [FACTORS[name][self[name]] for name in names if moe or name not in OF_EXPERTS]
        line = " ".join([COMMON, *named])
        return shlex.split(line) if "'" in line or '"' in line else line.split()  # shlex takes a fifth of the search

    def __getitem__(self, factor: str) -> str:
        return self.choices[list(FACTORS).index(factor)]

    def __str__(self) -> str:
        plain = Combination.of()
        shown = [f"{name} {self[name]}" for name in FACTORS if name == "world" or self[name] != plain[name]]
        return ", ".join(shown)


def legal(combination: Combination) -> bool:
    """Whether it passes validation, and is not another combination under a second name."""
    sizes = [int(combination[name][0]) for name in ("tp", "pp", "cp")]
    if combination.world_size % (sizes[0] * sizes[1] * sizes[2]) or not _distinct(combination):
        return False
    config = resolve(parse_args(combination.argv), combination.world_size)
    return not validate(config, combination.world_size)


def _distinct(combination: Combination) -> bool:
    """Without experts, their layout is not varied; nor are messages that do not travel, or a plain schedule without a
    pipeline."""
    if combination["norm"] != "awaited" and combination["pp"] == "1":
        return False
    if combination["mlp"] == "dense":
        return all(combination[name] == next(iter(FACTORS[name])) for name in OF_EXPERTS)
    if combination["expert messages"] == "padded" and (combination["mlp"], combination["dispatcher"]) != (
        "drops",
        "alltoall",
    ):
        return False
    if combination["expert messages"] != "plain" and combination["ep"] == "1":
        return False
    return combination["pp"] != "1" or combination["schedule"] in ("1f1b", "interleaved2", "zb-v")


Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(combination: Combination) -> set[Pair]:
    return set(combinations(zip(FACTORS, combination.choices, strict=True), 2))


@lru_cache
def pairwise(tries: int = 60) -> tuple[Combination, ...]:
    """Combinations in which every pair of choices occurs that a legal combination has. The same every time.

    Greedy: of several random legal combinations that contain a pair still missing, the one that covers most of the
    missing pairs is taken. A pair that `tries` random completions do not make legal counts as illegal; with rules
    that reach over three or four factors, ready-made covering designs miss most of what is legal.
    """
    random = Random(0)
    missing = dict.fromkeys(
        pair
        for a, b in combinations(FACTORS, 2)
        for pair in product(product([a], FACTORS[a]), product([b], FACTORS[b]))
    )
    chosen = []
    while missing:
        pair = next(iter(missing))
        found = [candidate for candidate in (_complete(pair, random) for _ in range(tries)) if legal(candidate)][:8]
        if not found:
            del missing[pair]
            continue
        chosen.append(max(found, key=lambda candidate: sum(p in missing for p in pairs_of(candidate))))
        for covered in pairs_of(chosen[-1]):
            missing.pop(covered, None)
    return tuple(chosen)


def _complete(pair: Pair, random: Random) -> Combination:
    """A random combination with `pair` in it."""
    fixed = dict(pair)
    if "mlp" not in fixed and any(name in fixed for name in OF_EXPERTS):
        fixed["mlp"] = random.choice(("moe", "drops", "biased"))
    if fixed.setdefault("mlp", random.choice(list(FACTORS["mlp"]))) == "dense":
        for name in OF_EXPERTS:
            fixed.setdefault(name, next(iter(FACTORS[name])))
    messages = fixed.setdefault("expert messages", random.choice(("plain", "plain", *FACTORS["expert messages"])))
    if messages != "plain":
        fixed.setdefault("ep", random.choice(("2", "4")))
        fixed.setdefault("dispatcher", "alltoall")
    if messages == "in turns":
        fixed.setdefault("schedule", random.choice(("interleaved2", "interleaved3", "zb-h2")))
    if fixed.setdefault("norm", random.choice(("awaited", "awaited", "awaited", "validated later"))) != "awaited":
        fixed.setdefault("pp", random.choice(("2", "4")))
        fixed.setdefault("optimizer", random.choice(("zero1", "replicated", "overlapped", "replicated overlapped")))
        fixed.setdefault("update", random.choice(("adam", "muon")))
        for name in ("states", "offload", "activations"):
            fixed.setdefault(name, next(iter(FACTORS[name])))
    return Combination(tuple(fixed.get(name) or random.choice(list(options)) for name, options in FACTORS.items()))


# Pairs behind published reports of silently wrong gradients, see docs/layouts.md.
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
        world="2", tp="2sp", regions="fused", style="llama", recompute="latents", optimizer="overlapped"
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
        world="8",
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
        world="4", pp="4", schedule="zb-h2", norm="validated later"
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


def whole_matrix() -> list[Combination]:
    """The named combinations, then the covering ones."""
    return list(dict.fromkeys([*NAMED.values(), *pairwise()]))


@lru_cache
def reference(model_argv: tuple[str, ...]) -> Snapshot:
    """The same model on one process."""
    with mock.patch.object(mock_data, "END_OF_DOCUMENT", DOCUMENT_ENDS):
        return train_in_world(1, model_argv, STEPS)


def difference(combination: Combination) -> str | None:
    """What of a combination is not what one process computes; None if all of it is."""
    return compared(combination)[0]


def compared(combination: Combination) -> tuple[str | None, float]:
    """(what is not what one process computes or None, the largest relative error of a tensor)"""
    with (
        mock.patch.object(compiled_regions, "_compiled", lambda function, static: function),
        mock.patch.object(mock_data, "END_OF_DOCUMENT", DOCUMENT_ENDS),
        mock.patch.object(param_layout, "HOST_CHUNK", HOST_CHUNK),
    ):
        unseen = int(combination["norm"] != "awaited")  # what is recorded, is read before the next step
        snapshot = train_in_world(combination.world_size, combination.argv, STEPS - unseen, unseen=unseen)
    if snapshot.replica_errors:
        return snapshot.replica_errors[0], inf
    one = reference(tuple(combination.model_argv))
    found = list(differences(Snapshot({key: one[key] for key in snapshot.tensors}), snapshot))
    wrong = next((f"{key}: relative error {error:.1e}" for key, error in found if error > TOLERANCE), None)
    return wrong, max(error for _, error in found)


def choices_of(text: str) -> list[tuple[str, str]]:
    """[("optimizer", "gradients"), ("optimizer", "parameters")] of "optimizer=gradients,parameters"."""
    name, _, choices = text.partition("=")
    wrong = [choice for choice in choices.split(",") if choice not in FACTORS.get(name, {})]
    if wrong:
        known = f"of {name}: {', '.join(FACTORS[name])}" if name in FACTORS else f"factors: {', '.join(FACTORS)}"
        raise argparse.ArgumentTypeError(f"{text} names no choice of the matrix; {known}")
    return [(name, choice) for choice in choices.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="print the combinations and run none")
    parser.add_argument(
        "--with",
        dest="choices",
        nargs="+",
        type=choices_of,
        help="combinations with any of these: FACTOR=CHOICE,...",
    )
    args = parser.parse_args(argv)
    chosen = {pair for pairs in args.choices or () for pair in pairs}
    wanted = [each for each in whole_matrix() if not chosen or any(each[name] == choice for name, choice in chosen)]
    began, failures, largest = time.perf_counter(), [], 0.0
    for number, combination in enumerate(wanted, 1):
        line = f"{number:4d}/{len(wanted)} {combination}"
        if args.list:
            print(line)
            continue
        start = time.perf_counter()
        try:
            wrong, error = compared(combination)
        except Exception as exception:
            wrong, error = f"{type(exception).__name__}: {str(exception)[-2000:]}", inf
        said = wrong or f"equal to {error:.1e}"
        print(f"{line}: {said} ({time.perf_counter() - start:.1f} s)", flush=True)
        if wrong is None:
            largest = max(largest, error)
        else:
            failures.append(str(combination))
    if not args.list:
        seconds = time.perf_counter() - began
        count = f"{len(wanted)} combinations, {len(failures)} differ from one process"
        print(f"{count}, the others are equal to {largest:.1e}, {seconds:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
