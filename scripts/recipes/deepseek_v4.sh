#!/usr/bin/env bash
# DeepSeek-V4 (arXiv 2606.19348): compressed attention. Every layer attends to a window of 128 tokens, and most layers
# attend to compressed keys too. A compressed key covers 4 tokens in some of these layers, where an indexer selects
# among the keys, and 128 tokens in the others. There are four residual streams. Experts are chosen by token tables in
# the first 3 layers, and by sqrtsoftplus scores with a balancing bias in the others. One multi-token prediction module
# predicts one further token.
#
#   SIZE=flash DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 64 scripts/train_gpt_slurm.sh scripts/recipes/deepseek_v4.sh
#   SIZE=pro bash scripts/recipes/deepseek_v4.sh --dry-run
#
# SIZE is flash (default) or pro. The shapes are those of the published config.json files. Sequences have 4,096 tokens
# here, the first length used in pretraining; YaRN extends positions by a factor of 16 later. Training is in bf16 with
# Muon, whole layers are recomputed, and the indexer is trained from the start. Learning rate, batch size and training
# length are our own choices.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

case "${SIZE:=flash}" in
    flash)
        shape=(43 4096 64 1024 8 2048 512) experts=256 scaling=1.5 ratios="([0,0,4]+[128,4]*20+[0])"
        PP="${PP:-8}" EP="${EP:-32}" GPUS=512
        ;;
    pro)
        shape=(61 7168 128 1536 16 3072 1024) experts=384 scaling=2.5 ratios="([128]*2+[4,128]*29+[4,0])"
        PP="${PP:-16}" EP="${EP:-64}" GPUS=2048
        ;;
    *) unknown_size "$SIZE" "flash and pro" ;;
esac
model=(
    --num-layers "${shape[0]}" --hidden-size "${shape[1]}" --num-attention-heads "${shape[2]}" --multi-latent-attention
    --q-lora-rank "${shape[3]}" --qk-head-dim 448 --qk-pos-emb-head-dim 64 --v-head-dim 512 --qk-layernorm
    --experimental-attention-variant dsv4_hybrid --csa-compress-ratios "$ratios" --csa-window-size 128
    --csa-compress-rotary-base 160000 --o-groups "${shape[4]}" --o-lora-rank 1024 --softmax-type learnable
    --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk "${shape[6]}" --dsa-indexer-use-sparse-loss
    --dsa-indexer-loss-coeff 1
    --enable-mhc-connections --mhc-num-residual-streams 4 --mhc-sinkhorn-iterations 20
    --seq-length 4096 --max-position-embeddings 1048576 --position-embedding-type rope --rotary-base 10000 --rope-type rope
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --activation-func-clamp-value 10 --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.006
    --num-experts "$experts" --moe-ffn-hidden-size "${shape[5]}" --moe-shared-expert-intermediate-size "${shape[5]}"
    --moe-router-topk 6 --moe-router-score-function sqrtsoftplus --moe-router-topk-scaling-factor "$scaling"
    --moe-n-hash-layers 3 --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
)
training=(
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --global-batch-size 15360 --train-samples 7812500000 --lr 2.7e-4 --min-lr 2.7e-5 --lr-warmup-samples 6144000
    --lr-decay-style cosine --optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe "deepseek_v4_$SIZE" 129280 "$@"
