#!/usr/bin/env bash
# Trinity Nano and Mini (arXiv 2602.17004): norms before and after each sublayer, QK norms, and a gate for each channel
# of the attention output. Three of every four layers attend to a window with a rotary embedding, and the fourth attends
# to all tokens without a position embedding. After two dense layers, each token uses a shared expert and 8 of 128
# experts, chosen by sigmoid scores plus a bias.
#
#   SIZE=mini DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 64 scripts/train_gpt_slurm.sh scripts/recipes/trinity.sh
#   SIZE=nano bash scripts/recipes/trinity.sh --dry-run
#
# SIZE is mini (default, 26B parameters, 3B active) or nano (6B, 1B active). Shapes, window, routed-output scaling
# factor and bias update rate are those of the published config.json files; the 10T tokens and Muon come from the
# report. Sequence length, learning rate, batch size and schedule are our own choices. The weights of the norms after
# sublayers start at 1; in the report they start at 1 / sqrt(layers).
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

case "${SIZE:=mini}" in
    mini) shape=(32 2048 6144 32 4 1024 "([0]*2+[1]*30)") EP="${EP:-8}" GPUS=512 ;;
    nano) shape=(56 1024 3072 8 2 256 "([0]*2+[1]*54)") EP="${EP:-8}" GPUS=512 ;;
    *) unknown_size "$SIZE" "mini and nano" ;;
esac
model=(
    --num-layers "${shape[0]}" --hidden-size "${shape[1]}" --ffn-hidden-size "${shape[2]}" --kv-channels 128
    --num-attention-heads "${shape[3]}" --group-query-attention --num-query-groups "${shape[4]}" --qk-layernorm
    --norm-placement sandwich --attention-output-gate --scale-word-embeddings
    --window-size 2048 --window-attn-skip-freq 4 --no-rope-freq 4
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts 128 --moe-ffn-hidden-size "${shape[5]}" --moe-layer-freq "${shape[6]}" --moe-router-topk 8
    --moe-shared-expert-intermediate-size "${shape[5]}"
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.826
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type none
)
# In samples of 4,096 tokens: 10T tokens, the last 2T with a falling learning rate.
training=(
    --optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2
    --global-batch-size 2048 --train-samples 2441406250 --lr-warmup-samples 4096000
    --lr 3e-4 --min-lr 3e-5
    --lr-decay-style WSD --lr-wsd-decay-style linear --lr-decay-samples 2441406250 --lr-wsd-decay-samples 488281250
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe "trinity_$SIZE" 200192 "$@"
