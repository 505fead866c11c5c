#!/usr/bin/env bash
# Kimi Linear 48B-A3B (arXiv 2510.26692), pretraining: for each layer with multi-latent attention, which has no position
# embedding, there are three layers with Kimi Delta Attention. All layers except the first have DeepSeek-V3's experts.
# The optimizer is Muon.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 64 scripts/train_gpt_slurm.sh scripts/recipes/kimi_linear.sh
#   bash scripts/recipes/kimi_linear.sh --dry-run
#
# The shapes are those of the published config.json. The 5.7T tokens in sequences of 4,096, batches of 32M tokens,
# MuonClip, WSD and the peak learning rate of 1.1e-3 are quoted from memory of the report; check them before a real run.
# The warm-up, the decay, the expert bias update rate (DeepSeek-V3's) and the initial weights are our own choices.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

[[ "${SIZE:=48b-a3b}" == 48b-a3b ]] || unknown_size "$SIZE" "48b-a3b"
EP="${EP:-8}" GPUS=512
model=(
    --num-layers 27 --hidden-size 2304 --ffn-hidden-size 9216
    --experimental-attention-variant kimi_delta_attention --linear-attention-freq "(([1]*3+[0])*6+[1]*2+[0])"
    --kda-num-heads 32 --kda-head-dim 128 --kda-conv-kernel-dim 4
    --num-attention-heads 32 --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --latent-norm-epsilon 1e-6
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --no-rope-freq 1
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts 256 --moe-layer-freq "([0]+[1]*26)" --moe-ffn-hidden-size 1024
    --moe-shared-expert-intermediate-size 1024 --moe-router-topk 8
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.446
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type none
)
# In samples of 4,096 tokens: 5.7T tokens, 500 steps of warm-up, and a decay over the last 10 %.
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2 --muon-coefficient-type simple
    --qk-clip --qk-clip-threshold 100
    --global-batch-size 8192 --train-samples 1391601563 --lr-warmup-samples 4096000
    --lr 1.1e-3 --min-lr 1.1e-4
    --lr-decay-style WSD --lr-wsd-decay-style cosine --lr-decay-samples 1391601563 --lr-wsd-decay-samples 139160156
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe kimi_linear 163840 "$@"
