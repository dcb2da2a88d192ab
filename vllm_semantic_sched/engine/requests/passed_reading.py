"""Hands the HTTP server's reading of a text to the engine, so that the engine does not read it
again and both see the same level.

The reading travels in the request's `extra_args`, which clients fill too (`vllm_xargs`). It is an
entry of bytes: clients send JSON, which has none, so they cannot forge it. Text or numbers in its
place come from a client; the engine ignores and counts them.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from vllm_semantic_sched.policy.facts.prediction import Prediction

READING = "semsched_reading"
"""Key of the entry."""


class PassedReading(NamedTuple):
    """What `read_passed` has found.

    Attributes:
        reading: None if the HTTP server passed none.
        problem: why the entry is not the HTTP server's; None if it is, or is absent.
    """

    reading: Prediction | None
    problem: str | None = None


_ABSENT = PassedReading(None)
_FORGED = PassedReading(None, f"{READING} in vllm_xargs: only the server itself may set it")


def pass_reading(params: Any, reading: Prediction) -> None:
    """Add a reading to a request's sampling parameters. What a client has put in its place stays,
    for the engine to count."""
    extra_args = params.extra_args or {}
    if READING not in extra_args:
        entry = json.dumps((reading.urgency, reading.length, reading.unreadable)).encode()
        params.extra_args = {**extra_args, READING: entry}


def read_passed(extra_args: Any) -> PassedReading:
    """The reading in the `extra_args` of a request, which may be of any type."""
    entry = extra_args.get(READING) if isinstance(extra_args, dict) else None
    if entry is None:
        return _ABSENT
    if not isinstance(entry, bytes):
        return _FORGED
    urgency, length, unreadable = json.loads(entry)
    return PassedReading(
        Prediction(tuple(urgency), None if length is None else tuple(length), unreadable)
    )
