#!/usr/bin/env bash
# Granite 4.0 H (model cards of ibm-granite/granite-4.0-h-tiny-base and -h-small-base, and their published config.json),
# stage I of four: for each attention layer, which has no position embedding, there are nine Mamba-2 layers. Every layer
# has small experts and a shared expert. Multipliers scale the embeddings, the residual stream, attention and the
# logits.
#
#   SIZE=small DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 32 scripts/train_gpt_slurm.sh scripts/recipes/granite4.sh
#   SIZE=tiny bash scripts/recipes/granite4.sh --dry-run
#
# SIZE is tiny (default) or small. Stage I has 15T tokens, with a warm-up followed by IBM's power schedule, in which the
# learning rate falls as a power of the number of tokens; here it stays constant after the warm-up. Batch size, learning
# rate, weight decay, warm-up and balancing-loss coefficient are our own choices, because none is published. Initial
# weights have the standard deviation given in config.json.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

case "${SIZE:=tiny}" in
    tiny) shape=(1536 12 4 48 64 512 6 1024 6) EP="${EP:-8}" GPUS=128 ;;
    small) shape=(4096 32 8 128 72 768 10 1536 16) PP="${PP:-4}" EP="${EP:-8}" GPUS=256 ;;
    *) unknown_size "$SIZE" "tiny and small" ;;
esac
model=(
    --num-layers 40 --hidden-size "${shape[0]}" --num-attention-heads "${shape[1]}"
    --group-query-attention --num-query-groups "${shape[2]}" --softmax-scale 0.0078125
    --experimental-attention-variant mamba2 --linear-attention-freq "([1]*5+[0]+([1]*9+[0])*3+[1]*4)"
    --mamba-num-heads "${shape[3]}" --mamba-head-dim 64 --mamba-num-groups 1 --mamba-state-dim 128
    --mamba-conv-kernel-dim 4
    --num-experts "${shape[4]}" --moe-ffn-hidden-size "${shape[5]}" --moe-router-topk "${shape[6]}"
    --moe-shared-expert-intermediate-size "${shape[7]}" --moe-aux-loss-coeff 1e-2
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type none
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --embedding-multiplier 12 --residual-multiplier 0.22 --logits-scaling "${shape[8]}"
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1
)
# In samples of 4,096 tokens: 15T tokens, and 2,000 steps of warm-up.
training=(
    --global-batch-size 2048 --train-samples 3662109375 --lr-warmup-samples 4096000
    --lr 3e-4 --lr-decay-style constant
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe "granite4_$SIZE" 100352 "$@"
