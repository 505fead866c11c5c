#!/usr/bin/env bash
# Qwen3 (arXiv 2505.09388, tables 1 and 2, section 3.2), general stage of pretraining: 30T tokens in sequences of 4,096.
#
#   SIZE=8b DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 16 scripts/train_gpt_slurm.sh scripts/recipes/qwen3.sh
#   SIZE=235b-a22b bash scripts/recipes/qwen3.sh --dry-run
#
# SIZE is 8b (default), 30b-a3b or 235b-a22b. The shapes are those of the published config.json files. The rotary base
# is 10,000 until the long-context stage raises it to 1,000,000. The report gives no learning rate, batch size or weight
# decay; these are common choices of ours. Experts are balanced over the global batch, as in the report, which gives no
# coefficient; the one here (1e-3) comes from config.json.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

case "${SIZE:=8b}" in
    8b) shape=(36 4096 12288 32 8) lr=3e-4 TP="${TP:-2}" GPUS=128 ;;
    30b-a3b) shape=(48 2048 6144 32 4) experts=768 lr=3e-4 EP="${EP:-8}" GPUS=256 ;;
    235b-a22b) shape=(94 4096 12288 64 4) experts=1536 lr=2e-4 TP="${TP:-2}" PP="${PP:-8}" EP="${EP:-32}" GPUS=1024 ;;
    *) unknown_size "$SIZE" "8b, 30b-a3b and 235b-a22b" ;;
esac
model=(
    --num-layers "${shape[0]}" --hidden-size "${shape[1]}" --ffn-hidden-size "${shape[2]}" --kv-channels 128
    --num-attention-heads "${shape[3]}" --group-query-attention --num-query-groups "${shape[4]}" --qk-layernorm
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
if [[ -n "${experts:-}" ]]; then
    model+=(
        --num-experts 128 --moe-ffn-hidden-size "$experts" --moe-router-topk 8
        --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3
    )
fi
training=(
    --global-batch-size 2048 --train-samples 7324218750 --lr-warmup-samples 4096000
    --lr "$lr" --min-lr 3e-5 --lr-decay-style cosine
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe "qwen3_$SIZE" 151936 "$@"
