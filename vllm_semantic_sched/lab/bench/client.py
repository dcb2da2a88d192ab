"""Streaming client: sends every request at its arrival time, whatever the server is doing."""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from tqdm import tqdm

from vllm_semantic_sched.lab.bench.workload import ANSWER_FIELD, BenchRequest

# The two best tokens and possibly the end token, which is masked until the end but still listed.
_TOP_LOGPROBS = 3
_REQUEST_SECONDS = 900.0
_ANSWER_CHARACTERS = 100  # that are kept of an answer


@dataclass(frozen=True)
class Progress:
    """If `shown`, prints messages and bars that leave one line; off a terminal, lines alone."""

    shown: bool = False

    def message(self, text: str) -> None:
        """Print a line, if messages are shown."""
        if self.shown:
            print(text, flush=True)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[], object]]:
        """Report `total` steps, none without a label; the context's value is called after each."""
        start = time.monotonic()
        off = None if self.shown and label else True  # None: unless it is a terminal
        with tqdm(total=total, desc=label, leave=False, disable=off) as bar:
            yield bar.update
        if label:
            self.message(f"{label}: {time.monotonic() - start:.0f} s")


@dataclass
class Record:
    """What happened to one request; times in seconds after the start of the run. `margins`: the
    difference of the two best log-probabilities at each output position, if outputs are checked;
    `answer`: its first characters; `read_level`: what the scheduler read, if known."""

    index: int
    level: int
    text_hash: str
    wanted_tokens: int
    arrival: float
    tenant: str = ""
    sent: float | None = None
    first_token: float | None = None
    finish: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    status: int | None = None
    error: str | None = None
    engine_queue_seconds: float | None = None
    read_level: int | None = None
    answer: str = ""
    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Answered in full: with exactly the wanted length, or where none is, with any."""
        wanted = self.wanted_tokens or max(1, self.output_tokens)
        return self.error is None and self.output_tokens == wanted

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first."""
        if self.output_tokens < 2 or self.first_token is None or self.finish is None:
            return None
        return (self.finish - self.first_token) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds from arrival to the last token of an answered request."""
        assert self.finish is not None
        return self.finish - self.arrival

    @property
    def normalized_waiting(self) -> float:
        """E2E latency over output tokens of an answered request, in seconds per token."""
        return self.e2e / self.output_tokens


@dataclass(frozen=True)
class LoadClient:
    """Sends loads to one server. `max_tokens` is the same for every request and at least as large
    as the longest answer, so that it gives no length away. `extras` returns further fields of a
    body; those in `vllm_xargs` are added to the client's own, and a `prompt` of tokens takes the
    text's place. With `natural` the model ends its
    answers itself, to a chat; otherwise the benchmark does. `record_margins`: ask for
    log-probabilities, which slow the server down."""

    url: str
    eos_token: int
    max_tokens: int
    extras: Callable[[BenchRequest], Mapping[str, Any]] = lambda request: {}
    progress: Progress = field(default_factory=Progress)
    headers: Mapping[str, str] = field(default_factory=dict)
    natural: bool = False
    record_margins: bool = False

    def send(
        self, requests: Sequence[BenchRequest], label: str = "", stop_after: float | None = None
    ) -> list[Record]:
        """Send every request at its arrival time and wait for all answers, or until `stop_after`
        seconds after the start. Errors are recorded, not raised."""
        return asyncio.run(self._send_open_loop(requests, label, stop_after))

    def send_together(self, requests: Sequence[BenchRequest], label: str = "") -> list[Record]:
        """Send all requests at once and wait for all answers."""
        return self.send([replace(request, arrival=0.0) for request in requests], label)

    def send_one_by_one(self, requests: Sequence[BenchRequest], label: str = "") -> list[Record]:
        """Send each request when the one before is answered; its times count from its sending."""
        records = []
        with self.progress.bar(label, len(requests)) as advance:
            for request in requests:
                records += self.send_together([request])
                advance()
        return records

    def request_body(self, request: BenchRequest) -> dict[str, Any]:
        """Return the body of a request. Unless answers end by themselves, they end at exactly
        `request.output_tokens`, by `bench.answer_length`, which changes no other token's logit."""
        body: dict[str, Any] = {
            "model": "bench",
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **self.extras(request),
        }
        told = body.get("vllm_xargs", {})
        if self.natural:
            body |= {"messages": [{"role": "user", "content": request.prompt}], "vllm_xargs": told}
            margins = {"logprobs": True, "top_logprobs": _TOP_LOGPROBS}
        else:
            answer = {ANSWER_FIELD: [request.output_tokens, self.eos_token]}
            body = {"prompt": request.prompt} | body | {"vllm_xargs": answer | told}
            margins = {"logprobs": _TOP_LOGPROBS}
        if self.record_margins:
            body |= margins | {"return_tokens_as_token_ids": True}
        return body

    async def _send_open_loop(
        self, requests: Sequence[BenchRequest], label: str, stop_after: float | None
    ) -> list[Record]:
        records = list(map(self._new_record, requests))
        with self.progress.bar(label, len(requests)) as advance:
            start = time.perf_counter()

            async def send_at(record: Record, request: BenchRequest) -> None:
                await asyncio.sleep(start + request.arrival - time.perf_counter())
                await self._send(record, request, start)
                advance()

            tasks = [
                asyncio.create_task(send_at(record, request))
                for record, request in zip(records, requests, strict=True)
            ]
            _, given_up = await asyncio.wait(tasks, timeout=stop_after)
            for task in given_up:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for record in records:
            if record.finish is None and record.error is None:
                record.error = "unanswered when the run ended"
        return records

    async def _send(self, record: Record, request: BenchRequest, start: float) -> None:
        record.sent = time.perf_counter() - start
        path = "chat/completions" if self.natural else "completions"
        url = f"{self.url}/v1/{path}"
        body = self.request_body(request)
        limit = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
        try:
            # A new connection each: the server may close a kept one just when it is used again.
            async with aiohttp.request(
                "POST", url, json=body, headers=self.headers, timeout=limit
            ) as response:
                record.status = response.status
                if response.status != 200:
                    record.error = (await response.text())[:500]
                    return
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        self._read_message(record, json.loads(line[6:]), start)
            if record.finish_reason is None and record.error is None:
                record.error = "the stream ended without a finish reason"
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"

    def _read_message(self, record: Record, message: dict[str, Any], start: float) -> None:
        if "error" in message:
            record.error = json.dumps(message["error"])[:500]
            return
        for choice in message.get("choices", ()):
            tokens = choice.get("token_ids") or []
            if tokens and record.first_token is None:
                record.first_token = time.perf_counter() - start
            record.token_ids += tokens
            if len(record.answer) < _ANSWER_CHARACTERS:
                record.answer += choice.get("text") or choice.get("delta", {}).get("content") or ""
            if choice.get("logprobs"):
                record.margins += self._margins(choice["logprobs"])
            if choice.get("finish_reason"):
                record.finish_reason = choice["finish_reason"]
                record.finish = time.perf_counter() - start
        usage = message.get("usage")
        if usage:
            record.prompt_tokens = usage["prompt_tokens"]
            record.output_tokens = usage["completion_tokens"]
        queue_ms = (message.get("metrics") or {}).get("queue_time_ms")
        if queue_ms is not None:
            record.engine_queue_seconds = queue_ms / 1000

    def _new_record(self, request: BenchRequest) -> Record:
        return Record(
            index=request.index,
            level=request.level,
            text_hash=hashlib.sha256(request.prompt.encode()).hexdigest()[:12],
            wanted_tokens=0 if self.natural else request.output_tokens,
            arrival=request.arrival,
            tenant=request.tenant,
        )

    def _margins(self, logprobs: Mapping[str, Any]) -> Iterator[float]:
        """The difference of the two best log-probabilities at each position, less the end token."""
        if "content" in logprobs:  # of a chat
            positions = [
                {top["token"]: top["logprob"] for top in position["top_logprobs"]}
                for position in logprobs["content"] or ()
            ]
        else:
            positions = logprobs["top_logprobs"]
        end = f"token_id:{self.eos_token}"
        for tops in positions:
            best = sorted((value for token, value in tops.items() if token != end), reverse=True)
            yield best[0] - best[1] if len(best) > 1 else float("inf")
