#!/usr/bin/env bash
# Llama 3 8B with the settings of arXiv 2407.21783 (table 3): 32 layers, width 4096, FFN 14336, 32 heads over 8
# key/value heads, vocabulary 128,256, RoPE base 500,000, sequences of 8,192, peak learning rate 3e-4.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 16 scripts/train_gpt_slurm.sh scripts/llama3_8b.sh
#   bash scripts/llama3_8b.sh --dry-run --world-size 128
#
# Settings in capitals come from the environment (DATA_PATH and its kin: scripts/env.sh); further flags win over those
# below. What the paper states for its 405B only is taken from there: 8,000 warm-up steps, a cosine down to a hundredth
# of the peak, and a batch of 8M tokens (1,024 samples); 1.8M steps are then 15T tokens.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

TP="${TP:-4}"
SAVE="${SAVE:-runs/llama3_8b}"

model=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02
)
parallel=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "${PP:-1}"
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
if ((TP > 1)); then
    parallel+=(--sequence-parallel)
fi
training=(
    --micro-batch-size "${MICRO_BATCH_SIZE:-1}" --global-batch-size "${GLOBAL_BATCH_SIZE:-1024}"
    --train-iters "${TRAIN_ITERS:-1800000}"
    --lr 3e-4 --min-lr 3e-6 --lr-decay-style cosine --lr-warmup-iters 8000
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
data_flags 128256 HuggingFaceTokenizer
output=(
    --save "$SAVE" --load "$SAVE" --save-interval 1000 --eval-interval 1000 --eval-iters 10
    --log-interval 10 --tensorboard-dir "$SAVE/tensorboard"
)

launch_training "${model[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${output[@]}" "$@"
