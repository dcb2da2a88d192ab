#!/usr/bin/env bash
# Checks style, types and the direction of imports, then runs all tests, those on the real engine
# included, three files at a time. Arguments go to pytest: scripts/test.sh -k heap;
# scripts/test.sh -n 0 --hypothesis-profile random tests/policy
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
cd "$root"
bin=$root/.venv/bin

# Every engine is a new process: with bytecode it starts in half the time.
unset PYTHONDONTWRITEBYTECODE

"$bin/ruff" check --quiet
"$bin/ruff" format --quiet --check
"$bin/lint-imports" --no-logo --no-cache
"$bin/mypy" --num-workers 2

# vLLM would bind each worker to a core of its own, and a small machine has too few.
export VLLM_CPU_OMP_THREADS_BIND=nobind
# Tests download nothing and report nothing.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

# With more threads than cores, matrix products wait for each other.
export OMP_NUM_THREADS=1
# Three workers on two cores: one works while the servers of the others wait. Files
# run in the order of their folders, which puts the longest first.
exec "$bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder --forbid-skips "$@"
