"""The comparison of placements, without a server."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_semantic_sched.engine.http.request_context import PLACEMENT_HEADER
from vllm_semantic_sched.lab.bench import engines, schedulers
from vllm_semantic_sched.lab.bench.client import Progress, Record
from vllm_semantic_sched.lab.bench.engines import OURS, STOCK, Burst
from vllm_semantic_sched.lab.bench.schedulers import parse_schedulers
from vllm_semantic_sched.lab.bench.server import ServerConfig
from vllm_semantic_sched.lab.bench.workload import WorkloadConfig

LOAD = WorkloadConfig(requests=10, mix="even", max_output_tokens=16)


def record(level: int, ttft: float, latency: float, tokens: int = 3) -> Record:
    return Record(
        index=0, level=level, text_hash="", wanted_tokens=3, arrival=1.0, first_token=1.0 + ttft,
        finish=1.0 + latency, output_tokens=tokens,
    )  # fmt: skip


def test_burst_is_summarized_by_level() -> None:
    records = [record(0, 0.1 * number, 9.0) for number in range(1, 11)]
    records += [record(4, 1.0, 2.0), record(4, 1.0, 4.0), record(2, 7.0, 7.0, tokens=2)]
    found = Burst.of(records)
    assert found.ttft_mean == pytest.approx(0.55)
    assert found.ttft_p90 == pytest.approx(0.91)
    assert found.latency == pytest.approx(3.0)
    assert found.failed == 1


def test_bursts_differ_and_arrive_evenly() -> None:
    bursts = engines.make_bursts(LOAD, rounds=3, seconds=2.0)
    assert [[one.arrival for one in burst] for burst in bursts] == [
        pytest.approx([0.2 * place for place in range(10)])
    ] * 3
    assert len({tuple(one.text for one in burst) for burst in bursts}) == 3


def test_same_bursts_alternate_headers_on_one_server(monkeypatch, tmp_path) -> None:
    sent, started = [], []

    class Client:
        def __init__(self, url, *values, headers=(), **fields) -> None:
            self.url, self.headers = url, dict(headers)

        def send(self, requests, label=""):
            sent.append((label, dict(self.headers), [one.text for one in requests]))
            early = 0.1 if "X-Semsched-Placement" not in self.headers else 0.2
            return [record(one.level, early, 1.0) for one in requests]

    def serve(config):
        started.append(config.scheduler_args)
        return nullcontext(SimpleNamespace(url="", config=config, check=lambda: None))

    monkeypatch.setattr(engines, "VllmServer", serve)
    monkeypatch.setattr(schedulers, "LoadClient", Client)
    monkeypatch.setattr(engines, "replace", replaced(engines.replace))
    monkeypatch.setattr(schedulers, "end_token", lambda model: 2)
    monkeypatch.setattr(engines, "prefer_client", lambda nice: None)
    server = ServerConfig(Path("model"), tmp_path / "server.log", seats=4)
    (scheduler,) = parse_schedulers("semantic-true", "ems", None, 0.0)
    bursts = engines.make_bursts(LOAD, rounds=3, seconds=1.0)
    rounds = engines.compare_placements(server, scheduler, 2, bursts, Progress())

    (arguments,) = started
    assert arguments[arguments.index("--data-parallel-size") + 1] == "2"
    _, *loads = sent
    assert [STOCK in label for label, _, _ in loads] == [False, True, True, False, False, True]
    for place in range(3):
        pair = loads[2 * place : 2 * place + 2]
        assert pair[0][2] == pair[1][2] == [one.text for one in bursts[place]]
        assert sorted(headers.get("X-Semsched-Placement", "") for _, headers, _ in pair) == [
            "",
            "vllm",
        ]
    assert engines.better_rounds(rounds) == 3
    assert engines.summary(rounds)[OURS]["ttft_mean"] == pytest.approx(0.1)
    stored = json.loads(engines.write_rounds(rounds, tmp_path).read_text())
    assert [len(each) for each in stored["rounds"].values()] == [3, 3]


def replaced(original):
    """`dataclasses.replace` that also copies the stand-in for the client."""

    def replace(one, **changes):
        if hasattr(one, "send"):
            return type(one)(one.url, **changes)
        return original(one, **changes)

    return replace


def test_header_is_the_one_that_the_server_knows() -> None:
    ((name, value),) = engines.HEADERS[STOCK].items()
    assert (name.lower().encode(), value) == (PLACEMENT_HEADER, "vllm")
