#!/usr/bin/env bash
# Trains one small model in one process and under eight layouts, on CPUs, and draws the losses:
#
#   bash scripts/draw_layouts.sh [FOLDER]
#
# FOLDER, by default runs/layouts, gets one folder per run, and layouts.png. TRAIN_ITERS (60) is the number of
# iterations. A second call continues where the first one stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
ensure_environment requirements.txt torch matplotlib
out="${1:-runs/layouts}"
iterations="${TRAIN_ITERS:-60}"
mkdir -p "$out"
if [[ ! -f "$out/corpus_text_document.idx" ]]; then
    run "$PYTHON" tools/build_corpus.py --output "$out/corpus.jsonl" --max-mb 1
    run "$PYTHON" tools/preprocess_data.py --input "$out/corpus.jsonl" --output-prefix "$out/corpus" \
        --tokenizer-type ByteTokenizer --append-eod
fi
flags=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --data-path "$out/corpus_text_document" --split "100,0,0"
    --tokenizer-type ByteTokenizer --micro-batch-size 1 --global-batch-size 8 --train-iters "$iterations" --lr 3e-3
    --lr-decay-style cosine --lr-warmup-iters 5 --attention-dropout 0.1 --hidden-dropout 0.1 --eval-iters 0
    --log-interval 1 --num-workers 0 --cpu)
layouts=(
    "one process|1|"
    "TP 4|4|--tp 4 --sequence-parallel"
    "PP 4|4|--pp 4"
    "PP 2 zero bubble|2|--pp 2 --pipeline-schedule zb-v"
    "CP 2|2|--cp 2"
    "DP 4 ZeRO-1|4|"
    "DP 4 ZeRO-3|4|--data-parallel-sharding-strategy optim_grads_params"
    "TP 2 PP 2|4|--tp 2 --sequence-parallel --pp 2"
    "DP 2 ZeRO-2|2|--data-parallel-sharding-strategy optim_grads"
)
for layout in "${layouts[@]}"; do
    IFS="|" read -r name ranks options <<<"$layout"
    folder="$out/$name"
    if [[ "$(wc -l 2>/dev/null <"$folder/metrics.jsonl" || echo 0)" == "$iterations" ]]; then
        continue
    fi
    mkdir -p "$folder"
    rm -f "$folder/metrics.jsonl"
    # shellcheck disable=SC2086
    run "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$ranks" pretrain_gpt.py "${flags[@]}" \
        $options --metrics-file "$folder/metrics.jsonl" >"$folder/log.txt"
done
run "$PYTHON" scripts/draw_layouts.py "$out"
