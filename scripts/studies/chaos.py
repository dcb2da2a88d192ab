"""Everything at once that clients and operators do to a server, and what must hold afterwards.

A calm run first answers each distinct request alone or nearly so. Then many more are sent while
clients leave, send nonsense hints and the same thing twice, the policy file changes into valid and
invalid ones, the predictor is killed, and the server is paused and loses its caches. What is
asked for is greedy, so every answer that completes must be the calm one, and every answer that was
left must be a beginning of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from vllm_semantic_sched.bench.messages import write_message

from vllm_semantic_sched.admin.client import AdminClient, AdminError

_ANSWER_SECONDS = 120.0
"""A request without an answer for that long hangs."""

_CALM_AT_A_TIME = 4
_NONSENSE: tuple[object, ...] = ("abc", 99, -1, 1.5, "0x1", "", [1, 2])
_INVALID = (
    "levels: 4\n",
    "base: sjf\n",
    "preemption: {max_per_reqest: 1}\n",
    "default_level: 99\n",
    "stage: {mode: sometimes}\n",
    "{",
)
_VALID = (
    "",
    "preemption: {max_per_request: 8, max_victims_per_step: 16}\n",
    "preemption: {min_level_gap: 2}\nstage: {mode: gate}\n",
    "default_level: 4\nstage: {mode: off}\n",
    "default_level: 1\ndecision: {rule: most_likely}\nlength: {estimate: p90}\n",
)


@dataclass(frozen=True)
class Case:
    """A distinct request: what is asked, and for how many tokens."""

    prompt: str
    tokens: int


@dataclass(frozen=True)
class Visit:
    """One request of the disturbed run.

    Attributes:
        extras: its `vllm_xargs`.
        leaves_after: seconds after which the client goes away; None if it waits.
    """

    case: int
    stream: bool
    extras: dict[str, Any]
    leaves_after: float | None


@dataclass
class Answer:
    """What a client saw. `ends` counts finish reasons, or documents where nothing is streamed."""

    status: int | None = None
    text: str = ""
    ends: int = 0
    code: str | None = None
    left: bool = False
    problem: str | None = None


@dataclass
class Report:
    """What was done to the server and what came of it; `problems` is empty if all held."""

    outcomes: Counter[str] = field(default_factory=Counter)
    disturbances: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def make_cases(count: int, seed: int = 0) -> list[Case]:
    """Distinct prompts of a few to some 300 tokens with answers of 4 to 120."""
    draw, voice = random.Random(seed), np.random.default_rng(seed)
    cases = []
    for number in range(count):
        level, length = draw.randrange(5), draw.choice((1, 1, 1, 3, 12))
        text = " ".join(write_message(level, voice) for _ in range(length))
        cases.append(Case(f"{number}. {text}", draw.choice((4, 16, 40, 80, 120))))
    return cases


def make_visits(count: int, cases: int, seed: int = 0) -> list[Visit]:
    """The disturbed run: a third with a level, a tenth with nonsense, a tenth with a key that
    others have too; one in six leaves before it can be done."""
    draw = random.Random(seed + 1)
    visits = []
    for _ in range(count):
        extras: dict[str, Any] = {}
        kind = draw.random()
        if kind < 0.33:
            extras["urgency"] = draw.randrange(5)
        elif kind < 0.43:
            extras["urgency"] = draw.choice(_NONSENSE)
        if draw.random() < 0.1:
            extras["dedup_key"] = f"key {draw.randrange(5)}"
        leaves = draw.choice((0.0, 0.02, 0.2, 1.0)) if draw.random() < 1 / 6 else None
        visits.append(Visit(draw.randrange(cases), draw.random() < 0.5, extras, leaves))
    return visits


class Chaos:
    """Runs it against a server whose policy file is `policy` and which has the operator's
    endpoints.

    Args:
        base: what the policy file must always say, as it cannot change while the server runs.
        kill_predictor: kills the predictor process; False if there is none at the moment.
    """

    def __init__(
        self,
        url: str,
        policy: Path,
        base: str,
        kill_predictor: Callable[[], bool],
        api_key: str | None = None,
        seed: int = 0,
    ) -> None:
        self._url = url
        self._policy = policy
        self._base = base
        self._kill_predictor = kill_predictor
        self._admin = AdminClient(url, api_key)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._random = random.Random(seed + 2)
        self.report = Report()

    async def run(
        self, cases: Sequence[Case], visits: Sequence[Visit], at_a_time: int, pace: float = 1.0
    ) -> Report:
        """Both runs.

        Args:
            at_a_time: requests under way in the disturbed run.
            pace: multiplies the pauses between disturbances.
        """
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            self._url, connector=connector, headers=self._headers
        ) as session:
            calm_visits = [Visit(number, False, {}, None) for number in range(len(cases))]
            calm = await self._send_all(session, cases, calm_visits, _CALM_AT_A_TIME)
            for answer in calm:
                if answer.status != 200 or answer.ends != 1:
                    raise RuntimeError(f"the calm run failed: {answer}")
            disturbers = [
                asyncio.create_task(self._again_and_again(act, seconds * pace))
                for act, seconds in (
                    (self._reload, 0.7),
                    (self._kill, 6.0),
                    (self._pause, 5.0),
                )
            ]
            answers = await self._send_all(session, cases, visits, at_a_time)
            for task in disturbers:
                task.cancel()
            await asyncio.gather(*disturbers, return_exceptions=True)
        for visit, answer in zip(visits, answers, strict=True):
            self._judge(visit, answer, calm[visit.case].text)
        return self.report

    async def settle(self, values: Callable[[], dict[str, float]], seconds: float = 30.0) -> None:
        """Wait until nothing is left on the server.

        Args:
            values: what must become zero, by name.
        """
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
        patience = _ANSWER_SECONDS if visit.leaves_after is None else visit.leaves_after
        try:
            await asyncio.wait_for(_ask(session, case, visit, answer), patience)
        except TimeoutError:
            answer.left = True
        except (aiohttp.ClientError, OSError, ValueError) as error:
            answer.problem = f"{type(error).__name__}: {error}"
        return answer

    def _judge(self, visit: Visit, answer: Answer, calm: str) -> None:
        outcome, problem = judge(visit, answer, calm)
        self.report.outcomes[outcome] += 1
        if problem is not None:
            self.report.problems.append(f"{problem}: {visit} {answer}")

    # Disturbances

    async def _again_and_again(self, act: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds * self._random.uniform(0.5, 1.5))
            # Not cut short in the middle: a pause must end with a resumption.
            await asyncio.shield(asyncio.ensure_future(act()))

    async def _reload(self) -> None:
        valid = self._random.random() < 0.5
        text = self._random.choice(_VALID if valid else _INVALID)
        self._policy.write_text(self._base + text)
        name = "policies adopted" if valid else "policies refused"
        refusal = await self._admin_call("/policy/reload")
        self.report.disturbances[name] += 1
        if (refusal is None) != valid:
            self.report.problems.append(f"{name}, but the server said {refusal!r} to {text!r}")

    async def _kill(self) -> None:
        if self._kill_predictor():
            self.report.disturbances["predictor kills"] += 1

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


def judge(visit: Visit, answer: Answer, calm: str) -> tuple[str, str | None]:
    """What became of a request, and what is wrong with that, if anything."""
    if answer.problem is not None:
        return "failed", "the connection broke"
    if answer.left:
        if visit.leaves_after is None:
            return "hung", "no answer"
        wrong = answer.ends > 1 or not calm.startswith(answer.text)
        return "left", "what it had got is wrong" if wrong else None
    if answer.status == 200 and answer.code is None:
        if answer.ends != 1:
            return "completed", f"it ended {answer.ends} times"
        return "completed", None if answer.text == calm else f"other than the calm {calm!r}"
    if answer.code is not None and answer.status in (200, 408, 429, 503):
        return f"refused: {answer.code}", None
    return "failed", f"status {answer.status}"


async def _ask(session: aiohttp.ClientSession, case: Case, visit: Visit, answer: Answer) -> None:
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
            _take(answer, await response.json())
            return
        async for line in response.content:
            if line.startswith(b"data: {"):
                _take(answer, json.loads(line[6:]))
        if not answer.ends and answer.code is None:
            answer.problem = "the stream ended without a finish reason"


def _take(answer: Answer, document: dict[str, Any]) -> None:
    error = document.get("error")
    if error is not None:
        answer.code = str(error.get("code"))
        if answer.code.isdigit():  # vLLM's own errors have a status there, not a code
            answer.problem = str(error.get("message"))
    for choice in document.get("choices", ()):
        answer.text += choice["text"]
        answer.ends += choice.get("finish_reason") is not None


def summary(report: Report) -> list[str]:
    """Lines for people."""
    lines = [f"{count:6d}  {name}" for name, count in sorted(report.outcomes.items())]
    lines += [f"{count:6d}  {name}" for name, count in sorted(report.disturbances.items())]
    shown = [f"problem: {problem}" for problem in itertools.islice(report.problems, 20)]
    return [*lines, *shown, f"{len(report.problems)} problems"]
