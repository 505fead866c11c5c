#!/usr/bin/env bash
# Step-3.5-Flash (StepFun, 2026): 45 layers with QK norms and a gate for each head. The first of every four layers
# attends to all tokens with 64 heads and rotates half of the channels; the others attend to a window of 512 tokens with
# 96 heads. After three dense layers, each token uses a shared expert and 8 of 288 experts, chosen by sigmoid scores
# plus a bias. The optimizer is Muon.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 64 scripts/train_gpt_slurm.sh scripts/recipes/step3_5.sh
#   bash scripts/recipes/step3_5.sh --dry-run
#
# The shapes (196B parameters, 11B active as published) are those of the text model's class in transformers, which has
# no class with only a language-model head. The vocabulary, the layer order and the rotary bases are quoted from memory
# of config.json, and all settings from memory of the report. Check them before a real run: 17.2T tokens, Muon,
# 4,096-token sequences. Learning rate, batch size, warm-up, decay and weight decay are our own choices. Training is in
# bf16. The clamps in the experts of the last two layers are left out, and so are the three multi-token prediction
# modules, each of which is dense and has a window.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

if [[ "${SIZE:=196b-a11b}" != 196b-a11b ]]; then
    unknown_size "$SIZE" 196b-a11b
fi
PP="${PP:-8}" EP="${EP:-32}" GPUS=512
model=(
    --num-layers 45 --hidden-size 4096 --ffn-hidden-size 11264 --kv-channels 128
    --num-attention-heads 64 --group-query-attention --num-query-groups 8 --qk-layernorm --head-wise-attn-gate
    --window-size 512 --window-attn-skip-freq "([0]+([1]*3+[0])*11)" --window-num-attention-heads 96
    --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 5000000 --window-rotary-base 10000
    --rotary-percent 0.5 --window-rotary-percent 1
    --normalization RMSNorm --apply-layernorm-1p --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts 288 --moe-layer-freq "([0]*3+[1]*42)" --moe-ffn-hidden-size 1280 --moe-router-topk 8
    --moe-shared-expert-intermediate-size 1280
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 3.0
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type none
    --decoder-last-pipeline-num-layers 3
)
# In samples of 4,096 tokens: 17.2T tokens.
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2
    --global-batch-size 4096 --train-samples 4199218750 --lr-warmup-samples 8192000
    --lr 2.5e-4 --min-lr 2.5e-5 --lr-decay-style cosine
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe step3_5 128896 "$@"
