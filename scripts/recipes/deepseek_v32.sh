#!/usr/bin/env bash
# DeepSeek-V3.2 (arXiv 2512.02556, section 2.1.1): DeepSeek-V3 with sparse attention, continued from DeepSeek-V3.1 on
# sequences of 128K tokens. An indexer with 64 heads selects 2,048 keys for each query. YaRN extends the positions by a
# factor of 40.
#
#   DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 256 scripts/train_gpt_slurm.sh scripts/recipes/deepseek_v32.sh --finetune --load WARM_UP
#   bash scripts/recipes/deepseek_v32.sh --dry-run
#
# This recipe is the sparse stage: 15,000 steps of 480 sequences, 944B tokens in all, at a constant learning rate. In
# the preceding warm-up stage, only the indexer is trained, with dense attention: --freeze '^(?!.*indexer)'
# --dsa-indexer-topk 131072 --no-dsa-indexer-use-sparse-loss --lr 1e-3 --min-lr 1e-3 --global-batch-size 16
# --train-samples 16000. It starts from the weights of V3.1 with those of a new indexer added; no command here adds
# them. Unlike in the paper, the gradients of the indexer's loss are clipped together with all others. Multi-token
# prediction and load balancing are the same as in DeepSeek-V3.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

if [[ "${SIZE:=671b}" != 671b ]]; then
    unknown_size "$SIZE" 671b
fi
PP="${PP:-16}" CP="${CP:-8}" EP="${EP:-64}" GPUS=2048
model=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
    --num-attention-heads 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --experimental-attention-variant dsa --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
    --dsa-indexer-use-sparse-loss --dsa-indexer-loss-coeff 1
    --seq-length 131072 --max-position-embeddings 163840 --position-embedding-type rope --rotary-base 10000
    --rope-type yarn --rotary-scaling-factor 40 --original-max-position-embeddings 4096 --mscale 1 --mscale-all-dim 1
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.006
    --num-experts 256 --moe-layer-freq "([0]*3+[1]*58)" --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
)
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --global-batch-size 480 --train-samples 7200000 --lr 7.3e-6 --min-lr 7.3e-6 --lr-decay-style constant
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe deepseek_v32 129280 "$@"
