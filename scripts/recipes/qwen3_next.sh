#!/usr/bin/env bash
# Qwen3-Next (published config.json of Qwen/Qwen3-Next-80B-A3B-Instruct, and the announcement of September 2025,
# qwenlm.github.io/blog/qwen3_next), pretraining on 15T tokens: for each layer with gated attention there are three
# gated delta net layers. Each token uses a shared expert and 10 of 512 experts. The model has one multi-token
# prediction module.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 32 scripts/train_gpt_slurm.sh scripts/recipes/qwen3_next.sh
#   bash scripts/recipes/qwen3_next.sh --dry-run
#
# SIZE is 80b-a3b. The shapes are those of config.json. The published rotary base of 10,000,000 is for a context of
# 262,144 tokens; here sequences have 4,096 tokens and the base is 10,000, as in the general stage of Qwen3. Learning
# rate, batch size, weight decay and multi-token prediction factor are common choices of ours, because none is
# published. Experts are balanced over the global batch, as in Qwen3, with the coefficient from config.json. Weight
# decay applies to norm weights too, as the announcement says.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

case "${SIZE:=80b-a3b}" in
    80b-a3b) PP="${PP:-4}" EP="${EP:-32}" GPUS=256 ;;
    *) unknown_size "$SIZE" "80b-a3b" ;;
esac
model=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 5632 --kv-channels 256
    --num-attention-heads 16 --group-query-attention --num-query-groups 2 --qk-layernorm --attention-output-gate
    --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4
    --linear-num-key-heads 16 --linear-num-value-heads 32 --linear-key-head-dim 128 --linear-value-head-dim 128
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000
    --rotary-percent 0.25 --normalization RMSNorm --apply-layernorm-1p --norm-epsilon 1e-6 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts 512 --moe-ffn-hidden-size 512 --moe-router-topk 10
    --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate
    --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
)
training=(
    --global-batch-size 2048 --train-samples 3662109375 --lr-warmup-samples 4096000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0
    --weight-decay 0.1 --weight-decay-on matrices embeddings norms
)
run_recipe "qwen3_next_$SIZE" 151936 "$@"
