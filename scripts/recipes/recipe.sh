# Sourced by the recipes, which set the arrays `model` and `training`, and call `run_recipe`.
# shellcheck shell=bash
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
# shellcheck source=scripts/env.sh
source scripts/env.sh

# Refuses a SIZE that a recipe does not support.
unknown_size() {
    echo "SIZE=$1: the sizes of this recipe are $2" >&2
    exit 2
}

# Trains or plans the recipe NAME, whose vocabulary has VOCAB tokens. If --dry-run or --rehearse is given without
# --world-size, the variable GPUS is the number of ranks. TP, PP, CP and EP come from the environment or the recipe.
# With SEPARATE_DOCUMENTS, tokens of real data attend only to their own document. Further flags override the recipe's
# flags.
run_recipe() {
    local name="$1" vocab="$2" save parallel output data world=()
    shift 2
    save="${SAVE:-runs/$name}"
    parallel=(
        --tensor-model-parallel-size "${TP:=1}" --pipeline-model-parallel-size "${PP:=1}"
        --context-parallel-size "${CP:=1}" --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    )
    if ((TP > 1)); then
        parallel+=(--sequence-parallel)
    fi
    if [[ -n "${EP:-}" ]]; then
        parallel+=(--expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1)
        parallel+=(--moe-grouped-gemm --moe-token-dispatcher-type alltoall)
    fi
    data_flags "$vocab" HuggingFaceTokenizer
    if [[ -n "${DATA_PATH:-}" && -n "${SEPARATE_DOCUMENTS:-}" ]]; then
        data+=(--reset-attention-mask)
    fi
    output=(
        --save "$save" --load "$save" --save-interval 1000 --eval-interval 1000 --eval-iters 10
        --log-interval 10 --tensorboard-dir "$save/tensorboard"
    )
    if [[ " $* " == *" --dry-run "* || " $* " == *" --rehearse "* ]] && [[ " $* " != *" --world-size "* ]]; then
        # shellcheck disable=SC2153  # the recipe sets it
        world=(--world-size "$GPUS")
    fi
    # shellcheck disable=SC2154  # the recipe sets `model` and `training`
    launch_training "${model[@]}" "${parallel[@]}" --micro-batch-size "${MICRO_BATCH_SIZE:-1}" "${training[@]}" \
        "${data[@]}" "${output[@]}" "${world[@]}" "$@"
}
