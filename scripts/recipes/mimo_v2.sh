#!/usr/bin/env bash
# MiMo-V2-Flash (Xiaomi, 2026): 48 layers with keys of 192 channels and values of 128. The first layer and every sixth
# layer attend to all tokens. The others attend to a window of 128 tokens and have attention sinks, twice as many
# key/value heads and another rotary base. After one dense layer, each token uses 8 of 256 experts, chosen by sigmoid
# scores plus a bias.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 64 scripts/train_gpt_slurm.sh scripts/recipes/mimo_v2.sh
#   bash scripts/recipes/mimo_v2.sh --dry-run
#
# The shapes (309B parameters, 15B active as published) are the defaults of the class in transformers, whose windows
# include one token more. The settings are quoted from memory of the report; check them before a real run: 27T tokens of
# 32,768-token sequences, AdamW with a peak learning rate of 3.2e-4, and a balancing loss of 1e-5 within sequences.
# Batch size, warm-up, decay and weight decay are our own choices. Training is in bf16 here and in fp8 in the report.
# Multi-token prediction is left out: the published module has a dense MLP and a window, whereas the last layer has
# experts and no window.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

if [[ "${SIZE:=309b-a15b}" != 309b-a15b ]]; then
    unknown_size "$SIZE" 309b-a15b
fi
TP="${TP:-4}" PP="${PP:-8}" EP="${EP:-32}" GPUS=1024
model=(
    --num-layers 48 --hidden-size 4096 --ffn-hidden-size 16384 --kv-channels 192 --value-channels 128
    --num-attention-heads 64 --group-query-attention --num-query-groups 4 --attention-value-scale 0.707
    --window-size 128 --window-attn-skip-freq "([0]+[1]*4+[0]+([1]*5+[0])*7)"
    --window-num-query-groups 8 --window-softmax-type learnable
    --seq-length 32768 --max-position-embeddings 32768
    --position-embedding-type rope --rotary-base 5000000 --window-rotary-base 10000 --rotary-percent 0.334
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts 256 --moe-layer-freq "([0]+[1]*47)" --moe-ffn-hidden-size 2048 --moe-router-topk 8
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-5
)
# In samples of 32,768 tokens: 27T tokens.
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --global-batch-size 1024 --train-samples 823974610 --lr-warmup-samples 2048000
    --lr 3.2e-4 --min-lr 3.2e-5 --lr-decay-style cosine
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe mimo_v2 152576 "$@"
