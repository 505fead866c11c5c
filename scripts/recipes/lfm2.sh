#!/usr/bin/env bash
# LFM2 (arXiv 2511.23404, and the published config.json files of LiquidAI), pretraining: gated short convolutions over
# three tokens, attention with QK norms in every third or fourth layer, and tied embeddings. In 8b-a1b, the layers after
# the first two have experts: each token uses 4 of 32, chosen by sigmoid scores plus a bias.
#
#   SIZE=1.2b DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 16 scripts/train_gpt_slurm.sh scripts/recipes/lfm2.sh
#   SIZE=8b-a1b bash scripts/recipes/lfm2.sh --dry-run
#
# SIZE is 350m, 700m, 1.2b (default), 2.6b or 8b-a1b. The model cards give exact parameter counts for the dense sizes,
# 8.3B for 8b-a1b, and 10T and 12T tokens. The report trains on sequences of 4,096 tokens (quoted from memory). It adds
# a distillation loss from a larger model to the usual loss; that loss is left out here. Batch size, learning rate,
# schedule, weight decay, initial weights, expert bias update rate and balancing loss are our own choices, because none
# is published.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

dense_layers="([1,1,0]*3+[1,0]*3+[1])"
samples=2441406250 experts=()
case "${SIZE:=1.2b}" in
    350m) shape=(16 1024 4608 16 "$dense_layers") GPUS=64 ;;
    700m) shape=(16 1536 6912 24 "$dense_layers") GPUS=64 ;;
    1.2b) shape=(16 2048 8192 32 "$dense_layers") GPUS=128 ;;
    2.6b) shape=(30 2048 10752 32 "([1,1,0]+[1,1,0]+[1,1,1,0]*4+[1,1,0]*2+[1,1])") GPUS=256 ;;
    8b-a1b)
        shape=(24 2048 7168 32 "([1,1,0]+[1,1,1,0]*4+[1,1,0]+[1,1])") samples=2929687500
        EP="${EP:-8}" GPUS=256
        experts=(
            --num-experts 32 --moe-layer-freq "([0]*2+[1]*22)" --moe-ffn-hidden-size 1792 --moe-router-topk 4
            --moe-router-score-function sigmoid --moe-router-topk-epsilon 1e-6
            --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type none
        )
        ;;
    *) unknown_size "$SIZE" "350m, 700m, 1.2b, 2.6b and 8b-a1b" ;;
esac
model=(
    --num-layers "${shape[0]}" --hidden-size "${shape[1]}" --ffn-hidden-size "${shape[2]}"
    --num-attention-heads "${shape[3]}" --group-query-attention --num-query-groups 8 --qk-layernorm
    --experimental-attention-variant short_convolution --linear-attention-freq "${shape[4]}" --short-conv-kernel-dim 3
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02 "${experts[@]}"
)
# In samples of 4,096 tokens: 10T or 12T tokens, and 2,000 steps of warm-up.
training=(
    --global-batch-size 1024 --train-samples "$samples" --lr-warmup-samples 2048000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe "lfm2_$SIZE" 65536 "$@"
