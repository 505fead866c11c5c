# Sourced by the other scripts, from the repository root.
# shellcheck shell=bash

# Sets PYTHON to an interpreter with the packages of the given requirements file: the interpreter of .venv in the
# repository, which is created on first use and updated whenever the file has changed. To use your own environment (a
# container, a cluster module), set PYTHON to its interpreter. Nothing is then installed, and this interpreter must be
# able to import the modules named after the file.
ensure_environment() {
    local requirements="$1" venv=.venv installed
    if [[ -n "${PYTHON:-}" ]]; then
        if ! command -v "$PYTHON" >/dev/null; then
            echo "PYTHON=$PYTHON: cannot be run; set it to an interpreter, or unset it to have .venv made" >&2
            return 1
        fi
        "$PYTHON" -c "$IMPORT_MODULES" "${@:2}"
        return
    fi
    PYTHON="$venv/bin/python"
    if [[ ! -x "$PYTHON" ]] && ! run python3 -m venv "$venv"; then
        echo "install Python 3.11 or later with its venv module (python3-venv on Debian and Ubuntu)," \
            "or set PYTHON to an environment of your own" >&2
        return 1
    fi
    # A copy of the installed requirements; while it equals the requirements file, nothing needs to be installed.
    installed="$venv/$requirements"
    if ! cat requirements.txt "$requirements" | cmp -s - "$installed"; then
        echo "installing $requirements into $venv (a minute or two; torch is large)"
        run "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile -r "$requirements"
        cat requirements.txt "$requirements" >"$installed"
    fi
}

# Prints a command as it could be typed.
show() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
}

# Prints a command, then runs it.
run() {
    show "$@" >&2
    "$@"
}

IMPORT_MODULES='
import importlib
import sys
try:
    for name in sys.argv[1:]:
        importlib.import_module(name)
except ImportError as error:
    remedy = "install it into this interpreter, or unset PYTHON to have .venv made with all that is needed"
    raise SystemExit(f"PYTHON={sys.executable}: {error}; {remedy}")
'

COUNT_GPUS='
import sys
try:
    import torch
except ImportError as error:
    remedy = "set PYTHON to an interpreter that has requirements.txt, or install it into this one"
    raise SystemExit(f"PYTHON={sys.executable}: torch cannot be imported ({error}); {remedy}")
print(max(1, torch.cuda.device_count()))
'

# Runs pretrain_gpt.py with the given flags under LAUNCH (the words of a launcher, as set by train_gpt_slurm.sh), or
# otherwise under torchrun on this machine with one process per GPU. A dry run and a rehearsal need no launcher.
launch_training() {
    if [[ -z "${PYTHON:-}" ]]; then
        PYTHON=python3
        if [[ -x .venv/bin/python ]]; then
            PYTHON=.venv/bin/python
        fi
    fi
    local launcher=("$PYTHON") gpus
    if [[ " $* " != *" --dry-run "* && " $* " != *" --rehearse "* ]]; then
        if [[ -n "${LAUNCH:-}" ]]; then
            read -r -a launcher <<<"$LAUNCH"
        else
            gpus="${GPUS_PER_NODE:-$("$PYTHON" -c "$COUNT_GPUS")}"
            launcher+=(-m torch.distributed.run --standalone --nproc-per-node "$gpus")
        fi
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    fi
    run "${launcher[@]}" pretrain_gpt.py "$@"
}

# Sets `data` to the flags of the data set: DATA_PATH (a prefix, or "weight prefix weight prefix ...") with its
# tokenizer from the environment, or otherwise mock tokens of the given vocabulary.
data_flags() {
    local vocab_size="$1" default_tokenizer="$2" paths
    if [[ -z "${DATA_PATH:-}" ]]; then
        data=(--mock-data --vocab-size "$vocab_size")
        return
    fi
    read -r -a paths <<<"$DATA_PATH"
    data=(--data-path "${paths[@]}" --split "${SPLIT:-969,30,1}")
    data+=(--tokenizer-type "${TOKENIZER_TYPE:-$default_tokenizer}" --vocab-size "$vocab_size")
    if [[ -n "${VOCAB_FILE:-}" ]]; then
        data+=(--vocab-file "$VOCAB_FILE" --merge-file "${MERGE_FILE:?goes with VOCAB_FILE}")
    else
        data+=(--tokenizer-model "${TOKENIZER_MODEL:?set it to the tokenizer that made DATA_PATH}")
    fi
    if [[ -n "${DATA_CACHE_PATH:-}" ]]; then
        data+=(--data-cache-path "$DATA_CACHE_PATH")
    fi
}
