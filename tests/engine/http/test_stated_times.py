"""Times that headers and `vllm_xargs` state, as the HTTP server reads them."""

import pytest

from vllm_semantic_sched.engine.http.stated_times import read_headers, stated_times


def read(extra=None, **headers):
    sent = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return stated_times(extra, read_headers(sent))


@pytest.mark.parametrize(
    "header",
    [
        "x_llm_d_slo_ttft_ms",
        "x_slo_ttft_ms",
        "x_dynamo_slo_ttft_ms",
        "x_dynamo_meta_slo_ttft_ms",
    ],
)
def test_headers_of_gateways_state_the_first_token(header) -> None:
    assert read(**{header: "1500"}) == {"slo_ttft_ms": 1500.0}
    with pytest.raises(ValueError, match=f"{header.replace('_', '-')} must be a positive number"):
        read(**{header: "soon"})


@pytest.mark.parametrize(
    ("duration", "milliseconds"),
    [("1500ms", 1500.0), ("2s", 2000.0), ("1m30s", 90_000.0), ("1.5h", 5_400_000.0), (".5s", 500)],
)
def test_ttl_header_is_a_duration(duration, milliseconds) -> None:
    assert read(x_llm_d_inference_ttl=duration) == {"ttl_ms": milliseconds}


@pytest.mark.parametrize("duration", ["", "1500", "0s", "-2s", "2 s", "2s!", "soon", "ms"])
def test_other_durations_are_refused_with_an_example(duration) -> None:
    message = "x-llm-d-inference-ttl must be a positive duration such as 1500ms or 2s, got"
    with pytest.raises(ValueError, match=message):
        read(x_llm_d_inference_ttl=duration)


def test_headers_override_the_body_and_leave_the_rest() -> None:
    extra = {"slo_ttft_ms": 3000, "deadline_ms": 9000, "urgency": 1}
    assert read(extra, x_slo_ttft_ms="500") == extra | {"slo_ttft_ms": 500.0}
    assert read(extra) is extra and read() is None


@pytest.mark.parametrize("key", ["ttl_ms", "slo_ttft_ms", "deadline_ms"])
@pytest.mark.parametrize("sent", [0, -1, True, "soon", None, float("nan"), float("inf"), 10**400])
def test_bad_value_in_the_body_is_named(key, sent) -> None:
    with pytest.raises(ValueError, match=f"{key} must be a positive number of milliseconds, got"):
        read({key: sent})
