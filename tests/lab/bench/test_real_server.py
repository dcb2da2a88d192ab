"""The benchmark's model, client and server, with a real `vllm serve`."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from vllm_semantic_sched.cli import main  # noqa: E402
from vllm_semantic_sched.lab.bench import server as server_module  # noqa: E402
from vllm_semantic_sched.lab.bench.client import LoadClient  # noqa: E402
from vllm_semantic_sched.lab.bench.device_use import LABEL  # noqa: E402
from vllm_semantic_sched.lab.bench.prompts import draw_sizes  # noqa: E402
from vllm_semantic_sched.lab.bench.schedulers import parse_schedulers  # noqa: E402
from vllm_semantic_sched.lab.bench.server import (  # noqa: E402
    ServerConfig,
    ServerFailed,
    VllmServer,
    set_priority,
)
from vllm_semantic_sched.lab.bench.tiny_model import make_model  # noqa: E402
from vllm_semantic_sched.lab.bench.usage import PREEMPTIONS, STEPS, read_counters  # noqa: E402
from vllm_semantic_sched.lab.bench.workload import (  # noqa: E402
    WorkloadConfig,
    make_workload,
    question_source,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    assert make_model(folder)
    return folder


@pytest.fixture(autouse=True)
def forked(monkeypatch, nursery):
    monkeypatch.setattr(server_module, "subprocess", nursery)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    set_priority(os.getpid(), before)  # a comparison raises its own, beside other tests


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINVAL, errno.EPERM, errno.ENOENT])
def test_priority_does_without_a_weight_for_the_session(code, monkeypatch):
    def refuse(path, text):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_text", refuse)
    set_priority(os.getpid(), os.getpriority(os.PRIO_PROCESS, 0))


def test_model_is_written_once_with_a_real_tokenizer(model):
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


def test_answers_have_the_wanted_lengths_and_diverse_tokens(model, tmp_path):
    config = WorkloadConfig(requests=18, gap=0.0, max_burst=18, max_output_tokens=120)
    requests = make_workload(config, question_source(None)[0]).requests
    # Too few blocks for sixteen requests: some are preempted and computed again.
    shape = ServerConfig(model, tmp_path / "server.log", seats=16, num_blocks=34)
    with VllmServer(shape) as server:
        client = LoadClient(server.url, eos_token=2, max_tokens=200)
        before = read_counters(server.get_text("/metrics"))
        records = client.send(requests)
        counters = read_counters(server.get_text("/metrics"))
        (known,) = parse_schedulers("semantic-known", None)
        stated = replace(client, extras=known.body_extras).send(requests[:4])
        again = replace(client, record_margins=True).send_one_by_one(requests[:1])
        refused = replace(client, extras=lambda request: {"n": -1}).send(requests[:1])
    assert [r.output_tokens for r in records] == [r.output_tokens for r in requests]
    assert counters[PREEMPTIONS] > before[PREEMPTIONS]
    # Each step gives a token to at most sixteen requests.
    tokens = sum(r.output_tokens for r in records)
    assert tokens / 16 <= counters[STEPS] - before[STEPS] <= tokens
    assert all(r.ok and r.finish_reason == "length" for r in stated)
    assert [r.token_ids for r in stated] == [r.token_ids for r in records[:4]]
    assert all(r.ok and r.finish_reason == "stop" for r in records), json.dumps(
        [r.error for r in records]
    )
    assert all(len(r.token_ids) == r.output_tokens for r in records)
    assert len(again[0].margins) == len(again[0].token_ids) == records[0].output_tokens
    assert all(r.arrival <= r.sent <= r.first_token <= r.finish for r in records)
    assert all(r.engine_queue_seconds is not None for r in records)
    # The end token is only at the end, and the rest is not a short cycle.
    assert all(r.token_ids.index(2) == r.output_tokens - 1 for r in records)
    assert len({token for r in records for token in r.token_ids}) > 300
    first = records[0]
    if again[0].token_ids != first.token_ids:
        position = next(
            i
            for i, (a, b) in enumerate(zip(first.token_ids, again[0].token_ids, strict=False))
            if a != b
        )
        assert again[0].margins[position] < 1e-4
    assert refused[0].error and refused[0].status == 400


def test_prompts_have_about_the_tokens_that_were_drawn(model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    load = make_workload(WorkloadConfig(60, prompts="chat"), question_source(None)[0])
    tokens = sum(len(tokenizer(one.prompt).input_ids) for one in load.requests)
    assert tokens == pytest.approx(sum(one.prompt for one in draw_sizes("chat", 60, 0)), rel=0.05)


def test_comparison_on_an_emulated_gpu_runs_to_its_page(tmp_path, capsys):
    """By the clock on the wall, with a real server, and the texts read beside it."""
    command = f"bench run --device h100 --output {tmp_path} --schedulers semantic --mix even"
    # Long enough that the predictor reads them while they run.
    command += " --requests 10 --gap 0.3 --max-output 150 --quick --repeats 0 --quiet"
    assert main(command.split()) == 0, capsys.readouterr().err
    document = json.loads((tmp_path / "results.json").read_text())
    (done,) = document["mixes"]["even"]["semantic"]["rounds"]
    records = done["records"]
    assert len(records) == 10 and all(one["finish"] for one in records)
    assert any(one["read_level"] is not None for one in records)
    assert sum(one["prompt_tokens"] for one in records) > 10_000
    # Of the steps until the last arrival.
    assert 0 <= done["device"]["idle"] < 1 and done["device"]["tokens"] > 0
    page = (tmp_path / "report.html").read_text()
    assert "level 0" in page and LABEL in page and LABEL in capsys.readouterr().out


def test_failed_server_start_reports_why_and_leaves_no_process(model, tmp_path):
    server = VllmServer(
        ServerConfig(model, tmp_path / "server.log", extra_args=("--no-such-argument",))
    )
    with pytest.raises(ServerFailed, match="no-such-argument"), server:
        pass
    assert server.cpu_seconds() == {}
