#!/usr/bin/env bash
# MiniMax M2: 62 layers of width 3072 with full attention and 48 heads of 128 channels, half of them rotated. One norm
# covers all queries of a token and another covers all keys. In every layer, each token uses 8 of 256 experts, chosen by
# sigmoid scores plus a bias.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 64 scripts/train_gpt_slurm.sh scripts/recipes/minimax_m2.sh
#   bash scripts/recipes/minimax_m2.sh --dry-run
#
# The shapes are those of the published config.json (230B parameters, 10B active). It also lists three multi-token
# prediction modules. The published weights lack them, and nothing is known about their training; --mtp-num-layers 3
# adds them. No report describes the pretraining. Sequence length, number of tokens, batch size, learning rate,
# optimizer and load balancing are common choices of ours. So is the rotary base of 10,000: the base in config.json,
# 5,000,000, is for 196,608 tokens.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

if [[ "${SIZE:=230b-a10b}" != 230b-a10b ]]; then
    unknown_size "$SIZE" 230b-a10b
fi
PP="${PP:-8}" EP="${EP:-32}" GPUS=512
model=(
    --num-layers 62 --hidden-size 3072 --ffn-hidden-size 1536 --kv-channels 128
    --num-attention-heads 48 --group-query-attention --num-query-groups 8 --qk-layernorm --qk-layernorm-scope all
    --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 10000 --rotary-percent 0.5
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts 256 --moe-ffn-hidden-size 1536 --moe-router-topk 8 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
)
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --global-batch-size 4096 --train-samples 2441406250 --lr-warmup-samples 8192000
    --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe minimax_m2 200064 "$@"
