"""The times in which clients and gateways want an answer, from headers and `vllm_xargs`."""

import re
from collections.abc import Mapping
from typing import Any

from vllm_semantic_sched.engine.requests.arrivals import (
    DEADLINE,
    FIRST_TOKEN,
    TTL,
    read_milliseconds,
)

# Headers that say the same as `slo_ttft_ms`; the first one that is there counts.
_FIRST_TOKEN_HEADERS = (
    "x-llm-d-slo-ttft-ms",
    "x-slo-ttft-ms",  # its older name in llm-d and the Gateway API Inference Extension
    "x-dynamo-slo-ttft-ms",
    "x-dynamo-meta-slo-ttft-ms",  # what Dynamo's frontend reads by default
)
_TTL_HEADER = "x-llm-d-inference-ttl"  # a duration as Go writes it
_HEADERS = {name.encode(): name for name in (_TTL_HEADER, *_FIRST_TOKEN_HEADERS)}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|ms|s|m|h)")
_IN_MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3, "h": 3600e3}


def read_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """The headers of a request that state a time, as they are, by name."""
    return {
        name: headers[key].decode("latin-1") for key, name in _HEADERS.items() if key in headers
    }


def stated_times(extra: Any, headers: Mapping[str, str]) -> Any:
    """The `vllm_xargs` of a request with the times of its headers, which override those in the
    body; the object itself if there are none. ValueError names the header or key whose value is not
    a positive time."""
    times: dict[str, float] = {}
    for name in _FIRST_TOKEN_HEADERS:
        if name in headers:
            times[FIRST_TOKEN] = _number(name, headers[name])
            break
    if _TTL_HEADER in headers:
        times[TTL] = _duration(headers[_TTL_HEADER])
    known = {} if extra is None else extra
    if times and isinstance(known, dict):
        extra = {**known, **times}
    for key in (TTL, FIRST_TOKEN, DEADLINE):
        read_milliseconds(extra, key)
    return extra


def _number(name: str, text: str) -> float:
    try:
        sent: Any = float(text)
    except ValueError:
        sent = text
    seconds = read_milliseconds({name: sent}, name)
    assert seconds is not None
    return seconds * 1000


def _duration(text: str) -> float:
    """Milliseconds of a duration such as `1500ms` or `1m30s`."""
    parts = _PART.findall(text)
    milliseconds = sum(float(number) * _IN_MILLISECONDS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or not milliseconds > 0:
        raise ValueError(
            f"{_TTL_HEADER} must be a positive duration such as 1500ms or 2s, got {text[:60]!r}"
        )
    return milliseconds
