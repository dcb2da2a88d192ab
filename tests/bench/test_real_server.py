"""The benchmark against a real server."""

import asyncio
import json

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from vllm_semantic_sched.bench.asks import ask_source  # noqa: E402
from vllm_semantic_sched.bench.client import ClientConfig, send_open_loop  # noqa: E402
from vllm_semantic_sched.bench.load import WorkloadConfig  # noqa: E402
from vllm_semantic_sched.bench.server import ServerConfig, ServerFailed, VllmServer  # noqa: E402
from vllm_semantic_sched.bench.step_time import StepTimePlan, measure_step_times  # noqa: E402
from vllm_semantic_sched.bench.tiny_model import make_model  # noqa: E402
from vllm_semantic_sched.bench.workload import make_workload  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    assert make_model(folder)
    return folder


def test_model_is_not_made_twice_and_its_tokenizer_is_real(model):
    from transformers import AutoTokenizer

    assert not make_model(model)
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    text = "My dad collapsed and isn't breathing! Weight: 80kg, \u00e9\u6f22"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text) / 2
    assert "user: hi" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )


def test_thirty_requests_end_at_their_lengths_with_diverse_output(model, tmp_path):
    config = WorkloadConfig(requests=30, gap=0.2, max_burst=12, max_output_tokens=120)
    requests = make_workload(config, ask_source(None)[0]).requests
    with VllmServer(ServerConfig(model, tmp_path / "server.log", seats=8)) as server:
        client = ClientConfig(server.url, eos_token=2, max_tokens=200, record_margins=True)
        records = asyncio.run(send_open_loop(requests, client, lambda request: {}))
        again = asyncio.run(send_open_loop(requests[:1], client, lambda request: {}))
        refused = asyncio.run(send_open_loop(requests[:1], client, lambda r: {"n": -1}))
    assert [r.output_tokens for r in records] == [r.output_tokens for r in requests]
    assert all(r.ok and r.finish_reason == "stop" for r in records), json.dumps(
        [r.error for r in records]
    )
    assert all(len(r.token_ids) == len(r.margins) == r.output_tokens for r in records)
    assert all(r.arrival <= r.sent <= r.first_token <= r.finish for r in records)
    assert all(r.engine_queue_seconds is not None for r in records)
    # The end token stands at the end only, and the rest is not a short cycle.
    assert all(r.token_ids.index(2) == r.output_tokens - 1 for r in records)
    assert len({token for r in records for token in r.token_ids}) > 300
    first = records[0]
    if again[0].token_ids != first.token_ids:
        position = next(
            i
            for i, (a, b) in enumerate(zip(first.token_ids, again[0].token_ids, strict=False))
            if a != b
        )
        assert first.margins[position] < 1e-4
    assert refused[0].error and refused[0].status == 400


@pytest.mark.study
def test_step_times_of_all_conditions_and_a_predictor_that_works_in_one_only(model, tmp_path):
    server = ServerConfig(model, tmp_path / "server.log", seats=4, num_blocks=None)
    plan = StepTimePlan(server, rate=20, phase_seconds=3.0, cycles=1)
    times = measure_step_times(plan, progress=False)
    assert list(times) == ["none", "known", "new"]
    assert all(each.tokens > 50 and 0 < each.p50 <= each.p99 for each in times.values())
    # The prompts of the others are remembered, or there are none.
    assert times["new"].predictor_share > 0.02
    assert times["new"].predictor_share > 5 * times["known"].predictor_share
    assert all(each.served == 0 for each in times.values())


def test_a_server_that_does_not_start_shows_why_and_leaves_nothing(model, tmp_path):
    server = VllmServer(
        ServerConfig(model, tmp_path / "server.log", extra_args=("--no-such-argument",))
    )
    with pytest.raises(ServerFailed, match="no-such-argument"), server:
        pass
    assert server.cpu_seconds() == {}
