#!/usr/bin/env bash
# SmolLM3 3B, stages 1 to 3 of pretraining with sequences of 4,096 tokens (the team's report of July 2025 and its
# training files): every fourth layer has no rotary embedding, embeddings are tied, and tokens attend only to their own
# document.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 48 scripts/train_gpt_slurm.sh scripts/recipes/smollm3.sh
#   bash scripts/recipes/smollm3.sh --dry-run
#
# The learning rate of 2e-4 warms up over 2,000 steps, stays constant, and decays linearly to 0 over the last tenth of
# the 11.2T tokens. A batch has 2.36M tokens (576 samples). Weight decay does not apply to embeddings.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

if [[ "${SIZE:=3b}" != 3b ]]; then
    unknown_size "$SIZE" 3b
fi
TP="${TP:-2}" GPUS=384
model=(
    --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008
    --num-attention-heads 16 --group-query-attention --num-query-groups 4 --no-rope-freq 4
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 50000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
training=(
    --global-batch-size 576 --train-iters 4747000
    --lr 2e-4 --min-lr 0 --lr-warmup-iters 2000
    --lr-decay-style WSD --lr-wsd-decay-style linear --lr-decay-iters 4747000 --lr-wsd-decay-iters 474700
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --weight-decay-on matrices --clip-grad 1.0
)
MICRO_BATCH_SIZE="${MICRO_BATCH_SIZE:-3}"
SEPARATE_DOCUMENTS=1
run_recipe smollm3 128256 "$@"
