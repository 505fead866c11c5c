#!/usr/bin/env bash
# Ling 2.0 (arXiv 2510.22115, section 2): QK norms, and rotary embeddings on half of each head's channels. After the
# first, dense layers, each token uses a shared expert and 8 of 256 experts from at most 4 of 8 groups, chosen by
# sigmoid scores plus a bias. One multi-token prediction module predicts one further token.
#
#   SIZE=flash DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 64 scripts/train_gpt_slurm.sh scripts/recipes/ling.sh
#   SIZE=1t bash scripts/recipes/ling.sh --dry-run
#
# SIZE is mini (default: 16B parameters, 1.4B active), flash (100B, 6.1B active) or 1t (1T, 50B active). The shapes of
# mini come from examples/pretrain/run_pretrain_4k.sh in github.com/inclusionAI/Ling-V2, which continues the pretraining
# of mini. So do the following settings for all sizes: rotary base, z-loss, bias update rate, multi-token prediction
# factor, initial weights, Adam's betas, weight decay and clipping. The shapes of flash and 1t are quoted from memory of
# config.json; check them before a real run. The report has 20T tokens and a constant learning rate, because checkpoints
# are merged instead of decaying the rate; this script does not merge them. Sequence length, learning rate and batch
# size are our own choices. Training is in bf16 here and in fp8 in the report (--fp8-format e4m3 --fp8-recipe blockwise
# adds it). The mean of the bias updates is not subtracted here.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

case "${SIZE:=mini}" in
    mini) shape=(20 2048 5120 16 4 512 "([0]+[1]*19)") lr=3e-4 EP="${EP:-8}" GPUS=128 ;;
    flash) shape=(32 4096 9216 32 4 1024 "([0]+[1]*31)") lr=3e-4 PP="${PP:-4}" EP="${EP:-16}" GPUS=512 ;;
    1t) shape=(80 8192 18432 64 8 2048 "([0]*4+[1]*76)") lr=2e-4 PP="${PP:-16}" EP="${EP:-64}" GPUS=2048 ;;
    *) unknown_size "$SIZE" "mini, flash and 1t" ;;
esac
model=(
    --num-layers "${shape[0]}" --hidden-size "${shape[1]}" --ffn-hidden-size "${shape[2]}" --kv-channels 128
    --num-attention-heads "${shape[3]}" --group-query-attention --num-query-groups "${shape[4]}" --qk-layernorm
    --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 10000 --rotary-percent 0.5
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts 256 --moe-ffn-hidden-size "${shape[5]}" --moe-layer-freq "${shape[6]}" --moe-router-topk 8
    --moe-shared-expert-intermediate-size "${shape[5]}" --moe-router-num-groups 8 --moe-router-group-topk 4
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type none
    --moe-z-loss-coeff 3.5e-6
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
)
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --global-batch-size 4096 --train-samples 4882812500 --lr-warmup-samples 8192000
    --lr "$lr" --min-lr 0 --lr-decay-style constant
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe "ling_$SIZE" 157184 "$@"
