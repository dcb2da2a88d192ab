#!/usr/bin/env bash
# Checks style, types and the direction of imports, then runs all tests, those on the real engine
# included, two files at a time. Arguments go to pytest: scripts/test.sh -k heap;
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
"$bin/mypy"

# One core per worker is bound otherwise, which a machine with few cores cannot give.
export VLLM_CPU_OMP_THREADS_BIND=nobind
# Tests use what the repository and .venv hold; nothing is fetched and nothing is reported.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

# A worker's matrix products would wait for each other's threads.
export OMP_NUM_THREADS=1
# Most of the time goes into starting engines, which takes one core. In the order of their folders,
# as the longest come first.
exec "$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --forbid-skips "$@"
