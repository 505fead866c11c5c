#!/usr/bin/env bash
# Apertus (arXiv 2509.14233, section 2): dense layers with the xIELU activation function and QK norms. Training uses
# AdEMAMix and the Goldfish loss, which drops one of every 50 tokens.
#
#   SIZE=8b DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json SEPARATE_DOCUMENTS=1 \
#       sbatch --nodes 64 scripts/train_gpt_slurm.sh scripts/recipes/apertus.sh
#   SIZE=70b bash scripts/recipes/apertus.sh --dry-run
#
# SIZE is 8b (default) or 70b. The shapes are those of the published config.json files. The following settings come from
# the report and the published launch scripts: 15T tokens in 4,096-token sequences, in which tokens attend only to their
# own document; rotary base 500,000 with scaled frequencies; a learning rate of 1.1e-4 (8b) or 1.5e-5 (70b) that decays
# to a tenth along a square root, starting at 13.5T tokens; a batch of 4.2M (8b) or 8.4M tokens (70b) that doubles;
# AdEMAMix with alpha 8 and beta3 0.9999, which ramp up over 100,000 steps; Goldfish with k and h 50; weight decay 0.1,
# clipping at 0.1, and initial weights. We chose the point at which the batch doubles (8T tokens), the warm-up and
# Adam's epsilon. Our own hash selects the tokens that the Goldfish loss drops.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

case "${SIZE:=8b}" in
    8b) shape=(32 4096 21504 32) batch=1024 lr=1.1e-4 TP="${TP:-2}" GPUS=512 ;;
    70b) shape=(80 8192 43008 64) batch=2048 lr=1.5e-5 TP="${TP:-4}" PP="${PP:-8}" GPUS=2048 ;;
    *) unknown_size "$SIZE" "8b and 70b" ;;
esac
model=(
    --num-layers "${shape[0]}" --hidden-size "${shape[1]}" --ffn-hidden-size "${shape[2]}" --activation-func xielu
    --num-attention-heads "${shape[3]}" --group-query-attention --num-query-groups 8 --qk-layernorm
    --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8
    --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.008944
    --loss-func goldfish --goldfish-k 50 --goldfish-h 50
)
# In samples of 4,096 tokens: 15T tokens, 1.5T of them with a falling learning rate; one step of the batch at 8T.
training=(
    --optimizer ademamix --ademamix-alpha 8 --ademamix-beta3 0.9999
    --ademamix-alpha-warmup 100000 --ademamix-beta3-warmup 100000
    --global-batch-size "$((2 * batch))" --rampup-batch-size "$batch" "$batch" 1953125000 --train-samples 3662109375
    --lr "$lr" --min-lr "$(awk "BEGIN { print $lr / 10 }")" --lr-warmup-samples "$((2000 * batch))"
    --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-decay-samples 3662109375 --lr-wsd-decay-samples 366210938
    --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 0.1
)
run_recipe "apertus_$SIZE" 131072 "$@"
