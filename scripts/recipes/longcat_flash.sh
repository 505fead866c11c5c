#!/usr/bin/env bash
# LongCat-Flash (arXiv 2509.01322; the published config.json of meituan-longcat/LongCat-Flash-Chat has the default
# values of transformers' configuration), pretraining: each published layer has two multi-latent attentions and two
# MLPs. In parallel with half of the layer, 512 experts process the tokens; the router can also choose among 256
# zero-computation experts.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 128 scripts/train_gpt_slurm.sh scripts/recipes/longcat_flash.sh
#   bash scripts/recipes/longcat_flash.sh --dry-run
#
# SIZE is 560b. A published layer is two layers here: the first has the experts, with the first MLP as the shared
# expert. The published rotary base of 10,000,000 is for a context of 131,072 tokens; here sequences have 4,096 tokens
# and the base is 10,000. The multi-token prediction module is left out. The published run, of more than 20T tokens,
# uses a PID controller to adapt the expert bias to the number of real experts selected per token; here the bias moves
# at a constant rate toward even loads. This rate, the batch size, learning rate, weight decay and initial weights are
# our own choices.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

if [[ "${SIZE:=560b}" != 560b ]]; then
    unknown_size "$SIZE" 560b
fi
PP="${PP:-8}" EP="${EP:-32}" GPUS=1024
model=(
    --num-layers 56 --hidden-size 6144 --ffn-hidden-size 12288
    --num-attention-heads 64 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --latent-norm-epsilon 1e-6
    --mla-scale-latents
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rope-type rope --rotary-base 10000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts 512 --moe-zero-experts 256 --moe-layer-freq 2 --moe-ffn-hidden-size 2048 --moe-router-topk 12
    --moe-shared-expert-intermediate-size 12288 --moe-shortcut
    --moe-router-pre-softmax --moe-router-topk-scaling-factor 6.0
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type none
)
# In samples of 4,096 tokens: 20T tokens, and 2,000 steps of warm-up.
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --global-batch-size 8192 --train-samples 4882812500 --lr-warmup-samples 16384000
    --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe longcat_flash 131072 "$@"
