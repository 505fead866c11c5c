#!/usr/bin/env bash
# Mixtral 8x7B (arXiv 2401.04088, table 1): 32 layers of width 4096, with 32 query heads and 8 key/value heads. In each
# layer, every token uses 2 of 8 experts of width 14336. Vocabulary 32,000, RoPE base 1,000,000, 46.7B parameters, 12.9B
# active.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.model \
#       sbatch --nodes 8 scripts/train_gpt_slurm.sh scripts/mixtral_8x7b.sh
#   bash scripts/mixtral_8x7b.sh --dry-run --world-size 64
#
# Settings in capitals come from the environment (DATA_PATH and others: scripts/env.sh); further flags override those
# below. The model's training settings are not published: sequence length, batch size and learning rate are common
# choices for its size, and the balancing-loss coefficient comes from its published configuration.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

TP="${TP:-1}"
SAVE="${SAVE:-runs/mixtral_8x7b}"

model=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 32768
    --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02
)
experts=(
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.02
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
)
parallel=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "${PP:-4}"
    --expert-model-parallel-size "${EP:-8}" --expert-tensor-parallel-size "${ETP:-1}"
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16
)
if ((TP > 1)); then
    parallel+=(--sequence-parallel)
fi
training=(
    --micro-batch-size "${MICRO_BATCH_SIZE:-1}" --global-batch-size "${GLOBAL_BATCH_SIZE:-1024}"
    --train-iters "${TRAIN_ITERS:-500000}"
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
data_flags 32000 Llama2Tokenizer
output=(
    --save "$SAVE" --load "$SAVE" --save-interval 1000 --eval-interval 1000 --eval-iters 10
    --log-interval 10 --tensorboard-dir "$SAVE/tensorboard"
)

launch_training "${model[@]}" "${experts[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${output[@]}" "$@"
