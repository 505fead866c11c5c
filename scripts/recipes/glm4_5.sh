#!/usr/bin/env bash
# GLM-4.5 (arXiv 2508.06471, table 1, sections 2.1 and 2.4): a deep and narrow model with 96 heads of 128 channels, half
# of them rotated, and biases for queries, keys and values. After the first, dense layers, each token uses a shared
# expert and 8 experts chosen by sigmoid scores plus a bias. One multi-token prediction module predicts one further
# token. The optimizer is Muon.
#
#   SIZE=355b-a32b DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 128 scripts/train_gpt_slurm.sh scripts/recipes/glm4_5.sh
#   SIZE=106b-a12b bash scripts/recipes/glm4_5.sh --dry-run
#
# SIZE is 355b-a32b (default) or 106b-a12b (GLM-4.5-Air, which has no QK norms). The shapes are those of the published
# config.json files. Megatron Bridge's page on the family repeats them, and gives the multi-token prediction factor of
# 0.3. Public summaries of the report mention Muon, the cosine schedule, and 15T and 7T tokens. The other settings are
# quoted from memory of the report; check them before a real run: 22T tokens of 4,096-token sequences (15T general, 7T
# code and reasoning); a batch that grows from 16M to 64M tokens over 500B tokens; a cosine from 2.5e-4 to 2.5e-5 that
# ends with the mid-training after this run (23.1T tokens); Muon with momentum 0.95 and updates of RMS 0.2; weight decay
# 0.1; and a balancing loss of 1e-4 within sequences. For the first 15T tokens, the report has a bias update rate of
# 1e-3 and a multi-token prediction factor of 0.3, which become 0 and 0.1 afterwards; here both stay constant. Warm-up,
# clipping and initial weights are not published and are our own choices. The report gives these settings for GLM-4.5,
# and no separate ones for Air.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

case "${SIZE:=355b-a32b}" in
    355b-a32b)
        shape=(92 5120 12288 160 1536 "([0]*3+[1]*89)" 2.5) norms=(--qk-layernorm)
        PP="${PP:-16}" EP="${EP:-32}" GPUS=1024
        ;;
    106b-a12b)
        shape=(46 4096 10944 128 1408 "([0]+[1]*45)" 1.0) norms=()
        PP="${PP:-8}" EP="${EP:-16}" GPUS=512
        ;;
    *) unknown_size "$SIZE" "355b-a32b and 106b-a12b" ;;
esac
model=(
    --num-layers "${shape[0]}" --hidden-size "${shape[1]}" --ffn-hidden-size "${shape[2]}" --kv-channels 128
    --num-attention-heads 96 --group-query-attention --num-query-groups 8 --add-qkv-bias "${norms[@]}"
    --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 10000 --rotary-percent 0.5
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts "${shape[3]}" --moe-ffn-hidden-size "${shape[4]}" --moe-layer-freq "${shape[5]}" --moe-router-topk 8
    --moe-shared-expert-intermediate-size "${shape[4]}"
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor "${shape[6]}"
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
)
# In samples of 4,096 tokens: 22T tokens, ramp over 500B, decay until 23.1T, 2,000 steps of warm-up at the smallest
# batch.
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2
    --global-batch-size 16384 --rampup-batch-size 4096 1024 122070313 --train-samples 5371093750
    --lr 2.5e-4 --min-lr 2.5e-5 --lr-warmup-samples 8192000 --lr-decay-style cosine --lr-decay-samples 5639648438
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe "glm4_5_$SIZE" 151552 "$@"
