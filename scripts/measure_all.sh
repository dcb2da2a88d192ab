#!/usr/bin/env bash
# Runs every measurement on one commit and writes what each prints to docs/measurements/output.
set -uo pipefail

usage() {
    cat <<'USAGE'
Usage: scripts/measure_all.sh [--output DIR] [--page FILE] [--only NAME,...] [--list]

Hours on two cores with nothing else running. A measurement that is done for the present commit is
skipped, so an interrupted run goes on where it stopped (not with uncommitted changes). A failed one
does not stop the others; the exit status is 1 if one failed. At the end the changes since the last
run are printed.

  --output DIR      results, pictures and logs (default: build/measurements)
  --page FILE       the page that lists the measurements (default: docs/measurements/latest.md); what
                    each printed goes to output/NAME.txt beside it
  --only NAME,...   these alone; the output of the others stays
  --list            print the names and commands, and exit

SEMSCHED_DATA=DIR names the data that some need.
USAGE
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
output=build/measurements
page=docs/measurements/latest.md
only=
list=
while (($#)); do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --output) output=${2:?--output needs a folder}; shift 2 ;;
        --page) page=${2:?--page needs a file}; shift 2 ;;
        --only) only=,${2:?--only needs names},; shift 2 ;;
        --list) list=yes; shift ;;
        *) usage >&2; exit 2 ;;
    esac
done

python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=python
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_CPU_OMP_THREADS_BIND=nobind
export OMP_NUM_THREADS=1
commit=$(git rev-parse --short HEAD)
[[ -z $(git status --porcelain -- vllm_semantic_sched configs scripts) ]] || commit+=+
failed=0

model=build/tiny-model
small=build/small-model
real=build/real-model

# Make the models that a command names.
make_models() {
    [[ $* != *$model* || -d $model ]] || "$python" -m vllm_semantic_sched.cli bench make-model "$model"
    [[ $* != *$small* || -d $small ]] || "$python" -m vllm_semantic_sched.cli bench make-model \
        "$small" --size small --max-model-len 1024
    [[ $* != *$real* || -d $real ]] || "$python" -m vllm_semantic_sched.cli bench make-model \
        "$real" --real
}

# Run one measurement, unless it is done for this commit or not asked for.
step() {
    local name=$1 folder=$output/$1
    shift
    if [[ -n $list ]]; then
        printf '%-22s %s\n' "$name" "$*"
        return
    fi
    [[ -z $only || $only == *",$name,"* ]] || return 0
    [[ $commit == *+ || $(cat "$folder/commit" 2>/dev/null) != "$commit" ]] || return 0
    rm -rf "$folder"
    mkdir -p "$folder"
    printf '%-22s ' "$name"
    local begin=$SECONDS command=("$@")
    [[ $1 == semsched ]] && command=("$python" -m vllm_semantic_sched.cli "${@:2}")
    [[ $1 == scripts/* ]] && command=("$python" "$@")
    make_models "$@" >"$folder/models.txt" 2>&1
    if COLUMNS=100 "${command[@]}" >"$folder/printed.txt" 2>"$folder/errors.txt"; then
        printf '%s' "${*//$output/DIR}" >"$folder/command"
        printf '%s' "$(date -u +%F)" >"$folder/day"
        printf '%s' "$commit" >"$folder/commit"
        printf 'done, %d s\n' $((SECONDS - begin))
    else
        printf 'failed after %d s, see %s\n' $((SECONDS - begin)) "$folder/errors.txt"
        failed=1
    fi
}

# Simulated: figures depend on scenario and seed alone.
step door scripts/studies/door_cost.py
step presets semsched simulate --scenario presets --metric ttft_p99 --output "$output/presets"
step on-device semsched simulate --scenario on-device --metric ttft_p99 --output "$output/on-device"
step shares-simulated semsched simulate --scenario shares --output "$output/shares-simulated"
step deadlines semsched simulate --scenario deadlines --metric goodput --workers 2 --output "$output/deadlines"
step within-level semsched simulate --scenario within-level --metric e2e_p99 --workers 2 --output "$output/within-level"
step programs semsched simulate --scenario programs --metric program_mean --workers 2 --output "$output/programs"
step price semsched simulate --scenario price --workers 2 --output "$output/price"
step frontier scripts/studies/frontier.py --workers 2 --output "$output/frontier"
step reproduction scripts/studies/reproduction.py --workers 2
step corrections scripts/studies/corrections.py
step sessions scripts/studies/sessions.py --output "$output/sessions"
step order scripts/studies/order.py --output "$output/order" --quiet
for device in a100:128 h100:256; do
    step "device-${device%:*}" scripts/studies/device_load.py --profile "${device%:*}" \
        --seats "${device#*:}" --requests 1000 --factor 1 1.75 --output "$output/device-${device%:*}"
done
step offloading scripts/studies/offloading.py --output "$output/offloading"
step urgent-cache scripts/studies/urgent_cache.py --conversations 6
# On the real engine.
step cuda-path scripts/studies/cuda_path.py --output "$output/cuda-path"
for place in before alone; do
    step "real-$place" semsched bench run --model "$real" --natural-ends --place $place \
        --requests 120 --rounds 2 --overload 5.5 --host-gib 0.5 --quick --repeats 1 --nice -5 \
        --check-outputs --detail --mix rare,even --max-output 160 --quiet \
        --output "$output/real-$place"
done
step comparison semsched bench run --model "$model" --requests 300 --rounds 2 --detail --quiet \
    --check-outputs --output "$output/comparison"
step presets-engine semsched bench run --model "$model" --requests 1000 --overload 1.25 --mix rare \
    --tenants 4:1:1:1:1 --detail --quiet \
    --schedulers fcfs,semantic-true@throughput,semantic-true@latency,semantic-true@fairness \
    --output "$output/presets-engine"
step reproduction-live scripts/studies/reproduction_live.py --model "$model" --quiet \
    --output "$output/reproduction-live"
step tiers scripts/studies/tiers.py --model "$small" --profile cpu-2core-small --quiet \
    --output "$output/tiers"
step shares scripts/studies/shares.py --model "$model" --quiet --output "$output/shares"
step canary scripts/studies/canary.py --model "$model" --quiet --output "$output/canary"
step flood scripts/studies/flood.py --model "$model" --quiet --output "$output/flood"
step chaos scripts/studies/chaos.py --model "$model" --requests 2000 --output "$output/chaos"
step retention scripts/studies/retention.py --model "$model" --quiet --output "$output/retention"
step kv-copy scripts/studies/kv_copy.py
step overhead semsched bench overhead --everything
step predictor-cost scripts/studies/predictor_cost.py --engine "$model" --output "$output/predictor-cost"
step predictor semsched evaluate --all --claims --no-baselines --bars tests/data/predictor_bars.yaml \
    --data tests/data/urgency tests/data/everyday tests/data/long_prompts.csv \
    tests/data/compositions tests/data/conversations \
    --output "$output/predictor-report"
step validation scripts/studies/validation.py --output "$output/validation"
step whatif scripts/studies/validation.py --whatif --output "$output/whatif"
step soak scripts/studies/soak.py --model "$model" --hours 1 --pause 5 --output "$output/soak"
[[ -z $list ]] || exit 0

printed=$(dirname "$page")/output
before=$(mktemp -d)
mkdir -p "$printed"
cp "$printed"/*.txt "$before" 2>/dev/null
"$python" scripts/studies/latest.py "$output" "$page" || failed=1
diff -rNU0 -I '^commit: ' -I '^day: ' "$before" "$printed" && echo "no figure has changed"
rm -rf "$before"
exit $failed
