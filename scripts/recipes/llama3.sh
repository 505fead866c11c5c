#!/usr/bin/env bash
# Llama 3 (arXiv 2407.21783, tables 3 and 4, section 3.4), pretraining with sequences of 8,192 tokens.
#
#   SIZE=8b DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 16 scripts/train_gpt_slurm.sh scripts/recipes/llama3.sh
#   SIZE=405b bash scripts/recipes/llama3.sh --dry-run
#
# SIZE is 8b (default), 70b or 405b. Settings that the paper states only for 405B are used for all sizes: 8,000 warm-up
# steps, a cosine down to a hundredth of the peak, and a batch of 8M tokens. In the paper the batch grows to 16M tokens
# after half of the run; here it stays at 8M (1,024 samples), so 1.8M steps are 15T tokens. As in the paper, tokens
# attend only to their own document.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

case "${SIZE:=8b}" in
    8b) shape=(32 4096 14336 32) lr=3e-4 TP="${TP:-4}" GPUS=128 ;;
    70b) shape=(80 8192 28672 64) lr=1.5e-4 TP="${TP:-8}" PP="${PP:-4}" GPUS=512 ;;
    405b) shape=(126 16384 53248 128) lr=8e-5 TP="${TP:-8}" PP="${PP:-16}" GPUS=8192 ;;
    *) unknown_size "$SIZE" "8b, 70b and 405b" ;;
esac
model=(
    --num-layers "${shape[0]}" --hidden-size "${shape[1]}" --ffn-hidden-size "${shape[2]}"
    --num-attention-heads "${shape[3]}" --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
training=(
    --global-batch-size 1024 --train-iters 1800000
    --lr "$lr" --lr-decay-style cosine --lr-warmup-iters 8000
    --min-lr "$(awk "BEGIN { print $lr / 100 }")"
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
SEPARATE_DOCUMENTS=1
run_recipe "llama3_$SIZE" 128256 "$@"
