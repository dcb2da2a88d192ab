"""Requests of a session on vLLM's scheduler: texts are read together, and levels inherited."""

import json
from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.requests.arrivals import pass_reading, read_session
from vllm_semantic_sched.engine.vllm_api import Request
from vllm_semantic_sched.lab.bench.standalone import (
    StubReader,
    build_scheduler,
    read_texts,
    run_step,
)
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.predict.window import continued, cut_text, newest_words

pytestmark = pytest.mark.engine

URGENT = "my father collapsed, he is not breathing and has no pulse"


class Texts(StubReader):
    """Reads level 0 in texts with "collapsed", else level 3, and keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def submit(self, request_id: str, text: str, *args, **kwargs) -> bool:
        self.texts.append(cut_text(text, 126))
        self._submitted.append((request_id, text))
        return True

    def drain(self):
        submitted, self._submitted = self._submitted, []
        answers = []
        for name, text in submitted:
            level = 0 if "collapsed" in text else 3
            answers.append((name, Prediction(tuple(float(each == level) for each in range(5)))))
        return answers


class Server:
    """A scheduler whose prompts have the texts that clients send."""

    def __init__(self, folder, sessions="{memory: 600}", events="") -> None:
        path = folder / "policy.yaml"
        path.write_text(f"sessions: {sessions}\n{events}")
        self.scheduler = build_scheduler(
            SemanticScheduler, semantic_sched={"policy": str(path)}, max_num_seqs=2
        )
        read_texts(self.scheduler)
        self.service = self.scheduler.predictions.service = Texts()
        self.texts: dict[int, str] = {}
        self.scheduler.predictions.tokenizer = SimpleNamespace(
            decode=lambda tokens: self.texts[tokens[0]]
        )

    def ask(self, text, reading=None, **extra):
        """The job of a request that has been read, and has not ended."""
        number = len(self.texts) + 1
        self.texts[number] = text
        params = SamplingParams(max_tokens=50, extra_args=extra)
        if reading is not None:
            pass_reading(params, reading)
        self.scheduler.add_request(
            Request(
                request_id=f"r{number}",
                prompt_token_ids=[number] * 9,
                sampling_params=params,
                pooling_params=None,
            )
        )
        run_step(self.scheduler)
        return self.scheduler.jobs[f"r{number}"]

    def close(self) -> None:
        assert self.scheduler.counters.total("policy_errors") == 0
        self.scheduler.shutdown()


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    yield server
    server.close()


def test_next_request_is_read_after_the_sessions_words(server) -> None:
    assert server.ask(URGENT, session="s").level == 0
    job = server.ask("yes he is 61", session="s")
    assert (job.level, job.level_source.value) == (0, "prediction")
    assert server.service.texts[1] == f"yes he is 61 ■ {URGENT}"
    assert server.ask("yes he is 61", session="t").level == 3
    assert server.ask("yes he is 61").level == 3
    assert server.scheduler.gauges()["session_floors"] == 1.0


def test_reading_of_the_http_server_counts_only_without_earlier_words(server) -> None:
    """The HTTP server has read the newest words alone."""
    server.scheduler.predictions.service = StubReader()
    calm = server.scheduler.predictions.instant.read("write a poem about spring")
    levels = server.scheduler.core.levels
    seen, glance = [], levels.glance
    levels.glance = lambda job, provisional: (seen.append(provisional), glance(job, provisional))
    server.ask(URGENT, reading=calm, session="s")
    server.ask("yes he is 61", reading=calm, session="s")
    server.ask("yes he is 61", reading=calm, session="t")
    first, second, other = (reading.urgency for reading in seen)
    assert first == other == calm.urgency
    assert second[0] > 0.5


def test_parts_of_a_beam_are_no_turns(server) -> None:
    beam = SamplingParams(max_tokens=1, extra_args={"session": "s"})
    server.texts[1] = URGENT
    request = Request(
        request_id="cmpl-1-0123456789abcdef-beam-2-01234567",
        prompt_token_ids=[1] * 9,
        sampling_params=beam,
        pooling_params=None,
    )
    server.scheduler.add_request(request)
    run_step(server.scheduler)
    assert len(server.scheduler.core.sessions) == 0


def test_off_by_default(tmp_path) -> None:
    server = Server(tmp_path, sessions="{}")
    server.ask(URGENT, session="s")
    assert server.ask("yes he is 61", session="s").level == 3
    assert "session_floors" not in server.scheduler.gauges()
    server.close()


def test_event_log_names_the_evidence_and_no_words(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    server = Server(tmp_path, events=f"events: {{path: {path}, hash_ids: true}}")
    server.ask(URGENT, session="my-session")
    server.ask("yes, in the kitchen", session="my-session")
    server.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line for line in lines if "turn" in line]
    assert [(line["turn"], line.get("floor")) for line in lines] == [(1, None)] * 2 + [(2, 0)] * 2
    first, last = lines[0], lines[-1]
    assert last["floor_by"] == first["request"] != "r1", "hashed, as all ids"
    assert last["floor_from"] == "prediction" and last["floor_age"] >= 0
    for private in ("collapsed", "kitchen", "my-session"):
        assert private not in path.read_text()


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ({"session": " a "}, "a"),
        ({"session": 7}, "7"),
        ({"session": "x" * 500}, "x" * 128),
        ({"session": ["a"]}, ""),
        ({"session": True}, ""),
        ({}, ""),
        (None, ""),
        ("session", ""),
    ],
)
def test_any_client_value_names_a_session_or_none(sent, name) -> None:
    assert read_session(sent) == name


CHAT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
LAST = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n"


@pytest.mark.parametrize(
    ("text", "read", "words"),
    [
        ("and now?", "and now? ■ second ■ first", "and now?"),
        (LAST, "and now? ■ second ■ first", "and now?"),
        (CHAT + LAST, "and now? ■ hello", "and now?"),  # the client sends the whole chat
        ("", "second ■ first", ""),
        ("a" * 900, None, f"{'a' * 100} {'a' * 100}"),
    ],
)
def test_text_is_read_as_the_chat_that_holds_it(text, read, words) -> None:
    whole = continued(text, ("second", "first"))
    assert newest_words(text) == words
    assert read is None or cut_text(whole, 126) == read


def test_first_request_is_read_as_it_is() -> None:
    assert continued(CHAT, ()) == CHAT and newest_words(CHAT) == "hello"
