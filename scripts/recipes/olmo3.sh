#!/usr/bin/env bash
# OLMo 3 (arXiv 2512.13961), pretraining with sequences of 8,192 tokens: three of every four layers attend to a window
# of 4,096 tokens. Norms apply to the sublayers' outputs. One norm covers all queries of a token and another covers all
# keys.
#
#   SIZE=7b DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 64 scripts/train_gpt_slurm.sh scripts/recipes/olmo3.sh
#   SIZE=32b bash scripts/recipes/olmo3.sh --dry-run
#
# SIZE is 7b (default) or 32b. The shapes are those of the published config.json files. The learning rates (3e-4 and
# 6e-4), the batches (4M and 8M tokens), the 2,000 warm-up steps, the cosine down to a tenth and the z-loss of 1e-5
# follow the published training scripts, which apply no weight decay to embeddings. The 7b uses 5.9T tokens and the 32b
# 5.5T.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

case "${SIZE:=7b}" in
    7b) shape=(32 4096 11008 32 32) batch=512 iters=1410000 lr=3e-4 TP="${TP:-2}" GPUS=512 ;;
    32b) shape=(64 5120 27648 40 8) batch=1024 iters=656000 lr=6e-4 TP="${TP:-8}" GPUS=1024 ;;
    *) unknown_size "$SIZE" "7b and 32b" ;;
esac
model=(
    --num-layers "${shape[0]}" --hidden-size "${shape[1]}" --ffn-hidden-size "${shape[2]}"
    --num-attention-heads "${shape[3]}" --group-query-attention --num-query-groups "${shape[4]}"
    --norm-placement output --qk-layernorm --qk-layernorm-scope all --window-size 4096 --window-attn-skip-freq 4
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02 --z-loss-coeff 1e-5
)
training=(
    --global-batch-size "$batch" --train-iters "$iters" --lr-warmup-iters 2000
    --lr "$lr" --lr-decay-style cosine --min-lr "$(awk "BEGIN { print $lr / 10 }")"
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --weight-decay-on matrices --clip-grad 1.0
)
run_recipe "olmo3_$SIZE" 100278 "$@"
