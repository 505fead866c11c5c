#!/usr/bin/env bash
# Kimi K2 (arXiv 2507.20534, sections 2.1, 2.3 and 2.5): the layers of DeepSeek-V3, but with 64 heads, 384 experts in a
# single group, and only the first layer dense. The optimizer is Muon.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 256 scripts/train_gpt_slurm.sh scripts/recipes/kimi_k2.sh
#   bash scripts/recipes/kimi_k2.sh --dry-run
#
# QK-clip bounds attention logits at 100; it requires attention in plain torch. The report gives no balancing-loss
# coefficient, so only the score bias balances the experts, with DeepSeek-V3's update rate. A batch has 67M tokens.
# After 500 warm-up steps, the learning rate is constant for 10T tokens, then decays to a tenth along a cosine over 5.5T
# tokens.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

if [[ "${SIZE:=1t}" != 1t ]]; then
    unknown_size "$SIZE" 1t
fi
PP="${PP:-16}" EP="${EP:-16}" GPUS=2048
model=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
    --num-attention-heads 64 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rope-type rope --rotary-base 50000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts 384 --moe-layer-freq "([0]+[1]*60)" --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.827
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type none
)
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2 --muon-coefficient-type simple
    --qk-clip --qk-clip-threshold 100
    --global-batch-size 16384 --train-samples 3784179688 --lr-warmup-samples 8192000
    --lr 2e-4 --min-lr 2e-5
    --lr-decay-style WSD --lr-wsd-decay-style cosine --lr-decay-samples 3784179688 --lr-wsd-decay-samples 1342773438
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe kimi_k2 163840 "$@"
