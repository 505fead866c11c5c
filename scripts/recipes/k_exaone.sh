#!/usr/bin/env bash
# K-EXAONE (arXiv 2601.01739): 48 layers of width 6144. Three of every four layers attend to a window of 128 tokens with
# a rotary embedding, and the fourth attends to all tokens without a position embedding. The model has QK norms. After
# one dense layer, each token uses a shared expert and 8 of 128 experts, chosen by sigmoid scores plus a bias. The
# optimizer is Muon.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 64 scripts/train_gpt_slurm.sh scripts/recipes/k_exaone.sh
#   bash scripts/recipes/k_exaone.sh --dry-run
#
# The publisher's page (github.com/LG-AI-EXAONE/K-EXAONE) gives the 236B parameters, 23B of them active, the window and
# its period. Public summaries of the report give the experts and the first sequence length of 8,192 tokens. The other
# shapes and settings are quoted from memory of config.json and the report; check them before a real run: 11T tokens,
# Muon, a peak learning rate of 3e-4 in a WSD schedule, a balancing loss of 1e-4 within sequences, and a bias update
# rate of 1e-4. Batch size, warm-up, decay length and weight decay are our own choices. Training is in bf16 here and in
# fp8 in the report. The multi-token prediction module is left out, because the published one has a dense MLP and the
# last layer has experts.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

if [[ "${SIZE:=236b-a23b}" != 236b-a23b ]]; then
    unknown_size "$SIZE" 236b-a23b
fi
PP="${PP:-8}" EP="${EP:-32}" GPUS=512
model=(
    --num-layers 48 --hidden-size 6144 --ffn-hidden-size 18432 --kv-channels 128
    --num-attention-heads 64 --group-query-attention --num-query-groups 8 --qk-layernorm
    --window-size 128 --window-attn-skip-freq 4 --no-rope-freq 4
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts 128 --moe-layer-freq "([0]+[1]*47)" --moe-ffn-hidden-size 2048 --moe-router-topk 8
    --moe-shared-expert-intermediate-size 2048
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-4
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
)
# In samples of 8,192 tokens: 11T tokens, the last 2T with a falling learning rate.
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2
    --global-batch-size 4096 --train-samples 1342773438 --lr-warmup-samples 8192000
    --lr 3e-4 --min-lr 3e-5
    --lr-decay-style WSD --lr-wsd-decay-style linear --lr-decay-samples 1342773438 --lr-wsd-decay-samples 244140625
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe k_exaone 153600 "$@"
