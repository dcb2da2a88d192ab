"""Refusals: codes and messages for clients whose requests end without an answer."""

from __future__ import annotations

import enum
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from vllm_semantic_sched.policy.facts.job import Job


class Code(enum.Enum):
    """Stable code of a refusal."""

    OVER_CAPACITY = "over_capacity"
    SHED = "shed"
    SUPERSEDED = "superseded"
    TIER_OVER_SHARE = "tier_over_share"
    TENANT_OVER_SHARE = "tenant_over_share"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE = "deadline"
    DROPPED = "dropped"
    TOO_LARGE = "too_large"
    STOPPING = "stopping"

    @property
    def status(self) -> int:
        """HTTP status."""
        statuses = {
            Code.QUEUE_TIMEOUT: 408,
            Code.DROPPED: 503,
            Code.TOO_LARGE: 400,
            Code.STOPPING: 503,
        }
        return statuses.get(self, 429)

    @property
    def retryable(self) -> bool:
        """Whether the client should send the request again: not if a newer one replaced it
        or it never fits."""
        return self not in (Code.SUPERSEDED, Code.TOO_LARGE)


_SENTENCE = re.compile(
    rf"(?P<message>.*) \((?P<code>{'|'.join(code.value for code in Code)}), "
    r"retry after (?P<seconds>\d+) s(, deadline_ms (?P<deadline>\d+))?\)",
    re.DOTALL,
)
_TYPE = {
    400: "invalid_request_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
FINISH_REASON = "error"  # of a refused request


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request ends without an answer."""

    code: Code
    message: str  # one sentence
    retry_after: float = 1.0  # seconds after which another attempt may succeed
    beneficiary: Job | None = field(default=None, compare=False)
    """The request that took its place, if one did. Its client is not told."""
    deadline_ms: int | None = None
    """For the code `deadline`: the shortest `deadline_ms` that could be kept."""

    @property
    def retry_after_seconds(self) -> int:
        """Whole seconds, at least 1, for the header Retry-After."""
        return max(1, math.ceil(self.retry_after))

    def to_text(self) -> str:
        """JSON for a request's `stop_reason`."""
        fields: dict[str, Any] = {"code": self.code.value, "retry_after": self.retry_after_seconds}
        return json.dumps({**fields, "message": self.message, **self._deadline()})

    @classmethod
    def from_text(cls, text: object) -> Refusal | None:
        """Parse the result of `to_text`; None if it is not one."""
        if not isinstance(text, str):
            return None
        try:
            data = json.loads(text)
            return cls(
                Code(data["code"]),
                str(data["message"]),
                float(data["retry_after"]),
                deadline_ms=_whole(data.get("deadline_ms")),
            )
        except (ValueError, TypeError, KeyError):
            return None

    def to_sentence(self) -> str:
        """The message with code and waiting time, for errors that carry one text."""
        deadline = "" if self.deadline_ms is None else f", deadline_ms {self.deadline_ms}"
        retry = f"retry after {self.retry_after_seconds} s"
        return f"{self.message} ({self.code.value}, {retry}{deadline})"

    @classmethod
    def from_sentence(cls, text: str) -> Refusal | None:
        """Parse the result of `to_sentence`; None if it is not one."""
        parts = _SENTENCE.fullmatch(text)
        if parts is None:
            return None
        return cls(
            Code(parts["code"]),
            parts["message"],
            float(parts["seconds"]),
            deadline_ms=_whole(parts["deadline"]),
        )

    def headers(self) -> dict[str, str]:
        """HTTP headers that say when to retry."""
        headers = {"retry-after": str(self.retry_after_seconds)}
        if not self.code.retryable:  # for OpenAI's clients, which else retry any 429
            headers["x-should-retry"] = "false"
        return headers

    def body(self) -> dict[str, Any]:
        """Error body in OpenAI's format."""
        error = {
            "message": self.message,
            "type": _TYPE[self.code.status],
            "param": None,
            "code": self.code.value,
            "retry_after": self.retry_after_seconds,
        }
        return {"error": {**error, **self._deadline()}}

    def _deadline(self) -> dict[str, int]:
        return {} if self.deadline_ms is None else {"deadline_ms": self.deadline_ms}


def _whole(number: Any) -> int | None:
    return None if number is None else int(number)


DROPPED = Refusal(
    Code.DROPPED,
    "The request was ended to make room for more urgent ones: another preemption would have cost "
    "more than sending it again, or it had its share of preemptions.",
)
"""For a request whose tier may be dropped (`tiers[].drop`)."""

TOO_LARGE = Refusal(
    Code.TOO_LARGE, "The prompt and the shortest answer need more KV cache than this server has."
)

STOPPING = Refusal(Code.STOPPING, "The server is stopping; send the request again.", 5.0)
"""For a request that comes after a server was told to stop, or is not done by its deadline."""


def refusal_of(output: Any) -> Refusal | None:
    """Why a request was refused; None if it was not. `output`: vLLM's `RequestOutput`, or the
    exception that an engine's `generate` raises since 0.33."""
    if isinstance(output, Exception):
        text, fields = str(output), vars(output)
        try:  # as a vLLM with patches/0002 raises it
            return Refusal(Code(fields["code"]), text, float(fields["retry_after"]))
        except (KeyError, ValueError, TypeError):
            return Refusal.from_sentence(text)
    answers = getattr(output, "outputs", ())
    for answer in answers if isinstance(answers, list) else ():  # else of a pooling model
        if answer.finish_reason == FINISH_REASON and (
            refusal := Refusal.from_text(answer.stop_reason)
        ):
            return refusal
    return None
