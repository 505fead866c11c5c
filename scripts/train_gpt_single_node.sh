#!/usr/bin/env bash
# Trains a 1.3B GPT on one machine: tensor parallel over neighbouring GPUs, data parallel over the rest, ZeRO-1.
#
#   DATA_PATH=corpus_text_document TOKENIZER_TYPE=SentencePieceTokenizer TOKENIZER_MODEL=tokenizer.model VOCAB_SIZE=32000 \
#       bash scripts/train_gpt_single_node.sh
#
# Settings in capitals come from the environment (DATA_PATH and other variables of scripts/env.sh). Further flags are
# passed on and override those below: `--train-iters 100`, or `--dry-run --world-size 8` to see the layout without
# running it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

TP="${TP:-2}"
PP="${PP:-1}"
SAVE="${SAVE:-runs/gpt_1.3b}"

model=(
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16
    --seq-length 2048 --max-position-embeddings 2048
    --attention-dropout 0.0 --hidden-dropout 0.0
)
parallel=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
if ((TP > 1)); then
    parallel+=(--sequence-parallel)
fi
training=(
    --micro-batch-size "${MICRO_BATCH_SIZE:-4}" --global-batch-size "${GLOBAL_BATCH_SIZE:-512}"
    --train-iters "${TRAIN_ITERS:-50000}"
    --lr 2.0e-4 --min-lr 2.0e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
)
data_flags "${VOCAB_SIZE:-50257}" GPT2BPETokenizer
output=(--save "$SAVE" --load "$SAVE" --save-interval 1000 --eval-interval 1000 --eval-iters 10 --log-interval 10)

launch_training "${model[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${output[@]}" "$@"
