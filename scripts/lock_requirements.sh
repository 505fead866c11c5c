#!/usr/bin/env bash
# Writes scripts/requirements.lock: the packages of the image (scripts/Dockerfile) and their dependencies, with hashes.
# Requires uv.
#
#   bash scripts/lock_requirements.sh
#
# The versions are those in requirements.txt and requirements-dev.txt; --upgrade upgrades their dependencies.
# torch and its libraries are left out, because the right build, and so the hash, depends on the machine and the index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

{
    grep -v '^torch==' requirements.txt
    grep -E '^(fastapi|uvicorn)==' requirements-dev.txt
} | uv pip compile --quiet --generate-hashes --python-version 3.11 --python-platform linux --no-header --no-annotate \
    --no-emit-index-url --output-file scripts/requirements.lock "$@" -
