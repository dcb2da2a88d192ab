#!/usr/bin/env bash
# Checks this project on a GPU, also on a machine without network and without vLLM.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: scripts/gpu_check.sh check|load [OPTION...]      on the machine with the GPU
       scripts/gpu_check.sh build OUT [OPTION...]       where there is a package registry
       scripts/gpu_check.sh aside COMMAND [ARGUMENT...]

  check   two minutes: versions and imports, KV copies beside matrix products, a small model under
          vLLM's scheduler and this one with and without KV swap (in bfloat16 with graphs, and in
          float32, where all answers must be equal); in a checkout also that the decisions are those
          of the simulator. Without a GPU on the CPU engine.
  load    eight minutes: the shape of Llama-3.1-8B without weights, 128 seats, 1.5 times what FCFS
          serves: FCFS, this scheduler with KV swap, vLLM's priorities, a measured engine profile,
          this scheduler without swap. Step times beside those of the emulated device.
  build   packs vLLM's CUDA build, thinned to one kind of GPU, what it imports and this project into
          OUT/gpu-kit.tar.xz, for a machine that has Python 3.12, PyTorch 2.11 for CUDA 13, Triton
          and transformers. 326 MB are downloaded once, into ${XDG_CACHE_HOME:-~/.cache}.
  aside   runs COMMAND while the networks' weights are out of the working tree, and puts them back:
          for a copy of the tree to a machine that takes no more than 64 MiB.

check and load leave README.md, results.json and a log for each step in --output (default: gpu-check/
and the name), whatever fails; the exit status is 1 if a step failed. Every step has a time limit. Where
vLLM is installed they use it; a kit brings its own. scripts/gpu_check.sh check --help has the options.
USAGE
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=python3
[[ -x $root/.venv/bin/python ]] && python=$root/.venv/bin/python
python=${PYTHON:-$python}
what=${1:-}
export PYTHONPATH=$root/scripts:$root/scripts/studies:$root${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1 # nothing is imported from where this was called
case "$what" in
    -h | --help) usage; exit 0 ;;
    build) shift; exec "$python" -m gpu.kit "$@" ;;
    aside) shift; exec "$python" -m gpu.aside "$@" ;;
    check | load) ;;
    *) usage >&2; exit 2 ;;
esac
if [[ -d $root/site ]]; then # an unpacked kit
    PYTHONPATH=$root/site:$PYTHONPATH
    export VLLM_USE_FLASHINFER_SAMPLER=0 # it is not in the kit
fi
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false
export VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_HOST_IP=127.0.0.1 PYTHONUNBUFFERED=1
exec "$python" -m gpu.checks "$@"
