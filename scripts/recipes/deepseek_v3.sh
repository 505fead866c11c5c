#!/usr/bin/env bash
# DeepSeek-V3 (arXiv 2412.19437, section 4.2): 61 layers of width 7168 with multi-latent attention. The first 3 layers
# are dense. Every other layer has a shared expert, which processes every token, and 256 experts of width 2048. Each
# token uses 8 of them, from at most 4 of 8 groups. Scores are sigmoids; a bias and a small loss within each sequence
# balance the experts. One multi-token prediction module predicts one further token.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 256 scripts/train_gpt_slurm.sh scripts/recipes/deepseek_v3.sh
#   bash scripts/recipes/deepseek_v3.sh --dry-run
#
# Unlike in the paper, training is in bf16. On Hopper, --fp8-format e4m3 --fp8-recipe blockwise adds the paper's fp8,
# except for the weight gradients of experts. Whole layers are recomputed. The multi-token prediction factor stays at
# 0.3 (in the paper it is 0.1 for the last 4.8T tokens), and the bias update rate is constant too (in the paper it is 0
# for the last 0.5T tokens). The batch grows from 3,072 to 15,360 sequences over 469B tokens. The learning rate is
# constant up to 10T tokens, then decays to a tenth over 4.3T tokens and stays there.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

if [[ "${SIZE:=671b}" != 671b ]]; then
    unknown_size "$SIZE" 671b
fi
PP="${PP:-16}" EP="${EP:-64}" GPUS=2048
model=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
    --num-attention-heads 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rope-type rope --rotary-base 10000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.006
    --num-experts 256 --moe-layer-freq "([0]*3+[1]*58)" --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
)
# In samples of 4,096 tokens: 14.8T tokens, ramp over 469B, warm-up over 2,000 steps of the smallest batch, decay from
# 10T to 14.3T.
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --global-batch-size 15360 --rampup-batch-size 3072 1536 114501953 --train-samples 3613281250
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-warmup-samples 6144000
    --lr-decay-style WSD --lr-wsd-decay-style cosine --lr-decay-samples 3491210938 --lr-wsd-decay-samples 1049804688
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe deepseek_v3 129280 "$@"
