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

# By key of `vllm_xargs`, the headers that say the same; the first one that is there counts.
_MILLISECONDS: Mapping[str, tuple[str, ...]] = {
    FIRST_TOKEN: (
        "x-llm-d-slo-ttft-ms",
        "x-slo-ttft-ms",  # its older name in llm-d and the Gateway API Inference Extension
        "x-dynamo-slo-ttft-ms",
        "x-dynamo-meta-slo-ttft-ms",  # what Dynamo's frontend reads by default
    ),
}
_TTL_HEADER = "x-llm-d-inference-ttl"  # a duration as Go writes it
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|ms|s|m|h)")
_IN_MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3, "h": 3600e3}


def read_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """The headers of a request that state a time, as they are, by name."""
    names = [_TTL_HEADER, *(name for names in _MILLISECONDS.values() for name in names)]
    known = {name: headers.get(name.encode()) for name in names}
    return {name: value.decode("latin-1") for name, value in known.items() if value is not None}


def stated_times(extra: Any, headers: Mapping[str, str]) -> Any:
    """The `vllm_xargs` of a request with the times of its headers, which override those in the
    body; the object itself if there are none. ValueError names the header or key whose value is not
    a positive time."""
    times: dict[str, float] = {}
    for key, names in _MILLISECONDS.items():
        for name in names:
            if name in headers and key not in times:
                times[key] = _number(name, headers[name])
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
