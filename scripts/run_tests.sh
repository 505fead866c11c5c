#!/usr/bin/env bash
# Runs the tests on CPU (and tests/gpu if there is a GPU) in .venv, which is created if it is missing. Test files run in
# parallel, in three workers for two cores, because some tests wait (WORKERS=N; WORKERS=1 runs them one by one). Without
# arguments it runs the core suite: every contract once. --all adds the campaigns: commands in the documentation, SLURM,
# hosts, faults, searches, Triton's interpreter and more layouts. --whole runs whole grids of layouts. Further arguments
# go to pytest:
#   bash scripts/run_tests.sh tests/pure -k rank
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
ensure_environment requirements-dev.txt torch pytest
cores="$(getconf _NPROCESSORS_ONLN)"
workers="${WORKERS:-$((cores < 5 ? (3 * cores + 1) / 2 : 8))}"
if ((workers > 1)); then
    set -- -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
fi
show "$PYTHON" -m pytest "$@"
exec "$PYTHON" -m pytest "$@"
