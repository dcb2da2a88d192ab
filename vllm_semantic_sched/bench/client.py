"""Open-loop streaming client: requests leave at their time, whatever the server is doing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tqdm import tqdm

from vllm_semantic_sched.bench.workload import BenchRequest

# Large enough that the true token wins against any logit of a sane model.
_STOP_BIAS = 100
# The two best and, possibly, the stop token, which is masked until the end but still listed.
_TOP_LOGPROBS = 3

BodyExtras = Callable[[BenchRequest], Mapping[str, object]]


@dataclass
class Record:
    """What happened to one request.

    Times are seconds after the start of the run; None where the event did not happen.
    `margins[i]` is the distance of the two best log-probabilities at output position i, kept
    only when outputs are checked.
    """

    index: int
    level: int
    text_hash: str
    wanted_tokens: int
    arrival: float
    sent: float | None = None
    first_token: float | None = None
    finish: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    status: int | None = None
    error: str | None = None
    engine_queue_seconds: float | None = None
    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Answered in full, at exactly the wanted length."""
        return self.error is None and self.output_tokens == self.wanted_tokens

    @property
    def token_hash(self) -> str:
        """Short digest of the output tokens."""
        return hashlib.sha256(json.dumps(self.token_ids).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class ClientConfig:
    """How requests are sent.

    `max_tokens` is the same for every request and at least as large as the longest answer, so
    that it gives no length away. `eos_token` is the model's end token. With `stop_after`, what is
    unanswered so many seconds after the start is given up.
    """

    url: str
    eos_token: int
    max_tokens: int
    request_seconds: float = 900.0
    record_margins: bool = False
    progress: str | None = None
    stop_after: float | None = None


def request_body(
    request: BenchRequest, config: ClientConfig, extras: Mapping[str, object]
) -> dict[str, object]:
    """The body for /v1/completions.

    The answer ends at exactly `request.output_tokens`: the end token is forbidden before
    (`min_tokens`) and certain after (`logit_bias`). No other token's logit is touched.
    """
    body: dict[str, object] = {
        "model": "bench",
        "prompt": request.text,
        "temperature": 0.0,
        "max_tokens": config.max_tokens,
        "min_tokens": request.output_tokens - 1,
        "logit_bias": {str(config.eos_token): _STOP_BIAS},
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **extras,
    }
    if config.record_margins:
        body["logprobs"] = _TOP_LOGPROBS
        body["return_tokens_as_token_ids"] = True
    return body


async def send_open_loop(
    requests: Sequence[BenchRequest], config: ClientConfig, extras: BodyExtras
) -> list[Record]:
    """Send every request at its arrival time and wait for all answers.

    Errors are recorded in the request's record; none is raised and none is dropped.
    """
    records = [_new_record(request, request.arrival) for request in requests]
    async with _session(config) as session:
        start = time.perf_counter()
        with _progress(len(requests), config) as bar:
            tasks = [
                asyncio.create_task(_send_at(record, request, start, session, config, extras, bar))
                for record, request in zip(records, requests, strict=True)
            ]
            _, given_up = await asyncio.wait(tasks, timeout=config.stop_after)
            for task in given_up:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for record in records:
        if record.finish is None and record.error is None:
            record.error = "unanswered when the run ended"
    return records


async def send_one_by_one(
    requests: Sequence[BenchRequest], config: ClientConfig, extras: BodyExtras
) -> list[Record]:
    """Send each request when the one before is answered: an otherwise idle engine.

    Arrival is the moment of sending.
    """
    records = []
    async with _session(config) as session:
        with _progress(len(requests), config) as bar:
            start = time.perf_counter()
            for request in requests:
                record = _new_record(request, time.perf_counter() - start)
                await _send(record, request, start, session, config, extras)
                records.append(record)
                bar.update()
    return records


def _session(config: ClientConfig) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        base_url=config.url,
        # A connection each: one kept open may be closed by the server just when it is used again.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=config.request_seconds),
    )


def _progress(total: int, config: ClientConfig) -> tqdm:  # type: ignore[type-arg]
    return tqdm(
        total=total,
        desc=config.progress,
        unit="req",
        mininterval=1.0,
        disable=config.progress is None,
    )


def _new_record(request: BenchRequest, arrival: float) -> Record:
    return Record(request.index, request.level, request.text_hash, request.output_tokens, arrival)


async def _send_at(
    record: Record,
    request: BenchRequest,
    start: float,
    session: aiohttp.ClientSession,
    config: ClientConfig,
    extras: BodyExtras,
    bar: tqdm,  # type: ignore[type-arg]
) -> None:
    await asyncio.sleep(start + request.arrival - time.perf_counter())
    await _send(record, request, start, session, config, extras)
    bar.update()


async def _send(
    record: Record,
    request: BenchRequest,
    start: float,
    session: aiohttp.ClientSession,
    config: ClientConfig,
    extras: BodyExtras,
) -> None:
    record.sent = time.perf_counter() - start
    try:
        body = request_body(request, config, extras(request))
        async with session.post("/v1/completions", json=body) as response:
            record.status = response.status
            if response.status != 200:
                record.error = (await response.text())[:500]
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _take_message(record, json.loads(line[6:]), start, config)
        if record.finish_reason is None and record.error is None:
            record.error = "the stream ended without a finish reason"
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"


def _take_message(
    record: Record, message: dict[str, Any], start: float, config: ClientConfig
) -> None:
    if "error" in message:
        record.error = json.dumps(message["error"])[:500]
        return
    for choice in message.get("choices", ()):
        tokens = choice.get("token_ids") or []
        if tokens and record.first_token is None:
            record.first_token = time.perf_counter() - start
        record.token_ids += tokens
        if config.record_margins and choice.get("logprobs"):
            top = choice["logprobs"]["top_logprobs"]
            record.margins += [_margin(position, config.eos_token) for position in top]
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


def _margin(top: Mapping[str, float], eos_token: int) -> float:
    """Distance of the best two log-probabilities, the masked end token left out."""
    values = sorted(
        (value for token, value in top.items() if token != f"token_id:{eos_token}"), reverse=True
    )
    return values[0] - values[1] if len(values) > 1 else float("inf")
