#!/usr/bin/env bash
# GPT-3 175B with the settings of arXiv 2005.14165 (table 2.1, section 2.3 and appendix B), on 1,024 GPUs as TP 8 x PP
# 16 x DP 8: 300B tokens, batch 3.2M tokens after a ramp over 12B, cosine decay over 260B.
#
#   DATA_PATH=pile_text_document VOCAB_FILE=vocab.json MERGE_FILE=merges.txt \
#       sbatch --nodes 128 scripts/train_gpt_slurm.sh scripts/gpt3_175b.sh
#   bash scripts/gpt3_175b.sh --dry-run --world-size 1024
#
# Settings in capitals come from the environment (DATA_PATH and others: scripts/env.sh); further flags override those
# below. Attention is dense in every layer, whereas the paper alternates dense and banded sparse attention.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

SAVE="${SAVE:-runs/gpt3_175b}"

model=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048 --position-embedding-type learned_absolute
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.006
)
parallel=(
    --tensor-model-parallel-size "${TP:-8}" --pipeline-model-parallel-size "${PP:-16}"
    --sequence-parallel --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity selective
)
# In samples of 2,048 tokens: 300B tokens, ramp over 12B, warm-up over 375M, decay over 260B.
training=(
    --micro-batch-size "${MICRO_BATCH_SIZE:-1}" --global-batch-size 1536 --rampup-batch-size 16 16 5859375
    --train-samples 146484375
    --lr 0.6e-4 --min-lr 0.6e-5 --lr-decay-style cosine --lr-warmup-samples 183105 --lr-decay-samples 126953125
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
data_flags 50257 GPT2BPETokenizer
output=(
    --save "$SAVE" --load "$SAVE" --save-interval 1000 --eval-interval 1000 --eval-iters 10
    --log-interval 10 --tensorboard-dir "$SAVE/tensorboard"
)

launch_training "${model[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${output[@]}" "$@"
