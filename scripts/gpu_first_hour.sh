#!/usr/bin/env bash
# The first hour with a GPU, in parts of less than ten minutes each: tests, models, parts of a step one by one, and one
# page of tables.
#
#   bash scripts/gpu_first_hour.sh wheels             before, on a machine with a package index: fills .wheels/ with what
#                                                     the tests need, and .wheels-curve/ with what curve needs, for a
#                                                     machine where nothing can be installed
#   bash scripts/gpu_first_hour.sh PART [FOLDER]      nccl | tests | llama | headline | curve | calibrate | parts |
#                                                     models | features | page
#   bash scripts/gpu_first_hour.sh all [FOLDER]       all of them, one after another, in at most 80 minutes; nccl takes
#                                                     at most 10, the next three at most 27
#   bash scripts/gpu_first_hour.sh all FOLDER --cpu --tiny      a trial without a GPU, in a few minutes
#
# FOLDER, by default $OUT or otherwise runs/gpu (runs/gpu-trial with --cpu), receives JSON files, a log for each part,
# calls.jsonl (every command, its exit code and seconds) and, after every part, page.md. A part that runs again first
# removes its own files. If a command fails or takes too long, the other commands still run, and the script names it at
# the end.
# Figures are written as they become known, so a killed command leaves the figures known so far. SIGINT, SIGTERM and
# SIGHUP end the running command, and the page is written.
#
# PYTHON is the interpreter, by default python3. DEVICE is the GPU of the predictions, by default h100. SHARE is the
# fraction of the memory that headline plans with, by default 0.9. DEVICE_FILE is the file that calibrate writes and
# later parts read, by default FOLDER/device.yaml; if FOLDER is emptied between parts, name a file elsewhere.
set -uo pipefail
caller="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
# shellcheck source=scripts/env.sh
source scripts/env.sh

PARTS=(nccl tests llama headline curve calibrate parts models features)
declare -A WRITTEN=(
    [nccl]="nccl.txt"
    [tests]="tests.txt"
    [llama]="llama-bf16.json llama-fp8.json"
    [headline]="headline-bf16.json headline-fp8.json compile.json"
    [curve]="curves.jsonl curves.png"
    [calibrate]="device.yaml"
    [parts]="tiny.json micro.json"
    [models]="gpt-bf16.json gpt-graphs.json recipes.json"
    [features]="traced.html"
)
WHEELS=.wheels
CURVE_WHEELS=.wheels-curve
PYTHON="${PYTHON:-python3}"
cpu="" tiny="" positional=()
failed=() call=() copier="" log_name=""

refuse() {
    echo "$1" >&2
    exit 2
}

for argument in "$@"; do
    case "$argument" in
    -h | --help) # the comment at the top of this file
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' scripts/gpu_first_hour.sh
        exit 0
        ;;
    --cpu) cpu=--cpu ;;
    --tiny) tiny=yes ;;
    -*) refuse "unknown argument $argument; there are --cpu, --tiny and --help" ;;
    *) positional+=("$argument") ;;
    esac
done
part="${positional[0]:-}"
if [[ " ${PARTS[*]} wheels page all " != *" $part "* || ${#positional[@]} -gt 2 ]]; then
    refuse "usage: bash scripts/gpu_first_hour.sh wheels|$(
        IFS="|"
        echo "${PARTS[*]}"
    )|page|all [FOLDER] [--cpu --tiny]"
fi
if [[ -n "$cpu" && -z "$tiny" ]]; then
    refuse "--cpu is for trials: add --tiny"
fi

# Prints a path relative to the caller's folder.
absolute() {
    if [[ "$1" == /* ]]; then
        echo "$1"
    else
        echo "$caller/$1"
    fi
}

OUT="$(absolute "${positional[1]:-${OUT:-$PWD/runs/gpu${cpu:+-trial}}}")"
DEVICE_FILE="$(absolute "${DEVICE_FILE:-$OUT/device.yaml}")"

# Runs a command with a time limit in seconds; its output goes to the screen and to the part's log, or to log_name.
# It runs in the background: bash handles a signal only after a command in the foreground ends.
limited() {
    local log="$OUT/${log_name:-$current.log}" code
    limit="$1" began=$SECONDS
    shift
    call=("$@")
    show "$@" | tee -a "$log"
    exec {screen}> >(tee -a "$log")
    copier=$!
    timeout --kill-after=10 "$limit" "$@" >&"$screen" 2>&1 {screen}>&- &
    exec {screen}>&-
    wait $!
    code=$?
    await_copier
    note_call "$code" false
}

# Waits at most five seconds until the output is written: a leftover process may hold it open.
await_copier() {
    local tries=50
    while ((tries--)) && kill -0 "$copier" 2>/dev/null; do
        sleep 0.1
    done
    kill "$copier" 2>/dev/null
    copier=""
}

# Adds the command to calls.jsonl, with its exit code and whether a signal to this script stopped it.
note_call() {
    local code="$1" stopped="$2" text="${call[*]}" calls="$OUT/calls.jsonl"
    if ((code != 0)); then
        failed+=("$current: code $code of $text")
    fi
    call=()
    if [[ "$current" == page ]]; then
        return
    fi
    if [[ -f "$calls" && -n "$(tail -c 1 "$calls")" ]]; then # the last line was cut off
        echo >>"$calls"
    fi
    text="${text//\\/\\\\}"
    text="${text//\"/\\\"}"
    printf '{"part": "%s", "code": %d, "seconds": %d, "limit": %d, "stopped": %s, "command": "%s"}\n' \
        "$current" "$code" "$((SECONDS - began))" "$limit" "$stopped" "${text//$'\n'/ }" >>"$calls"
}

say_failed() {
    if ((${#failed[@]})); then
        printf 'failed: %s\n' "${failed[@]}"
    fi
}

# Ends the running command, records it, and writes the page.
stop() {
    local code=$((128 + $1)) running log_name=""
    trap '' INT TERM HUP
    running=$(jobs -pr)
    if [[ -n "$running" ]]; then
        kill "$running" 2>/dev/null # timeout signals the process group, and kills it after ten seconds
        wait "$running"
    fi
    if [[ -n "$copier" ]]; then
        await_copier
    fi
    if ((${#call[@]})); then
        note_call "$code" true
    fi
    page
    say_failed
    exit "$code"
}

# Runs gpu.py with a file for its figures. With --tiny, it always uses the tiny model and few steps.
measure() {
    local seconds="$1" file="$2"
    shift 2
    if [[ -n "$tiny" ]]; then
        local flags=(--config tiny --steps 1 --rounds 1 --warm-up 1) word
        while (($#)); do
            word="$1"
            shift
            case "$word" in
            --precision | --compare | --fp8-recipe)
                flags+=("$word" "$1")
                shift
                ;;
            --config | --layers | --flags | --memory-share | --steps | --rounds | --warm-up) shift ;;
            *) flags+=("$word") ;; # --compare=--no-compile
            esac
        done
        set -- "${flags[@]}"
    fi
    local devices=()
    if [[ -z "$cpu" ]]; then
        devices+=(--device "${DEVICE:-h100}")
    fi
    if [[ -f "$DEVICE_FILE" ]]; then
        devices+=(--calibrated "$DEVICE_FILE")
    fi
    limited "$seconds" "$PYTHON" tools/bench/gpu.py ${cpu:+"$cpu"} "$@" --json "$OUT/$file" "${devices[@]}"
}

# Ranks that share the GPU over NCCL, each as if it were alone on its host: one sum with NCCL's own log, every
# collective, runs under each kind of layout, faults, and combinations of the parity matrix. With --cpu, over gloo.
nccl() {
    local share="--nccl-on-one-gpu${cpu:+=cpu}" backend=nccl ranks options
    if [[ -n "$cpu" ]]; then
        backend=gloo
    fi
    ranks=(-m torch.distributed.run --standalone --nproc-per-node 2 --no-python bash scripts/rank_as_host.sh "$PYTHON")
    NCCL_DEBUG=INFO limited 60 "$PYTHON" "${ranks[@]}" tests/gpu/first_sum.py "$backend"
    options=("$share" -vv --tb=short -p no:cacheprovider -p tests.failure_lines)
    log_name=nccl.txt limited 60 "$PYTHON" -m pytest tests/gpu/test_collectives.py "${options[@]}"
    if [[ -z "$tiny" ]]; then
        log_name=nccl.txt limited 280 "$PYTHON" -m pytest tests/gpu/test_nccl.py "${options[@]}"
        log_name=nccl.txt limited 160 "$PYTHON" -m pytest tests/gpu/test_matrix.py -k nccl "${options[@]}"
    fi
}

tests() {
    local files=(tests/gpu) workers=() experts
    if "$PYTHON" -c "import xdist" 2>/dev/null; then
        workers=(-n "${WORKERS:-8}")
    fi
    if [[ -n "$tiny" ]]; then
        files=(tests/gpu/test_flash_tiles.py) workers=()
    else
        limited 20 "$PYTHON" -m pip list
        limited 10 nvidia-smi
    fi
    # Prints one line per test as it ends (-vv undoes the -q of pyproject.toml), and the reason for a failure
    # immediately.
    log_name=tests.txt limited 450 "$PYTHON" -m pytest "${files[@]}" "${workers[@]}" -vv --tb=short \
        -p no:cacheprovider -p tests.failure_lines
    experts="--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --vocab-size 32000 --bf16
        --micro-batch-size 4 --num-experts 8 --moe-router-topk 2"
    if [[ -n "$tiny" ]]; then
        experts="--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64
            --num-experts 4 --moe-router-topk 2"
    fi
    # shellcheck disable=SC2086
    limited 90 "$PYTHON" pretrain_gpt.py $experts --global-batch-size 8 --disable-bias-linear --swiglu --mock-data \
        --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --train-iters 5 --eval-iters 0 --log-interval 1 \
        --num-workers 0 ${cpu:+"$cpu"}
}

# Eight layers of Llama 3.1 8B, with planned memory of 58 to 60 GiB.
llama() {
    local layers=(--config llama-8b-layers --layers 8 --steps 1 --rounds 5 --warm-up 3)
    measure 200 llama-bf16.json "${layers[@]}"
    measure 210 llama-fp8.json "${layers[@]}" --precision fp8
}

# As many layers as fit. The previous part compares the peak with the plan: SHARE is the fraction of the memory to plan
# with.
headline() {
    local most=(--config llama-8b-layers --memory-share "${SHARE:-0.9}" --steps 1 --rounds 5 --warm-up 3)
    measure 210 headline-bf16.json "${most[@]}"
    measure 220 headline-fp8.json "${most[@]}" --precision fp8
    measure 140 compile.json --config llama-8b-layers --layers 2 --flags "--vocab-size 16384" --steps 2 --rounds 3 \
        --compare=--no-compile
}

# 2,000 steps of a 124M-parameter model in bf16 and in fp8, compared with transformers.
curve() {
    limited 540 "$PYTHON" tools/bench/curve.py --output "$OUT" ${cpu:+"$cpu"} ${tiny:+--tiny}
}

# The rates of this GPU as a device file, which the planner uses to predict the models of later parts.
calibrate() {
    local output="$OUT/device.yaml"
    limited 280 "$PYTHON" tools/calibrate.py --output "$output" ${cpu:+"$cpu"} \
        ${tiny:+--seconds 5 --precision fp32 bf16}
    if [[ -f "$output" && "$DEVICE_FILE" != "$output" ]]; then
        limited 10 cp "$output" "$DEVICE_FILE"
    fi
}

parts() {
    if [[ -z "$tiny" ]]; then
        measure 110 tiny.json --config tiny --rounds 2
        limited 420 "$PYTHON" tools/bench/micro.py --seconds 360 --json "$OUT/micro.json"
    else
        measure 110 tiny.json --config tiny
        limited 420 "$PYTHON" tools/bench/micro.py --config tiny ${cpu:+"$cpu"} --calls 1 --rounds 1 \
            --json "$OUT/micro.json"
    fi
}

models() {
    local graphs="--cuda-graph-impl local"
    if [[ -n "$cpu" ]]; then
        graphs="--recompute-granularity full" # a CPU records nothing
    fi
    measure 160 gpt-bf16.json --config gpt-1.3b --steps 2 --rounds 3
    measure 170 gpt-graphs.json --config gpt-1.3b --steps 2 --rounds 3 --compare "$graphs"
    # Contestants share the memory, so models have few layers and a small vocabulary.
    measure 240 recipes.json --config llama-8b-layers --layers 2 --flags "--vocab-size 16384" --steps 2 --rounds 3 \
        --precision fp8 --compare "--fp8-recipe tensorwise" --compare "--fp8-recipe rowwise" \
        --compare "--fp8-recipe blockwise"
}

# Five steps of a small model with each feature that has no measured run, and texts from its checkpoint. Two ranks share
# the GPU.
features() {
    local size=(--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --bf16) ranks train
    if [[ -n "$tiny" ]]; then
        size=(--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16)
    fi
    train=(pretrain_gpt.py "${size[@]}" --micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 1e-3
        --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0
        --hidden-dropout 0 --mock-data --tokenizer-type ByteTokenizer --eval-iters 0 --log-interval 1 --num-workers 0)
    if [[ -n "$cpu" ]]; then
        train+=("$cpu")
    fi
    ranks=(-m torch.distributed.run --standalone --nproc-per-node 2 "${train[@]}" --distributed-backend gloo)
    rm -rf "$OUT/checkpoints" "$OUT/traced"
    limited 90 "$PYTHON" "${train[@]}" --log-layer-stats 2 --log-params-norm --save "$OUT/checkpoints"
    limited 50 "$PYTHON" tools/generate_text.py --load "$OUT/checkpoints" --prompt "a" "some words" --max-new-tokens 8
    limited 47 "$PYTHON" "${train[@]}" --optimizer-cpu-offload --optimizer-offload-fraction 0.6
    limited 47 "$PYTHON" "${train[@]}" --optimizer-cpu-offload --offload-weights
    limited 47 "$PYTHON" "${train[@]}" --cpu-offloading --cpu-offloading-num-layers 1 --min-offloaded-tensor-size 1024
    limited 47 "$PYTHON" "${train[@]}" --optimizer muon
    limited 47 "$PYTHON" "${ranks[@]}" --dp 2 --data-parallel-sharding-strategy optim_grads
    limited 47 "$PYTHON" "${ranks[@]}" --dp 2 --data-parallel-sharding-strategy optim_grads_params
    limited 47 "$PYTHON" "${ranks[@]}" --pp 2 --untie-embeddings-and-output-weights --pipeline-schedule zb-h2 \
        --optimizer-post-validation --log-interval 5 --trace --trace-step-start 2 --trace-step-end 4 --save "$OUT/traced"
    if "$PYTHON" -c "import matplotlib" 2>/dev/null; then  # a GPU machine may lack it; figures can be drawn elsewhere
        limited 45 "$PYTHON" tools/report.py "$OUT/traced" --output "$OUT/traced.html"
    fi
    limited 47 "$PYTHON" "${train[@]}" --deterministic-mode --attention-dropout 0.1
    rm -rf "$OUT/checkpoints" "$OUT"/traced/iter_*
}

page() {
    local current=page
    limited 20 "$PYTHON" tools/bench/gpu_page.py "$OUT" "$@"
    rm -f "$OUT/page.log"
}

if [[ "$part" == wheels ]]; then
    # Wheels in pure Python, or built for Python 3.12 on x86-64, whatever this machine is.
    rm -rf "$WHEELS" "$CURVE_WHEELS"
    fetch=("$PYTHON" -m pip install --quiet --no-compile --no-deps --only-binary=:all: --python-version 3.12
        --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64
        --platform manylinux2014_x86_64)
    run "${fetch[@]}" --target "$CURVE_WHEELS" transformers tokenizers safetensors huggingface_hub regex filelock \
        httpx httpcore h11 anyio certifi idna typer click fsspec || exit
    run "${fetch[@]}" --target "$WHEELS" \
        pytest pluggy iniconfig packaging pygments pytest-timeout pytest-xdist execnet hypothesis sortedcontainers tqdm \
        PyYAML || exit
    du -sm "$WHEELS" "$CURVE_WHEELS" | sed 's/\t/ MiB in /'
    exit 0
fi

if ! problem=$(mkdir -p -- "$OUT" 2>&1) || [[ ! -w "$OUT" ]]; then
    refuse "FOLDER $OUT cannot be used: ${problem:-it cannot be written to}"
fi
trap 'stop 1' HUP
trap 'stop 2' INT
trap 'stop 15' TERM
for folder in "$WHEELS" "$CURVE_WHEELS"; do
    if [[ -d "$folder" ]]; then
        export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD/$folder"
    fi
done
export PYTHONUNBUFFERED=1
todo=("$part")
if [[ "$part" == all ]]; then
    todo=("${PARTS[@]}")
elif [[ "$part" == page ]]; then
    todo=()
fi
for current in "${todo[@]}"; do
    # Remove the files of an earlier run of this part.
    rm -f "$OUT/$current.log"
    for file in ${WRITTEN[$current]:-}; do
        rm -f "$OUT/$file"
    done
    if [[ -f "$OUT/calls.jsonl" ]]; then
        sed -i "/^{\"part\": \"$current\"/d" "$OUT/calls.jsonl"
    fi
    "$current"
    if [[ "$part" == all ]]; then
        page --quiet
    fi
done
if [[ "$part" != all ]]; then
    page
else
    cat "$OUT/page.md"
fi
say_failed
((${#failed[@]} == 0))
