#!/usr/bin/env bash
# Trains a small language model from scratch and generates text with it, in under five minutes on two CPU cores: creates
# .venv, builds a corpus from the Python standard library's source, trains a tokenizer and a small Llama-style model on
# it, draws the loss curve and a report of the run, and generates a few lines. Each command is printed as you could type
# it.
#
#   bash scripts/quickstart.sh             run it again after an interruption: it resumes
#   bash scripts/quickstart.sh --clean     starts over
#
# All output goes to runs/quickstart (or OUT=FOLDER). The default of 250 iterations shows the loss falling and text that
# looks like Python; TRAIN_ITERS=2000 writes better text. CORPUS_MB=2 limits the corpus to 2 MB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

OUT="${OUT:-runs/quickstart}"
if [[ "${1:-}" == --clean ]]; then
    run rm -rf "$OUT"
elif (($# > 0)); then
    echo "unknown argument $1; the only one is --clean" >&2
    exit 2
fi
started=$SECONDS
mkdir -p "$OUT"

step() {
    printf '\n== %s (%d s so far)\n' "$1" $((SECONDS - started))
}

step "1/7 Python environment"
ensure_environment requirements.txt torch sentencepiece

step "2/7 Corpus: the Python standard library's own source"
if [[ ! -f "$OUT/corpus.jsonl" ]]; then
    run "$PYTHON" tools/build_corpus.py --output "$OUT/corpus.jsonl" --max-mb "${CORPUS_MB:-inf}"
fi

step "3/7 Tokenizer"
if [[ ! -f "$OUT/tokenizer.model" ]]; then
    run "$PYTHON" tools/train_tokenizer.py --input "$OUT/corpus.jsonl" --output-prefix "$OUT/tokenizer" --vocab-size 4096
fi

step "4/7 Text to token ids"
if [[ ! -f "$OUT/stdlib_text_document.idx" ]]; then
    run "$PYTHON" tools/preprocess_data.py --input "$OUT/corpus.jsonl" --output-prefix "$OUT/stdlib" \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model" --append-eod --workers 2
fi

step "5/7 Training"
gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
if ((gpus > 0)); then
    processes=$gpus
    layout=(--bf16 --micro-batch-size 16 --global-batch-size $((16 * gpus)))
else
    processes=2
    layout=(--cpu --tensor-model-parallel-size 2 --micro-batch-size 8 --global-batch-size 8 --trace)
    export OMP_NUM_THREADS=1
fi
run "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$processes" pretrain_gpt.py "${layout[@]}" \
    --num-layers 4 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 4 \
    --seq-length 256 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --attention-dropout 0 --hidden-dropout 0 \
    --data-path "$OUT/stdlib_text_document" --split 95,5,0 --num-workers 1 \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model" \
    --train-iters "${TRAIN_ITERS:-250}" --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    --log-interval 10 --eval-interval 50 --eval-iters 10 \
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval 50

step "6/7 Loss curve and report"
run "$PYTHON" tools/plot_loss.py "$OUT/checkpoints" --output "$OUT/loss.png"
run "$PYTHON" tools/report.py "$OUT/checkpoints" --output "$OUT/report.html"

step "7/7 Generated text"
run "$PYTHON" tools/generate_text.py --load "$OUT/checkpoints" --prompt "def read(self, size=-1):" "import os" \
    --max-new-tokens 80 --temperature 0.7 --top-k 40 | tee "$OUT/sample.txt"

cat <<END

Done in $((SECONDS - started)) s.
  corpus              $OUT/corpus.jsonl
  tokenizer           $OUT/tokenizer.model
  token ids           $OUT/stdlib_text_document.bin and .idx
  checkpoints         $OUT/checkpoints
  metrics             $OUT/checkpoints/metrics.jsonl
  loss curve          $OUT/loss.png
  report of the run   $OUT/report.html
  generated text      $OUT/sample.txt
END
