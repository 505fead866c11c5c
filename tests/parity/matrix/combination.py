"""The factors of the matrix with the flags of their choices, and a combination of choices."""

from __future__ import annotations

import shlex
from collections.abc import Set
from dataclasses import dataclass

from megatron.core.parts import RECOMPUTED_PARTS, SHARDING_STRATEGIES
from megatron.training.config.flags import home_of, spelling_table

COMMON = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 8 --seq-length 16 --vocab-size 60 "
    "--make-vocab-size-divisible-by 8 --lr 1e-2 --weight-decay 0.1 --mock-data --global-batch-size 4 "
    "--train-iters 2 --eval-iters 0 --num-workers 0 --fp64 --cpu"
)

# What a choice adds to the flags. Model factors are part of the one-process reference too, layout factors are not.
BIASED_EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24"
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
    "embeddings": {"tied": "", "untied": "--untie-embeddings-and-output-weights --embedding-init-method-std 0.1"},
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
        "no positions": "--position-embedding-type none --squared-relu --apply-layernorm-1p",
    },
    "depth": {"6": "", "7": "--num-layers 7"},
    "vocabulary": {"60": "", "padding": "--vocab-size 33 --make-vocab-size-divisible-by 128"},
    "batch": {"4": "", "6": "--global-batch-size 6"},
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
        "drops last": f"{EXPERTS} --moe-expert-capacity-factor 0.6 --moe-token-drop-policy position",
        "many": "--disable-bias-linear --num-experts 64 --moe-router-topk 1 --moe-router-pre-softmax"
        " --moe-ffn-hidden-size 24",
        "biased": f"{BIASED_EXPERTS} --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 0.02",
    },
    "routing": {
        "softmax": "",
        "groups": "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 2"
        " --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5 --moe-latent-size 12",
        "shared": "--moe-router-pre-softmax --moe-shared-expert-intermediate-size 16 --moe-layer-freq ([0]*2+[1]*4)",
        "weighted inputs": "--moe-router-score-function sqrtsoftplus --moe-apply-probs-on-input"
        " --moe-shared-expert-intermediate-size 16 --moe-layer-freq ([0,1]*3)",
        "gated": "--moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate --moe-layer-freq 2",
    },
    "balancing": {
        "sequence": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01",
        "batch": "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
        "two losses": "--moe-router-load-balancing-type seq_aux_loss aux_loss --moe-aux-loss-coeff 0.1 0.3",
        "sinkhorn": "--moe-router-load-balancing-type sinkhorn --moe-z-loss-coeff 0.01",
        "forced": "--moe-router-force-load-balancing --moe-aux-loss-coeff 0.1",
        "none": "--moe-router-load-balancing-type none",
    },
    "update": {
        "adam": "",
        "muon": "--optimizer muon --muon-nesterov --muon-momentum 0.8 --muon-extra-scale-factor 0.2",
        "muon sgd": "--optimizer muon --muon-scalar-optimizer sgd",
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
        "decoupled": "--decoupled-lr 0.3 --decoupled-min-lr 0.1",
        "frozen": r"--freeze embedding --freeze 'layers\.[01]\.' --freeze layers.2.*fc1",
    },
    "multi token": {"0": "", "1": "--mtp-num-layers 1", "2": "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"},
    "documents": {
        "whole": "",
        "packed": "--tokenizer-type NullTokenizer --reset-attention-mask --reset-position-ids --eod-mask-loss",
        "masked": "",
    },
}
LAYOUT_FACTORS: dict[str, dict[str, str]] = {
    "world": {"1": "", "2": "", "3": "", "4": "", "6": "", "8": ""},
    "tp": {
        "1": "",
        "2": "--tp 2",
        "2sp": "--tp 2 --sequence-parallel",
        "4": "--tp 4",
        "4sp": "--tp 4 --sequence-parallel",
    },
    "linears": {"plain": "", "overlapped": "--tp-comm-overlap"},
    "pp": {"1": "", "2": "--pp 2", "3": "--pp 3", "4": "--pp 4"},
    "schedule": {
        "1f1b": "--pipeline-schedule 1f1b",
        "gpipe": "--pipeline-schedule gpipe",
        "interleaved2": "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
        "interleaved3": "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 3",
        "layer by layer": "--pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage 1",
        "in groups": "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 3",
        "zb-h1": "--pipeline-schedule zb-h1",
        "zb-h2": "--pipeline-schedule zb-h2",
        "zb-v": "--pipeline-schedule zb-v",
    },
    "stages": {
        "even": "",
        "ends": "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 0",
        "loss counts": "--account-for-loss-in-pipeline-split",
        "two": "--pipeline-model-parallel-layout Et*4|t*2L",
        "four": "--pipeline-model-parallel-layout Et*3||t|t*2L",
    },
    "ranks": {"tp dp pp": "", "tp pp dp": "--use-tp-pp-dp-mapping"},
    "cp": {
        "1": "",
        "2ring": "--cp 2 --cp-comm-type p2p",
        "2gather": "--cp 2 --cp-comm-type all_gather",
        "2ulysses": "--cp 2 --cp-comm-type a2a",
        "4ring": "--cp 4 --cp-comm-type p2p",
        "4gather": "--cp 4 --cp-comm-type all_gather",
        "4ulysses": "--cp 4 --cp-comm-type a2a",
    },
    "ep": {"1": "", "2": "--ep 2", "4": "--ep 4", "8": "--ep 8"},
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
    "row counts": {"on the host": "", "on the device": ""},
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
        "mlp": "--recompute-granularity selective --recompute-modules mlp layernorm",
        "activations": "--recompute-granularity selective --recompute-modules core_attn layernorm mlp_act",
        "experts": "--recompute-granularity selective --recompute-modules moe core_attn",
        "of experts": "--recompute-granularity selective --recompute-modules moe_act layernorm shared_experts",
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
    "micro batch": {"1": "--micro-batch-size 1", "2": "--micro-batch-size 2", "3": "--micro-batch-size 3"},
    "regions": {"plain": "", "fused": "--compile"},
}


def _is_there(choice: str) -> bool:
    """Whether the flags of a choice, and the parts it recomputes, are not those of a deleted extension."""
    words = choice.split()
    gone = any(home_of(word) and word not in spelling_table() for word in words)
    gone |= "--data-parallel-sharding-strategy" in words and words[-1] not in SHARDING_STRATEGIES
    return not gone and ("mla_up_proj" not in words or "mla_up_proj" in RECOMPUTED_PARTS)


for _options in (*MODEL_FACTORS.values(), *LAYOUT_FACTORS.values()):
    for _name in [name for name, choice in _options.items() if not _is_there(choice)]:
        del _options[_name]
FACTORS = LAYOUT_FACTORS | MODEL_FACTORS
FIRST = {name: next(iter(options)) for name, options in FACTORS.items()}
OF_EXPERTS = ("ep", "etp", "dispatcher", "expert messages", "row counts", "routing", "balancing")
"""Factors that only models with experts have."""


@dataclass(frozen=True)
class Combination:
    """One choice of each factor, in the order of `FACTORS`."""

    choices: tuple[str, ...]

    @classmethod
    def of(cls, **changed: str) -> Combination:
        """The first choice of every factor, but for those named (underscores stand for spaces)."""
        named = {name.replace("_", " "): choice for name, choice in changed.items()}
        assert named.keys() <= FACTORS.keys(), named
        return cls(tuple(named.get(name, first) for name, first in FIRST.items()))

    @classmethod
    def read(cls, line: str) -> Combination:
        """The combination of which `line` is the string."""
        return cls.of(**dict(part.split("=") for part in line.split(", ")))

    @property
    def is_there(self) -> bool:
        """Whether all its choices are there: those of a deleted extension are not."""
        return all(choice in options for choice, options in zip(self.choices, FACTORS.values(), strict=True))

    @property
    def world_size(self) -> int:
        return int(self["world"])

    @property
    def items(self) -> Set[tuple[str, str]]:
        return dict(zip(FACTORS, self.choices, strict=True)).items()

    @property
    def argv(self) -> list[str]:
        moe = self["mlp"] != "dense"
        named = [options[self[name]] for name, options in FACTORS.items() if moe or name not in OF_EXPERTS]
        line = " ".join([COMMON, *named])
        return shlex.split(line) if "'" in line else line.split()  # shlex takes a fifth of the search

    def changed(self, factor: str, choice: str) -> Combination:
        place = list(FACTORS).index(factor)
        return Combination((*self.choices[:place], choice, *self.choices[place + 1 :]))

    @property
    def alone(self) -> Combination:
        """The same model on one process."""
        return Combination.of(**{name: self[name] for name in MODEL_FACTORS})

    def __getitem__(self, factor: str) -> str:
        return self.choices[list(FACTORS).index(factor)]

    def __str__(self) -> str:
        return ", ".join(f"{name}={self[name]}" for name in FACTORS if name == "world" or self[name] != FIRST[name])
