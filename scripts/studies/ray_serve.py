"""Ray Serve LLM with two replicas of a tiny model on the CPU: urgent requests first, refusals with
Retry-After, a policy reload on both, and the death of one.

The first run makes an environment of its own, because Ray brings many packages. Ray listens on all
interfaces, so it runs in a network namespace of its own, which needs Linux and `unshare` and `ip`.
A run takes five minutes and 11 GB of memory.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
URL = "http://127.0.0.1:8000"
METRICS_PORT = 9099
MODEL = "tiny"
SEATS = 4

POLICY = """\
predictor: {{enabled: false}}
admission: {{queue: {{requests: {waiting}}}}}
"""
MOST_URGENT = 0
LEAST_URGENT = 4
ROUND = 60  # requests, within a second; every fifth is urgent


@dataclass
class Answer:
    """What a client received. `first`, `last`: seconds from sending to first and last token."""

    level: int
    status: int = 0
    first: float = float("nan")
    last: float = float("nan")
    retry_after: str | None = None
    code: str | None = None


@dataclass
class Report:
    """Figures by name, and what went wrong."""

    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def note(self, name: str, value: Any) -> None:
        self.figures[name] = value
        print(f"{name}: {value}", flush=True)

    def check(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)
            print(f"FAILED: {problem}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for figures and logs")
    parser.add_argument("--env", type=Path, default=ROOT / "build" / "ray-env", help="environment")
    parser.add_argument("--rounds", type=int, default=8, help="of the load (default: 8)")
    parser.add_argument(
        "--stock-router", action="store_true", help="measure Ray's own router; only the load"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    return run(args) if args.inside else start_inside(args)


# Environment and namespace


def start_inside(args: argparse.Namespace) -> int:
    """Run this script again, in its environment and a network namespace with a loopback only."""
    environment = os.environ | {
        "SEMSCHED_VENV": str(args.env.resolve()),
        "SEMSCHED_EXTRAS": "cpu,ray",
    }
    subprocess.run([ROOT / "scripts" / "setup.sh"], check=True, env=environment)
    unshare = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-r", "-n"]
    up = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    python = str(args.env.resolve() / "bin" / "python")
    command = [*unshare, *up, python, __file__, "--inside", *sys.argv[1:]]
    return subprocess.run(command, env=process_environment()).returncode


def process_environment() -> dict[str, str]:
    """Settings that Ray's processes inherit."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_metrics_report_interval_ms": "1000",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **settings}


# The application


@contextlib.contextmanager
def application(args: argparse.Namespace, policy: Path) -> Iterator[None]:
    """Serve two replicas for as long as the block lasts."""
    import ray
    from ray import serve

    from vllm_semantic_sched.fleet.ray import build_app
    from vllm_semantic_sched.lab.bench.tiny_model import make_model

    model = args.output / "model"
    make_model(model)
    engine = {
        "max_model_len": 1024,
        "max_num_seqs": SEATS,
        "num_gpu_blocks_override": 160,
        "block_size": 32,
        "kv_cache_memory_bytes": 256 * 2**20,
        "gpu_memory_utilization": 0.7,
        "enforce_eager": True,
        "dtype": "float32",
    }
    deployment: dict[str, Any] = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}}
    if args.stock_router:
        deployment["request_router_config"] = {"request_routing_stats_period_s": 0.5}
    config = {
        "model_loading_config": {"model_id": MODEL, "model_source": str(model.resolve())},
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": engine,
        "deployment_config": deployment,
    }
    arguments = {
        "policy": str(policy.resolve()),
        "llm_configs": [config],
        "ingress_deployment_config": {"num_replicas": 1},
    }
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        _metrics_export_port=METRICS_PORT,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8000})
        serve.run(build_app(arguments), name="llm", route_prefix="/")
        yield
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()


def statuses() -> list[dict[str, Any]]:
    """`UrgencyServer.semsched_status` of all replicas."""
    from ray import serve
    from ray.llm._internal.serve.utils.broadcast import broadcast

    handle = serve.get_deployment_handle(f"UrgencyServer:{MODEL}", app_name="llm")
    return list(broadcast(handle, "semsched_status"))


def metric(name: str) -> dict[str, float]:
    """Values of a metric on Ray's page, by its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    start = f"ray_semsched_{name}{{"
    pairs = (line.removeprefix(start).rsplit("} ", 1) for line in lines if line.startswith(start))
    return {labels: float(value) for labels, value in pairs}


async def wait_for(condition: Any, seconds: float) -> bool:
    """Wait until a condition holds; False if it does not in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            if await asyncio.to_thread(condition):
                return True
        await asyncio.sleep(0.5)
    return False


# Clients


async def ask(session: Any, level: int, tokens: int, stream: bool = True) -> Answer:
    """Send a request and read its answer."""
    answer = Answer(level)
    body = {
        "model": MODEL,
        "prompt": f"Request {random.random()}",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": stream,
        "vllm_xargs": {"urgency": level},
    }
    begin = time.monotonic()
    async with session.post("/v1/completions", json=body) as response:
        answer.status = response.status
        answer.retry_after = response.headers.get("Retry-After")
        if response.status != 200:
            with contextlib.suppress(Exception):
                answer.code = (await response.json())["error"]["code"]
            return answer
        async for _ in response.content:
            if answer.first != answer.first:
                answer.first = time.monotonic() - begin
        answer.last = time.monotonic() - begin
    return answer


async def load(session: Any, seed: int) -> list[Answer]:
    """One round: requests that arrive within a second, a fifth of them urgent."""
    draw = random.Random(seed)

    async def one(number: int) -> Answer:
        await asyncio.sleep(draw.random())
        level = MOST_URGENT if number % 5 == 0 else LEAST_URGENT
        return await ask(session, level, draw.choice((16, 32, 64)))

    return list(await asyncio.gather(*map(one, range(ROUND))))


def summary(answers: list[Answer], level: int) -> dict[str, float]:
    """Seconds to the first token: mean, p50, p90, max."""
    times = sorted(answer.first for answer in answers if answer.level == level)
    deciles = statistics.quantiles(times, n=10)
    figures = {"mean": statistics.mean(times), "p50": deciles[4], "p90": deciles[8]}
    return {name: round(value, 3) for name, value in {**figures, "max": times[-1]}.items()}


# What is shown


async def urgent_first(session: Any, report: Report, rounds: int) -> None:
    answers: list[Answer] = []
    for number in range(rounds + 1):
        done = await load(session, number)
        if number > 0:  # the first warms up
            answers += done
    report.check(all(answer.status == 200 for answer in answers), "a request of the load failed")
    urgent = summary(answers, MOST_URGENT)
    late = summary(answers, LEAST_URGENT)
    report.note("TTFT of level 0, s", urgent)
    report.note("TTFT of level 4, s", late)
    report.check(urgent["p90"] < late["p50"] / 2, "urgent requests were not served first")


async def placement(session: Any, report: Report, rounds: int = 4) -> None:
    """Two urgent requests, one after the other, beside others: one for each replica."""
    split = 0
    for _ in range(rounds):
        tasks = [asyncio.create_task(ask(session, LEAST_URGENT, 100)) for _ in range(9)]
        await asyncio.sleep(0.3)
        for _ in range(2):
            tasks.append(asyncio.create_task(ask(session, MOST_URGENT, 800)))
            await asyncio.sleep(0.3)
        levels = [status["engines"][0]["levels"] for status in await asyncio.to_thread(statuses)]
        split += [counts[MOST_URGENT] for counts in levels] == [1, 1]
        await asyncio.gather(*tasks)
    report.note("rounds in which two urgent requests went to two replicas", f"{split} of {rounds}")
    report.check(split == rounds, "urgent requests shared a replica")


async def reload_and_refuse(session: Any, report: Report, policy: Path) -> None:
    async def reload(waiting: int, version: int) -> None:
        policy.write_text(POLICY.format(waiting=waiting))

        def adopted() -> bool:
            versions = [status["engines"][0]["policy"]["version"] for status in statuses()]
            return versions == [version, version]

        begin = time.monotonic()
        done = await wait_for(adopted, 30)
        report.note(
            f"seconds until both replicas have version {version}",
            round(time.monotonic() - begin, 1),
        )
        report.check(done, f"the policy's version {version} is not on both replicas")

    async def burst(stream: bool) -> list[Answer]:
        asked = (ask(session, LEAST_URGENT, 64, stream) for _ in range(ROUND))
        return list(await asyncio.gather(*asked))

    await reload(waiting=6, version=2)
    for stream in (False, True):
        answers = await burst(stream)
        name = "streamed" if stream else "not streamed"
        counts = Counter(str(answer.status) for answer in answers)
        refused = [answer for answer in answers if answer.status == 429]
        report.note(f"burst of {ROUND}, at most 6 waiting per replica, {name}", dict(counts))
        retry_after = {answer.retry_after for answer in refused}
        report.note(f"Retry-After, {name}", sorted(retry_after, key=str))
        report.check(set(counts) == {"200", "429"}, f"{name}: statuses {counts}")
        complete = all(answer.code == "over_capacity" and answer.retry_after for answer in refused)
        report.check(complete, f"{name}: a refusal without code or Retry-After")
    await reload(waiting=1000, version=3)
    counts = Counter(str(answer.status) for answer in await burst(True))
    report.note("the same burst, at most 1000 waiting", dict(counts))
    report.check(set(counts) == {"200"}, f"after the reload: statuses {counts}")


async def metrics(report: Report) -> None:
    def complete() -> bool:
        reloads = metric("policy_reloads_total")
        return sum(value == 2 for key, value in reloads.items() if '"adopted"' in key) == 2

    done = await wait_for(complete, 20)
    report.check(
        done, f"reloads on Ray's page: {await asyncio.to_thread(metric, 'policy_reloads_total')}"
    )
    ended = await asyncio.to_thread(metric, "ended_requests_total")
    total = sum(value for key, value in ended.items() if '"completed"' in key)
    report.note("completed requests on Ray's metrics page", total)
    waits = await asyncio.to_thread(metric, "queueing_delay_seconds_count")
    report.check(total > 0 and sum(waits.values()) > 0, "metrics are missing on Ray's page")


async def survive(session: Any, report: Report) -> None:
    import psutil

    answers: list[tuple[float, Answer]] = []
    begin = time.monotonic()

    async def send(number: int) -> None:
        await asyncio.sleep(number * 0.2)
        sent = time.monotonic() - begin
        try:
            answers.append((sent, await ask(session, number % 5, 40)))
        except Exception:  # the stream broke
            answers.append((sent, Answer(number % 5, status=-1)))

    before = await asyncio.to_thread(statuses)
    victim = psutil.Process(before[0]["pid"])
    flow = [asyncio.create_task(send(number)) for number in range(100)]
    await asyncio.sleep(5)
    killed = time.monotonic() - begin
    for process in [*victim.children(recursive=True), victim]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    await asyncio.gather(*flow)
    failed = [sent for sent, answer in answers if answer.status != 200]
    later = [sent for sent in failed if sent > killed + 3]
    report.note("requests while a replica is killed", len(answers))
    report.note("of them failed", len(failed))
    report.note(
        "last failed one was sent, s after the kill", round(max(failed, default=killed) - killed, 2)
    )
    report.check(not later, f"{len(later)} requests failed more than 3 s after the kill")

    def replaced() -> bool:
        now = statuses()
        return len(now) == 2 and before[0]["pid"] not in [status["pid"] for status in now]

    done = await wait_for(replaced, 180)
    report.note("seconds until its successor serves", round(time.monotonic() - begin - killed))
    report.check(done, "the killed replica was not replaced")
    if done:
        await placement(session, report, rounds=2)


async def show(args: argparse.Namespace, policy: Path, report: Report) -> None:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        URL, connector=connector, timeout=aiohttp.ClientTimeout(120)
    ) as session:
        await urgent_first(session, report, args.rounds)
        if not args.stock_router:
            await placement(session, report)
            await reload_and_refuse(session, report, policy)
            await metrics(report)
            await survive(session, report)


def run(args: argparse.Namespace) -> int:
    report = Report()
    policy = args.output / "policy.yaml"
    policy.write_text(POLICY.format(waiting=1000))
    begin = time.monotonic()
    with application(args, policy):
        report.note("seconds until both replicas serve", round(time.monotonic() - begin))
        asyncio.run(show(args, policy, report))
    figures = {**report.figures, "problems": report.problems}
    (args.output / "results.json").write_text(json.dumps(figures, indent=1) + "\n")
    print("\n".join(report.problems) or "all shown")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
