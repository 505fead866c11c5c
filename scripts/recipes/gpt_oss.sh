#!/usr/bin/env bash
# gpt-oss (model card, arXiv 2508.10925): layers of width 2880 that alternate between a window of 128 tokens and full
# attention, with 64 query heads and 8 key/value heads of 64 channels, a learned sink in each head's softmax, and biases
# in all linear layers. Each token uses 4 of 32 or 128 experts in every layer. The experts' gates are clamped at 7, and
# a softmax over the 4 selected experts weights their outputs.
#
#   SIZE=20b DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 16 scripts/train_gpt_slurm.sh scripts/recipes/gpt_oss.sh
#   SIZE=120b bash scripts/recipes/gpt_oss.sh --dry-run
#
# SIZE is 20b (default, 20.9B parameters, 3.6B active) or 120b (116.8B, 5.1B). The shapes of the 120b are the defaults
# of GptOssConfig in transformers; the shapes of the 20b come from NVIDIA's Megatron-Bridge documentation. The model
# card says only that pretraining used trillions of tokens, and that the 120b took 2.1 million H100 GPU hours. Sequence
# length, number of tokens, batch size, learning rate, optimizer and load balancing are common choices of ours. The
# published context of 131,072 tokens is an extension; for it, add --seq-length 131072 --max-position-embeddings 131072
# --rope-type yarn --rotary-scaling-factor 32 --no-yarn-correction-range-round-to-int.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

case "${SIZE:=20b}" in
    20b) shape=(24 32) EP="${EP:-8}" GPUS=128 ;;
    120b) shape=(36 128) PP="${PP:-4}" EP="${EP:-32}" GPUS=512 ;;
    *) unknown_size "$SIZE" "20b and 120b" ;;
esac
model=(
    --num-layers "${shape[0]}" --hidden-size 2880 --ffn-hidden-size 2880 --kv-channels 64
    --num-attention-heads 64 --group-query-attention --num-query-groups 8 --softmax-type learnable
    --window-size 128 --window-attn-skip-freq 2
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 150000
    --normalization RMSNorm --norm-epsilon 1e-5 --untie-embeddings-and-output-weights
    --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts "${shape[1]}" --moe-ffn-hidden-size 2880 --moe-router-topk 4
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3
)
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --global-batch-size 4096 --train-samples 2441406250 --lr-warmup-samples 8192000
    --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe "gpt_oss_$SIZE" 201088 "$@"
