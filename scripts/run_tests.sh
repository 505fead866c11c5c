#!/usr/bin/env bash
# Runs the tests on CPU (and tests/gpu where there is a GPU), in .venv, which is made if it is missing.
# Further arguments go to pytest: bash scripts/run_tests.sh tests/pure -k rank
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
ensure_environment requirements-dev.txt
show "$PYTHON" -m pytest "$@"
exec "$PYTHON" -m pytest "$@"
