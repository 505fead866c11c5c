#!/usr/bin/env bash
# Nemotron-H 8B (arXiv 2504.03624) and Nemotron 3 Nano (arXiv 2512.20848), pretraining: layers with a single sublayer
# each. Mamba-2 replaces most attention layers, there is no position embedding, and MLPs, or small experts, use squared
# ReLU.
#
#   SIZE=8b DATA_PATH=corpus_text_document TOKENIZER_MODEL=/path/to/tokenizer.json \
#       sbatch --nodes 32 scripts/train_gpt_slurm.sh scripts/recipes/nemotron_h.sh
#   SIZE=nano3 bash scripts/recipes/nemotron_h.sh --dry-run
#
# SIZE is 8b (default) or nano3. The shapes are those of the published config.json files and of Megatron Bridge's
# providers. transformers raises step sizes below 0.001 (--mamba-min-step-size); Megatron-LM, in which the models were
# trained, does not. NVIDIA's page on the nano3 recipe gives its number of tokens, the peak, end, warm-up and decay of
# its learning rate, Adam's betas and weight decay. The other settings are quoted from memory of the reports; check them
# before a real run. Both sizes: sequences of 8,192 tokens, 768 (8b) or 3,072 (nano3) of them per batch. 8b: 15T tokens,
# a learning rate from 8e-4 to 8e-6, 8.3B tokens of warm-up, and decay over the last 3.6T tokens. nano3: a balancing
# loss of 1e-4 and a bias update rate of 1e-3. The shape of the decay, clipping and initial weights are our own choices.
set -euo pipefail
# shellcheck source=scripts/recipes/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

# Batch, samples of the run, of warm-up and of decay, and learning rates.
case "${SIZE:=8b}" in
    8b)
        layers="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
        shape=(4096 21504 8 128) TP="${TP:-2}" GPUS=256
        schedule=(768 1831054688 1013184 439453125 8e-4 8e-6)
        ;;
    nano3)
        layers="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
        shape=(2688 1856 2 64) TP="${TP:-2}" EP="${EP:-8}" GPUS=512
        schedule=(3072 3051757813 1025391 610351563 1e-3 1e-5)
        ;;
    *) unknown_size "$SIZE" "8b and nano3" ;;
esac
model=(
    --hybrid-layer-pattern "$layers" --hidden-size "${shape[0]}" --ffn-hidden-size "${shape[1]}" --squared-relu
    --num-attention-heads 32 --group-query-attention --num-query-groups "${shape[2]}" --kv-channels 128
    --mamba-num-heads "${shape[3]}" --mamba-head-dim 64 --mamba-num-groups 8 --mamba-state-dim 128
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type none
    --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
if [[ "$SIZE" == nano3 ]]; then
    model+=(
        --num-experts 128 --moe-ffn-hidden-size 1856 --moe-shared-expert-intermediate-size 3712 --moe-router-topk 6
        --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
        --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
        --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    )
fi
training=(
    --global-batch-size "${schedule[0]}" --train-samples "${schedule[1]}" --lr-warmup-samples "${schedule[2]}"
    --lr "${schedule[4]}" --min-lr "${schedule[5]}" --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt
    --lr-decay-samples "${schedule[1]}" --lr-wsd-decay-samples "${schedule[3]}"
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0
)
run_recipe "nemotron_h_$SIZE" 131072 "$@"
