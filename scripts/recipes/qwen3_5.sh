#!/usr/bin/env bash
# Qwen3.5 (published config.json files, text_config; the defaults of the family's configurations in transformers are
# those of 9B and 35B-A3B), pretraining of the text models: for each layer with gated attention there are three gated
# delta net layers, as in Qwen3-Next. The models are dense or have experts, and have one multi-token prediction module.
#
#   SIZE=397b-a17b DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 128 scripts/train_gpt_slurm.sh scripts/recipes/qwen3_5.sh
#   SIZE=9b bash scripts/recipes/qwen3_5.sh --dry-run
#
# SIZE is 9b, 35b-a3b (default) or 397b-a17b. The shapes are those of config.json; images and their encoder are left
# out. The published rotary base of 10,000,000 is for a context of 262,144 tokens; here sequences have 4,096 tokens and
# the base is 10,000, as in the general stage of Qwen3. Number of tokens, learning rate, batch size, weight decay,
# balancing-loss coefficient and multi-token prediction factor are our own choices, because none is published. Weight
# decay applies to norm weights too, as in Qwen3-Next.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

recompute=() experts=(
    --moe-shared-expert-gate --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3 --num-experts
)
case "${SIZE:=35b-a3b}" in
    9b) shape=(32 4096 12288 16 4 32) experts=() TP="${TP:-2}" GPUS=128 ;;
    35b-a3b)
        shape=(40 2048 512 16 2 32) PP="${PP:-2}" EP="${EP:-8}" GPUS=128
        experts+=(256 --moe-ffn-hidden-size 512 --moe-router-topk 8 --moe-shared-expert-intermediate-size 512)
        ;;
    397b-a17b)
        shape=(60 4096 1024 32 2 64) PP="${PP:-8}" EP="${EP:-8}" GPUS=1024
        recompute=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
        experts+=(512 --moe-ffn-hidden-size 1024 --moe-router-topk 10 --moe-shared-expert-intermediate-size 1024)
        ;;
    *) unknown_size "$SIZE" "9b, 35b-a3b and 397b-a17b" ;;
esac
model=(
    --num-layers "${shape[0]}" --hidden-size "${shape[1]}" --ffn-hidden-size "${shape[2]}" --kv-channels 256
    --num-attention-heads "${shape[3]}" --group-query-attention --num-query-groups "${shape[4]}"
    --qk-layernorm --attention-output-gate
    --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4
    --linear-num-key-heads 16 --linear-num-value-heads "${shape[5]}"
    --linear-key-head-dim 128 --linear-value-head-dim 128
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000
    --rotary-percent 0.25 --normalization RMSNorm --apply-layernorm-1p --norm-epsilon 1e-6 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    "${experts[@]}" --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
)
# In samples of 4,096 tokens: 15T tokens, and 2,000 steps of warm-up.
training=(
    "${recompute[@]}"
    --global-batch-size 2560 --train-samples 3662109375 --lr-warmup-samples 5120000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0
    --weight-decay 0.1 --weight-decay-on matrices embeddings norms
)
run_recipe "qwen3_5_$SIZE" 248320 "$@"
