#!/usr/bin/env bash
# Llama 4, text model only: layers of width 5120 with 40 heads of 128 channels. Three of every four layers rotate
# queries and keys in pairs of adjacent channels and attend within chunks of 8,192 tokens. The fourth has no position
# embedding, attends to all tokens, and scales its queries by position. Each token uses a shared expert and one expert
# chosen by a sigmoid score, which scales that expert's input.
#
#   SIZE=scout DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 64 scripts/train_gpt_slurm.sh scripts/recipes/llama4.sh
#   SIZE=maverick bash scripts/recipes/llama4.sh --dry-run
#
# SIZE is scout (default; 109B parameters with its vision encoder, 17B active), which has 16 experts in every layer and
# QK norms, or maverick (400B, 17B active), which has 128 experts in every second layer and no QK norms. The shapes of
# scout are the defaults of Llama4TextConfig in transformers. Where maverick differs, its shapes are quoted from memory
# of its config.json. The numbers of tokens, 40T and 22T, are quoted from memory of the model card. Check both before a
# real run. Learning rate (set by the MetaP rule in the original), batch size, warm-up, decay and load balancing are
# common choices of ours. Training is in bf16 here and in fp8 in the original, and there are no images.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

case "${SIZE:=scout}" in
    scout) experts=(--num-experts 16 --qk-l2-norm) samples=4882812500 PP="${PP:-4}" EP="${EP:-16}" GPUS=512 ;;
    maverick)
        experts=(--num-experts 128 --moe-layer-freq "([0,1]*24)")
        samples=2685546875 PP="${PP:-8}" EP="${EP:-64}" GPUS=1024
        ;;
    *) unknown_size "$SIZE" "scout and maverick" ;;
esac
model=(
    --num-layers 48 --hidden-size 5120 --ffn-hidden-size 16384 --kv-channels 128
    --num-attention-heads 40 --group-query-attention --num-query-groups 8
    --attention-chunk-size 8192 --window-attn-skip-freq 4 --no-rope-freq 4
    --attention-temperature-coeff 0.1 --attention-temperature-floor 8192
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000 --rotary-interleaved
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    "${experts[@]}" --moe-ffn-hidden-size 8192 --moe-router-topk 1 --moe-shared-expert-intermediate-size 8192
    --moe-router-score-function sigmoid --moe-apply-probs-on-input
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3
)
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --global-batch-size 4096 --train-samples "$samples" --lr-warmup-samples 8192000
    --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe "llama4_$SIZE" 202048 "$@"
