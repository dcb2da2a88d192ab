#!/usr/bin/env bash
# vLLM's own scheduler tests with vLLM's scheduler and with ours: see conformance.py.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
exec "$root/.venv/bin/python" "$root/scripts/conformance.py" "$@"
