#!/usr/bin/env bash
# OLMo Hybrid 7B (configuration of allenai/Olmo-Hybrid-7B in transformers, and OLMo-core's training script,
# src/scripts/train/linear-rnns/OLMo3.1-7B-hybrid.py), pretraining with sequences of 8,192 tokens: for each attention
# layer there are three gated delta net layers, whose write strengths reach 2. Norms apply to the outputs of attention,
# as in OLMo 3, and to the inputs of delta nets.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 64 scripts/train_gpt_slurm.sh scripts/recipes/olmo_hybrid.sh
#   bash scripts/recipes/olmo_hybrid.sh --dry-run
#
# SIZE is 7b. The script gives the learning rate, batches of 4M tokens, 2,000 warm-up steps, the cosine down to a tenth,
# the z-loss of 1e-5, embeddings without weight decay, and rotary positions (OLMo 3's). The announcement gives the 6T
# tokens. The published model has no position embedding, because its extension to long contexts removes it.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

[[ "${SIZE:=7b}" == 7b ]] || unknown_size "$SIZE" 7b
TP="${TP:-2}" GPUS=512
model=(
    --num-layers 32 --hidden-size 3840 --ffn-hidden-size 11008 --num-attention-heads 30
    --norm-placement output --qk-layernorm --qk-layernorm-scope all
    --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4
    --linear-num-key-heads 30 --linear-num-value-heads 30 --linear-key-head-dim 96 --linear-value-head-dim 192
    --linear-allow-neg-eigval --linear-norm-placement pre --linear-norm-epsilon 1e-5
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02 --z-loss-coeff 1e-5
)
training=(
    --global-batch-size 512 --train-iters 1430000 --lr-warmup-iters 2000
    --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --weight-decay-on matrices --clip-grad 1.0
)
run_recipe olmo_hybrid 100352 "$@"
