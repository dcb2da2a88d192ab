"""Refusals on their way from a replica to the ingress.

Ray passes an error on as message, type and status. The type carries the whole refusal, so that the
ingress can answer with its code and Retry-After.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm_semantic_sched.engine.http.middleware import STREAMED_ERROR, RequestRefused
from vllm_semantic_sched.policy.overload.refusal import Refusal

_STREAMED_ERROR = STREAMED_ERROR.decode()


async def with_refusals(
    parts: AsyncGenerator[Any, None],
    refusals: list[Refusal],
    error: Callable[[Refusal], Any],
) -> AsyncGenerator[Any, None]:
    """Pass on what an `LLMServer` answers (a response, or events of a stream, one by one or in
    lists), with the request's refusal (see `engine.http.middleware.collect_refusals`) in place of
    vLLM's error.

    A refusal before the first token becomes Ray's `error` response, streamed or not; a later one
    becomes the stream's last event but one.
    """
    started = False
    try:
        async for part in parts:
            if refusals:
                events = part if isinstance(part, list) else [part]
                if not started and _is_error(events[0]):
                    yield error(refusals[0])
                    return
                replaced = [_with_refusal(event, refusals[0]) for event in events]
                part = replaced if isinstance(part, list) else replaced[0]
            started = True
            yield part
    except RequestRefused as refused:
        yield error(refused.refusal)
    finally:
        await parts.aclose()


def _is_error(event: Any) -> bool:
    return isinstance(event, str) and event.startswith(_STREAMED_ERROR)


def _with_refusal(event: Any, refusal: Refusal) -> Any:
    return f"data: {json.dumps(refusal.body())}\n\n" if _is_error(event) else event
