"""Why a request is ended without its answer, in words and codes that clients can act on (O3)."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass
from typing import Any


class Code(enum.Enum):
    """Stable code of a refusal; `status` is the HTTP status that goes with it."""

    OVER_CAPACITY = "over_capacity"
    SHED = "shed"
    SUPERSEDED = "superseded"
    TIER_OVER_SHARE = "tier_over_share"
    TENANT_OVER_SHARE = "tenant_over_share"
    QUEUE_TIMEOUT = "queue_timeout"
    DROPPED = "dropped"

    @property
    def status(self) -> int:
        """HTTP status."""
        return _STATUS.get(self, 429)

    @property
    def retryable(self) -> bool:
        """Whether the same request is worth sending again: not if a newer one took its place."""
        return self is not Code.SUPERSEDED


_STATUS = {Code.QUEUE_TIMEOUT: 408, Code.DROPPED: 503}
_TYPE = {408: "timeout_error", 429: "rate_limit_error", 503: "service_unavailable_error"}

FINISH_REASON = "error"
"""`finish_reason` of a refused request."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Ends a request.

    Attributes:
        message: one sentence for a person.
        retry_after: seconds after which another attempt may succeed.
    """

    code: Code
    message: str
    retry_after: float = 1.0

    @property
    def retry_after_seconds(self) -> int:
        """Whole seconds, at least one, as the header Retry-After wants them."""
        return max(1, math.ceil(self.retry_after))

    def to_text(self) -> str:
        """As it stands in a request's `stop_reason`: JSON."""
        return json.dumps(
            {
                "code": self.code.value,
                "retry_after": self.retry_after_seconds,
                "message": self.message,
            }
        )

    @classmethod
    def from_text(cls, text: object) -> Refusal | None:
        """Read `to_text`; None if it is something else."""
        if not isinstance(text, str):
            return None
        try:
            data = json.loads(text)
            return cls(Code(data["code"]), str(data["message"]), float(data["retry_after"]))
        except (ValueError, TypeError, KeyError):
            return None

    def headers(self) -> dict[str, str]:
        """HTTP headers that tell a client when to come back."""
        headers = {"retry-after": str(self.retry_after_seconds)}
        if not self.code.retryable:  # obeyed by OpenAI's clients, which else retry any 429
            headers["x-should-retry"] = "false"
        return headers

    def body(self) -> dict[str, Any]:
        """Error body in the form of OpenAI's."""
        error = {
            "message": self.message,
            "type": _TYPE[self.code.status],
            "param": None,
            "code": self.code.value,
            "retry_after": self.retry_after_seconds,
        }
        return {"error": error}


DROPPED = Refusal(
    Code.DROPPED,
    "The request was ended to make room for more urgent ones: preempting it once more would have "
    "cost more than starting over.",
)
"""For a request whose tier may be dropped (`tiers[].drop`)."""


def refusal_of(output: Any) -> Refusal | None:
    """Why a request was refused; None if it was not.

    Args:
        output: vLLM's `RequestOutput`, of `LLM.generate` or of an engine's `generate`.
    """
    for answer in getattr(output, "outputs", ()):
        if answer.finish_reason == FINISH_REASON:
            refusal = Refusal.from_text(answer.stop_reason)
            if refusal is not None:
                return refusal
    return None
