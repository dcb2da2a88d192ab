#!/usr/bin/env bash
# Tests this project with several releases of vLLM, each in an environment of its own.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: scripts/matrix.sh [VERSION...] [--only unit|engine|conformance]... [--record]

Runs the tests of this project and vLLM's own scheduler tests with each release and prints a table.
The exit status is 1 if a test failed. Takes about 25 minutes per release on two cores.

Environments are kept under ${XDG_CACHE_HOME:-~/.cache}/vllm-semantic-sched. A release with a CPU
build runs all tests. Of one without, the CUDA wheel is put in front of the CPU environment without
its dependencies. That runs all but a model: the tests of the scheduler use a simulated KV cache.

  VERSION    releases (default: those in tests/data/conformance)
  --only     run some of the columns
  --record   store anew which of vLLM's tests pass with vLLM's class, and the results for
             docs/reference.md
USAGE
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
base=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-semantic-sched/environments/0.32.0
SEMSCHED_VENV=$base "$root/scripts/setup.sh"
exec "$base/bin/python" "$root/scripts/matrix.py" "$@"
