#!/usr/bin/env bash
# Checks the patches for vLLM, and applies them to an installed one: see patches.py.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
exec "$root/.venv/bin/python" "$root/scripts/patches.py" "$@"
