#!/usr/bin/env bash
# Trains on one GPU, with the largest preset of configs/one_gpu that fits this machine's card.
#
#   DATA_PATH=corpus_text_document TOKENIZER_TYPE=SentencePieceTokenizer TOKENIZER_MODEL=tokenizer.model \
#       bash scripts/train_gpt_one_gpu.sh
#   GPU_MEMORY_GIB=24 bash scripts/train_gpt_one_gpu.sh --dry-run --device rtx4090
#
# GPU_MEMORY_GIB is the memory of the card, by default as nvidia-smi or rocm-smi states it; PRESET is the name of a
# preset (8gb, 12gb, 16gb, 24gb or 48gb) in its place. DATA_PATH and other variables of scripts/env.sh name the data;
# without them tokens are synthetic. Further flags are passed on and override the preset's flags.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

# Prints the rounded memory in GiB of the GPU with the most memory. Prints nothing if no GPU reports a number, as with
# GPUs that share the host's memory.
gpu_memory_gib() {
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits
    elif command -v rocm-smi >/dev/null; then
        rocm-smi --showmeminfo vram --csv | awk -F, 'NR > 1 && $2 { print $2 / 2^20 }'
    fi | awk '$1 + 0 > most { most = $1 + 0 } END { if (most) printf "%.0f\n", most / 1024 }'
}

if [[ -z "${PRESET:-}" ]]; then
    memory="${GPU_MEMORY_GIB:-$(gpu_memory_gib)}"
    if [[ -z "$memory" ]]; then
        echo "no GPU that states its memory was found; set GPU_MEMORY_GIB to the memory of the card, or PRESET to the name of a preset" >&2
        exit 2
    fi
    if [[ ! "$memory" =~ ^[0-9]+$ ]]; then
        echo "GPU_MEMORY_GIB=$memory: must be a whole number of GiB, such as 24" >&2
        exit 2
    fi
    memory=$((10#$memory))
    for size in 8 12 16 24 48; do
        # A card of 48 GB has 44.5 to 48 GiB.
        if ((size <= memory + memory / 10)); then
            PRESET="${size}gb"
        fi
    done
    if [[ -z "${PRESET:-}" ]]; then
        echo "GPU_MEMORY_GIB=$memory: the smallest preset needs 8 GiB; use configs/30m.yaml, which needs 4 GiB" >&2
        exit 2
    fi
    echo "$memory GiB: preset $PRESET" >&2
fi
preset="configs/one_gpu/$PRESET.yaml"
if [[ ! -f "$preset" ]]; then
    echo "PRESET=$PRESET: the presets are $(cd configs/one_gpu && echo *.yaml | sed 's/\.yaml//g')" >&2
    exit 2
fi
SAVE="${SAVE:-runs/one_gpu_$PRESET}"
data_flags "$(awk '$1 == "default-vocab-size:" { print $2 }' "$preset")" GPT2BPETokenizer
output=(--save "$SAVE" --load "$SAVE" --save-interval 1000 --eval-interval 1000 --eval-iters 10 --log-interval 10)

GPUS_PER_NODE=1 launch_training --config "$preset" "${data[@]}" "${output[@]}" "$@"
