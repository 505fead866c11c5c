#!/usr/bin/env bash
# Falcon-H1 0.5B (arXiv 2507.22448), pretraining: each layer runs attention and Mamba-2 side by side. Fixed multipliers
# scale their inputs and outputs, the keys, the MLP, the embeddings and the logits.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 8 scripts/train_gpt_slurm.sh scripts/recipes/falcon_h1.sh
#   bash scripts/recipes/falcon_h1.sh --dry-run
#
# SIZE is 0.5b. Shapes and multipliers are those of the published config.json. The 2.5T tokens in sequences of 16,384,
# and the WSD schedule that decays the learning rate to an eighth, are quoted from memory of the report; check them
# before a real run. Batch size, peak learning rate, warm-up, decay length, weight decay, clipping and initial weights
# are our own choices.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

[[ "${SIZE:=0.5b}" == 0.5b ]] || unknown_size "$SIZE" "0.5b"
GPUS=64
model=(
    --num-layers 36 --hidden-size 1024 --ffn-hidden-size 2048
    --num-attention-heads 8 --group-query-attention --num-query-groups 2 --kv-channels 64
    --experimental-attention-variant attention_and_mamba2
    --mamba-num-heads 24 --mamba-head-dim 64 --mamba-num-groups 1 --mamba-state-dim 128 --no-mamba-norm
    --mamba-multipliers 0.3535533905932738 0.25 0.3535533905932738 0.5 0.3535533905932738
    --mamba-input-multiplier 1.25 --mamba-output-multiplier 0.23570226039551587
    --attention-key-multiplier 0.39062499999999994 --attention-output-multiplier 0.9375
    --activation-func scaled_swiglu --swiglu-multipliers 0.8838834764831844 0.5859375
    --embedding-multiplier 5.656854249492381 --logits-scaling 25.6
    --seq-length 16384 --max-position-embeddings 16384 --position-embedding-type rope --rotary-base 100000000000
    --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
# In samples of 16,384 tokens: 2.5T tokens, 4B of them warm-up and 250B decay.
training=(
    --global-batch-size 256 --train-samples 152587891 --lr-warmup-samples 244141
    --lr 5e-4 --min-lr 6.25e-5 --lr-decay-style WSD --lr-wsd-decay-style exponential
    --lr-decay-samples 152587891 --lr-wsd-decay-samples 15258789
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe "falcon_h1_$SIZE" 32784 "$@"
