#!/usr/bin/env bash
# GLM-5 (arXiv 2602.15763, and the configuration of zai-org/GLM-5 in transformers): multi-latent attention with heads of
# 256 channels and the sparse attention of DeepSeek-V3.2. Each token uses a shared expert and 8 of 256 experts, chosen
# by sigmoid scores plus a bias. One multi-token prediction module predicts one further token. 744B parameters, of which
# 40B are active.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 256 scripts/train_gpt_slurm.sh scripts/recipes/glm5.sh --finetune --load MID_TRAINING
#   bash scripts/recipes/glm5.sh --dry-run
#
# This recipe is the sparse stage at the end of mid-training: 20B tokens in sequences of 202,752 tokens. It follows
# 28.5T tokens with dense attention (the flags here without the dsa flags, with --seq-length 4096), and a warm-up that
# trains only the indexer (deepseek_v32.sh shows the flags). No public file confirms the 20B tokens, the sequence
# length, or the rotary base of 1,000,000. The report trains with Muon and orthogonalizes each head of the
# up-projections separately, which --optimizer muon does not do. It also has three multi-token prediction modules that
# share their weights; this recipe has one. Batch size, learning rate, multi-token prediction factor and balancing loss
# are our own choices, because we found no published values.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

[[ "${SIZE:=744b-a40b}" == 744b-a40b ]] || unknown_size "$SIZE" "744b-a40b"
PP="${PP:-16}" CP="${CP:-8}" EP="${EP:-64}" GPUS=2048
model=(
    --num-layers 78 --hidden-size 6144 --ffn-hidden-size 12288
    --num-attention-heads 64 --multi-latent-attention --q-lora-rank 2048 --kv-lora-rank 512
    --qk-head-dim 192 --qk-pos-emb-head-dim 64 --v-head-dim 256 --qk-layernorm --latent-norm-epsilon 1e-6
    --experimental-attention-variant dsa --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
    --dsa-indexer-use-sparse-loss --dsa-indexer-loss-coeff 1
    --seq-length 202752 --max-position-embeddings 202752 --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts 256 --moe-layer-freq "([0]*3+[1]*75)" --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
)
# In samples of 202,752 tokens: 20B tokens.
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2
    --global-batch-size 64 --train-samples 98643 --lr 1e-5 --min-lr 1e-5 --lr-decay-style constant
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe glm5 154880 "$@"
