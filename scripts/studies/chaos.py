"""Disturb a real server in many ways at once and check that it keeps its guarantees.

An undisturbed run first answers each distinct request, a few at a time. Then many more requests
follow while clients disconnect, send invalid hints and duplicates, the policy file changes to valid
and invalid ones, the predictor is killed, and the server is paused and loses its caches. Decoding
is greedy, so every complete answer must equal the undisturbed one, and every partial answer must be
a prefix of it. Afterwards nothing may be left on the server.
"""

import argparse
import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from common import main

from vllm_semantic_sched.lab.bench.schedulers import MIDDLEWARE, SCHEDULER_CLASS, swap_arguments
from vllm_semantic_sched.lab.bench.server import PREDICTOR, ServerConfig, VllmServer
from vllm_semantic_sched.lab.bench.workload import write_message
from vllm_semantic_sched.operate.audit import Audit
from vllm_semantic_sched.operate.client import AdminClient, AdminError
from vllm_semantic_sched.operate.why import NOT_RECORDED, summarize
from vllm_semantic_sched.policy.config import load_policy

BASE_POLICY = """\
tiers:
  - {name: immediate, reserve: {seats: 1, mode: soft}, slo: {ttft: 5}}
  - {name: emergent}
  - {name: urgent, share: 0.3}
  - {name: semi, queue: {requests: 30, timeout: 20}}
  - {name: routine, queue: {requests: 20, timeout: 10}, shed_order: 1}
dedup: waiting
admission: {queue: {requests: 60}}
aging: {enabled: true, interval: 2}
deadlines: {enabled: true}
fair_share: {enabled: true}
shedding: {enabled: true}
protect: {level: 0, price: 0.02, worth: 10000}
"""
"""The part of the policy that stays the same: every feature is on."""

# Metrics that are zero on an idle server.
_ZERO_WHEN_IDLE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "semsched:host_pool_usage",
    "semsched:host_copies",
)
_ANSWER_SECONDS = 120.0  # a request that takes longer hangs

_HOLD_COST = "semsched:hold_cost"
_ROUNDING = 1e-6  # of sums of losses
_UNDISTURBED_AT_A_TIME = 4
INVALID_HINTS: tuple[object, ...] = ("abc", 99, -1, 1.5, "0x1", "", [1, 2])
INVALID_POLICIES = (
    "levels: 4\n",
    "base: sjf\n",
    "preemption: {max_per_reqest: 1}\n",
    "default_level: 99\n",
    "retention: {mode: sometimes}\n",
    "{",
)
VALID_POLICIES = (
    "",
    "preemption: {max_per_request: 8}\n",
    "preemption: {min_level_gap: 2}\ndefault_level: 3\n",
    "default_level: 4\npreemption: {enabled: false}\n",
    "default_level: 1\ndecision: {missed_cost: [2.0]}\n",
)


@dataclass(frozen=True)
class Case:
    """A distinct request: its prompt and the number of output tokens."""

    prompt: str
    tokens: int


@dataclass(frozen=True)
class Visit:
    """One request of the disturbed run: which distinct request it is, its `vllm_xargs`, and the
    seconds after which the client disconnects (None if it waits)."""

    case: int
    stream: bool
    extras: dict[str, Any]
    leaves_after: float | None


@dataclass
class Answer:
    """What a client received. `ends` counts finish reasons; `left`: the client disconnected."""

    status: int | None = None
    text: str = ""
    ends: int = 0
    code: str | None = None
    left: bool = False
    problem: str | None = None


@dataclass
class Report:
    """Outcomes of requests, disturbances, what holds cost now and then, and violated guarantees."""

    outcomes: Counter[str] = field(default_factory=Counter)
    disturbances: Counter[str] = field(default_factory=Counter)
    hold_costs: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def make_cases(count: int, seed: int = 0) -> list[Case]:
    """Draw distinct prompts of up to about 300 tokens with answers of 4 to 120 tokens."""
    draw = random.Random(seed)
    text_rng = np.random.default_rng(seed)
    cases = []
    for number in range(count):
        level = draw.randrange(5)
        length = draw.choice((1, 1, 1, 3, 12))
        text = " ".join(write_message(level, text_rng) for _ in range(length))
        cases.append(Case(f"{number}. {text}", draw.choice((4, 16, 40, 80, 120))))
    return cases


def make_visits(count: int, cases: int, seed: int = 0) -> list[Visit]:
    """Draw the requests of the disturbed run. A third states a level, a tenth an invalid one, and a
    tenth shares a `dedup_key` with others; one in six clients disconnects early."""
    draw = random.Random(seed + 1)
    visits = []
    for _ in range(count):
        extras: dict[str, Any] = {}
        kind = draw.random()
        if kind < 0.33:
            extras["urgency"] = draw.randrange(5)
        elif kind < 0.43:
            extras["urgency"] = draw.choice(INVALID_HINTS)
        if draw.random() < 0.1:
            extras["dedup_key"] = f"key {draw.randrange(5)}"
        leaves = draw.choice((0.0, 0.02, 0.2, 1.0)) if draw.random() < 1 / 6 else None
        visits.append(Visit(draw.randrange(cases), draw.random() < 0.5, extras, leaves))
    return visits


class Chaos:
    """Runs both runs against a server with the operator's endpoints.

    Args:
        policy: the server's policy file.
        base: the part of the policy that cannot change while the server runs.
        kill_predictor: kills the predictor process and returns True; False if there is none.
        hold_cost: share of the last minute of engine time that holds cost.
    """

    def __init__(
        self,
        url: str,
        policy: Path,
        base: str,
        kill_predictor: Callable[[], bool],
        hold_cost: Callable[[], float],
        api_key: str | None = None,
        seed: int = 0,
    ) -> None:
        self._url = url
        self._policy = policy
        self._base = base
        self._kill_predictor = kill_predictor
        self._hold_cost = hold_cost
        self._admin = AdminClient(url, api_key)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._random = random.Random(seed + 2)
        self.report = Report()

    async def run(
        self,
        cases: Sequence[Case],
        visits: Sequence[Visit],
        at_a_time: int,
        pace: float = 1.0,
        until: Collection[str] = (),
    ) -> Report:
        """Run the undisturbed and the disturbed run, with so many concurrent requests in the
        latter. `pace` multiplies the pauses between disturbances; the visits are made again until
        those that `until` names have happened."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            self._url, connector=connector, headers=self._headers
        ) as session:
            undisturbed = [Visit(number, False, {}, None) for number in range(len(cases))]
            expected = await self._send_all(session, cases, undisturbed, _UNDISTURBED_AT_A_TIME)
            for answer in expected:
                if answer.status != 200 or answer.ends != 1:
                    raise RuntimeError(f"the undisturbed run failed: {answer}")
            disturbers = [
                asyncio.create_task(self._repeat(act, seconds * pace))
                for act, seconds in (
                    (self._reload, 0.7),
                    (self._kill, 6.0),
                    (self._pause, 5.0),
                    (self._watch_holds, 1.0),
                )
            ]
            while True:
                answers = await self._send_all(session, cases, visits, at_a_time)
                for visit, answer in zip(visits, answers, strict=True):
                    self._judge(visit, answer, expected[visit.case].text)
                if all(self.report.disturbances[name] for name in until):
                    break
            for task in disturbers:
                task.cancel()
            await asyncio.gather(*disturbers, return_exceptions=True)
        return self.report

    async def settle(self, values: Callable[[], dict[str, float]], seconds: float = 30.0) -> None:
        """Resume the server and wait until nothing is left on it: all named `values` are zero."""
        await self._admin_call("/resume")
        deadline = asyncio.get_running_loop().time() + seconds
        while left := {name: value for name, value in values().items() if value}:
            if asyncio.get_running_loop().time() > deadline:
                self.report.problems.append(f"left on the server after {seconds:g} s: {left}")
                return
            await asyncio.sleep(0.5)

    # Clients

    async def _send_all(
        self,
        session: aiohttp.ClientSession,
        cases: Sequence[Case],
        visits: Sequence[Visit],
        at_a_time: int,
    ) -> list[Answer]:
        free = asyncio.Semaphore(at_a_time)

        async def send(visit: Visit) -> Answer:
            async with free:
                return await self._send(session, cases[visit.case], visit)

        return list(await asyncio.gather(*map(send, visits)))

    async def _send(self, session: aiohttp.ClientSession, case: Case, visit: Visit) -> Answer:
        answer = Answer()
        timeout = _ANSWER_SECONDS if visit.leaves_after is None else visit.leaves_after
        try:
            await asyncio.wait_for(_post(session, case, visit, answer), timeout)
        except TimeoutError:
            answer.left = True
        except (aiohttp.ClientError, OSError, ValueError) as error:
            answer.problem = f"{type(error).__name__}: {error}"
        return answer

    def _judge(self, visit: Visit, answer: Answer, expected: str) -> None:
        outcome, problem = judge(visit, answer, expected)
        self.report.outcomes[outcome] += 1
        if problem is not None:
            self.report.problems.append(f"{problem}: {visit} {answer}")

    # Disturbances

    async def _repeat(self, act: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds * self._random.uniform(0.5, 1.5))
            # Not cancelled halfway: a pause must end with a resumption.
            await asyncio.shield(asyncio.ensure_future(act()))

    async def _reload(self) -> None:
        valid = self._random.random() < 0.5
        policies = VALID_POLICIES if valid else INVALID_POLICIES
        text = self._random.choice(policies)
        self._policy.write_text(self._base + text)
        name = "policies adopted" if valid else "policies refused"
        refusal = await self._admin_call("/policy/reload")
        self.report.disturbances[name] += 1
        if (refusal is None) != valid:
            self.report.problems.append(f"{name}, but the server said {refusal!r} to {text!r}")

    async def _kill(self) -> None:
        if self._kill_predictor():
            self.report.disturbances["predictor kills"] += 1

    async def _watch_holds(self) -> None:
        self.report.hold_costs.append(await asyncio.to_thread(self._hold_cost))

    async def _pause(self) -> None:
        mode = self._random.choice(("wait", "keep"))
        problems = [await self._admin_call("/pause", mode=mode)]
        kept = await self._admin_call("/caches/drop")
        if mode == "keep" and kept is not None and "still in use" in kept:
            self.report.disturbances["caches kept, as a load from the host was under way"] += 1
        else:
            problems.append(kept)
        await asyncio.sleep(0.2)
        problems.append(await self._admin_call("/resume"))
        self.report.disturbances[f"pauses ({mode})"] += 1
        self.report.problems += [problem for problem in problems if problem is not None]

    async def _admin_call(self, path: str, **body: Any) -> str | None:
        try:
            await asyncio.to_thread(self._admin.post, path, **body)
        except AdminError as error:
            return f"{path}: {error}"
        return None


def judge(visit: Visit, answer: Answer, expected: str) -> tuple[str, str | None]:
    """Return the outcome of a request, and the problem with it or None."""
    if answer.problem is not None:
        return "failed", "the connection broke"
    if answer.left:
        if visit.leaves_after is None:
            return "hung", "no answer"
        wrong = answer.ends > 1 or not expected.startswith(answer.text)
        return "left", "the partial answer is wrong" if wrong else None
    if answer.status == 200 and answer.code is None:
        if answer.ends != 1:
            return "completed", f"it ended {answer.ends} times"
        return "completed", None if answer.text == expected else f"expected {expected!r}"
    if answer.code is not None and answer.status in (200, 408, 429, 503):
        return f"refused: {answer.code}", None
    return "failed", f"status {answer.status}"


async def _post(session: aiohttp.ClientSession, case: Case, visit: Visit, answer: Answer) -> None:
    body: dict[str, object] = {
        "model": "bench",
        "prompt": case.prompt,
        "max_tokens": case.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": visit.stream,
    }
    if visit.extras:
        body["vllm_xargs"] = visit.extras
    async with session.post("/v1/completions", json=body) as response:
        answer.status = response.status
        if response.status != 200 or not visit.stream:
            _read_document(answer, await response.json())
            return
        async for line in response.content:
            if line.startswith(b"data: {"):
                _read_document(answer, json.loads(line[6:]))
        if not answer.ends and answer.code is None:
            answer.problem = "the stream ended without a finish reason"


def _read_document(answer: Answer, document: dict[str, Any]) -> None:
    error = document.get("error")
    if error is not None:
        answer.code = str(error.get("code"))
        if answer.code.isdigit():  # an error of vLLM itself has a status here instead of a code
            answer.problem = str(error.get("message"))
    for choice in document.get("choices", ()):
        answer.text += choice["text"]
        answer.ends += choice.get("finish_reason") is not None


def disturb(
    server: VllmServer,
    policy: Path,
    requests: int,
    cases: int,
    at_a_time: int,
    seed: int = 0,
    pace: float = 1.0,
    api_key: str | None = None,
    until: Collection[str] = (),
) -> Report:
    """Run both runs against a running server, and check what is left on it. `policy` is the
    server's policy file, with the part that stays; `requests` are those of the disturbed run, which
    come again until the disturbances `until` have happened."""
    base = policy.read_text()
    chaos = Chaos(
        server.url,
        policy,
        base,
        lambda: kill_predictor(server),
        lambda: _metric(server, _HOLD_COST),
        api_key,
        seed,
    )
    distinct = make_cases(cases, seed)
    visits = make_visits(requests, cases, seed)

    async def both() -> None:
        await chaos.run(distinct, visits, at_a_time, pace, until)
        await chaos.settle(lambda: _left_on(server, api_key))

    errors_before = _metric(server, "semsched:policy_errors_total")
    try:
        asyncio.run(both())
    finally:
        policy.write_text(base)
    server.check()
    errors = _metric(server, "semsched:policy_errors_total") - errors_before
    if errors:
        chaos.report.problems.append(f"{errors:g} guarded errors; see {server.config.log}")
    chaos.report.problems += overspent(chaos.report.hold_costs, load_policy(policy).protect.price)
    return chaos.report


def doubts(log: Path) -> list[str]:
    """What is wrong with the event log: waits without a cause, lines that do not follow."""
    unexplained = summarize([log], level=None, last=None).counts[NOT_RECORDED]
    problems = [f"the causes of {unexplained} waits do not add up to them"] if unexplained else []
    findings = [finding for finding in Audit(log).findings if finding.kind != "note"]
    return problems + [f"{finding.where}: {finding.text}" for finding in findings]


def overspent(hold_costs: Sequence[float], price: float) -> list[str]:
    """The problem that holds cost more than `protect.price`, if they did."""
    most = max(hold_costs, default=0.0)
    if most <= price + _ROUNDING:
        return []
    return [f"holds cost {most:.4f} of a minute, the price is {price:g}"]


def kill_predictor(server: VllmServer) -> bool:
    """Kill the server's predictor process; False if there is none at the moment."""
    if server.pid is None:
        return False
    for process in psutil.Process(server.pid).children(recursive=True):
        try:
            if PREDICTOR in process.cmdline():
                process.kill()
                return True
        except psutil.NoSuchProcess:
            continue
    return False


def server_arguments(policy: Path, host_gib: float = 0.0) -> tuple[str, ...]:
    """Return the arguments of a server that can be disturbed."""
    settings = json.dumps({"semantic_sched": {"policy": str(policy)}})
    arguments = ("--scheduler-cls", SCHEDULER_CLASS, *MIDDLEWARE, "--additional-config", settings)
    return (*arguments, *swap_arguments(host_gib)) if host_gib else arguments


def _left_on(server: VllmServer, api_key: str | None) -> dict[str, float]:
    """What is left on the server according to its metrics and its status."""
    left = {name: _metric(server, name) for name in _ZERO_WHEN_IDLE}
    arrived = _metric(server, "semsched:requests_total")
    ended = _metric(server, "semsched:ended_requests_total")
    left["requests that ended more or less than once"] = arrived - ended
    left["jobs"] = sum(engine["jobs"] for engine in AdminClient(server.url, api_key).status())
    return left


def _metric(server: VllmServer, name: str) -> float:
    lines = server.get_text("/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def summary(report: Report) -> list[str]:
    """Return the lines to print."""
    lines = [f"{count:6d}  {name}" for name, count in sorted(report.outcomes.items())]
    lines += [f"{count:6d}  {name}" for name, count in sorted(report.disturbances.items())]
    lines.append(f"holds cost at most {max(report.hold_costs, default=0.0):.2%} of a minute")
    shown = [f"problem: {problem}" for problem in itertools.islice(report.problems, 20)]
    return [*lines, *shown, f"{len(report.problems)} problems"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--model", required=True, type=Path, help="model folder (see `bench make-model`)")
    add("--output", required=True, type=Path, help="folder for the policy file and the log")
    add("--requests", type=int, default=2000, help="of the disturbed run (%(default)s)")
    add("--cases", type=int, default=120, help="distinct ones among them (%(default)s)")
    add("--at-a-time", type=int, default=40, help="concurrent requests (%(default)s)")
    add("--seats", type=int, default=8, help="max_num_seqs (%(default)s)")
    add("--blocks", type=int, default=40, help="KV blocks of 32 tokens (%(default)s)")
    add(
        "--host-gib",
        type=float,
        default=0.003,
        help="host memory for KV of preempted requests; 0: it is recomputed (%(default)s: "
        "often full)",
    )
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Disturb a server; 1 if a guarantee was violated."""
    policy = args.output / "policy.yaml"
    log = args.output / "events.jsonl"
    policy.write_text(f"{BASE_POLICY}events: {{path: {log.resolve()}}}\n")
    config = ServerConfig(
        model=args.model,
        log=args.output / "server.log",
        seats=args.seats,
        num_blocks=args.blocks,
        scheduler_args=server_arguments(policy, args.host_gib),
    )
    with VllmServer(config) as server:
        report = disturb(server, policy, args.requests, args.cases, args.at_a_time, args.seed)
    report.problems += doubts(log)
    print("\n".join(summary(report)))
    return 1 if report.problems else 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
