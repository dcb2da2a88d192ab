"""The event log: every transition once and in order, and failures of the disk."""

import json
import logging
import threading
import time

import pytest
from jobs import make_job

from vllm_semantic_sched.engine.metrics import event_log
from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.engine.metrics.event_log import EventLog
from vllm_semantic_sched.engine.scheduler import SemanticScheduler
from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step
from vllm_semantic_sched.operate.audit import Audit
from vllm_semantic_sched.policy.config.overload import Events
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.facts.job import JobState
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.record.event_format import Event
from vllm_semantic_sched.policy.record.lifecycle import Transition

pytestmark = pytest.mark.engine

NAMES = ("gold", "silver", "bronze")


def make_log(path, engine: int = 0, **settings) -> EventLog:
    section = Events(path=str(path), **settings)
    return EventLog(section, engine, lambda: NAMES)


def transition(number: int, state=JobState.RUNNING) -> Transition:
    job = make_job(number % 3, request_id=f"r{number}", tenant="acme")
    return Transition(job, JobState.WAITING, state, time.monotonic(), "why")


def lines(path) -> list[dict]:
    """Lines about requests, without their hashes."""
    found = [json.loads(line) for line in path.read_text().splitlines() if line]
    assert all(len(line.pop("chain")) == 32 for line in found)
    return [line for line in found if "log" not in line]


def about(path) -> list[str]:
    """Lines about the log itself."""
    found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line["log"] for line in found if "log" in line]


def counts(log) -> Counters:
    log.report(counters := Counters())
    return counters


def test_lines_contain_request_time_states_and_reason(tmp_path) -> None:
    path = tmp_path / "new" / "events.jsonl"
    log = make_log(path)
    before = time.time()
    log.moved(transition(4, JobState.REFUSED))
    log.close()
    (line,) = lines(path)
    assert before - 1 < line.pop("time") < time.time() + 1
    assert line == {
        "engine": 0,
        "request": "r4",
        "tier": "silver",
        "level": 1,
        "level_from": "hint",
        "tenant": "acme",
        "from": "queued",
        "state": "refused",
        "reason": "why",
        "prompt_tokens": 100,
        "output_tokens": 0,
        "max_tokens": 1000,
    }


def test_rotated_files_hold_all_lines_in_order(tmp_path, monkeypatch) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr(event_log, "MAX_BYTES", 20_000)
    monkeypatch.setattr(event_log, "BACKUPS", 50)
    log = make_log(path)
    for number in range(1000):
        log.moved(transition(number))
    log.close()
    parts = sorted(tmp_path.glob("events.jsonl.[0-9]*"), key=lambda p: -int(p.suffix[1:]))
    assert len(parts) > 3
    assert all(part.stat().st_size <= 20_000 for part in parts)
    assert [about(part)[0] for part in parts[1:]] == ["continued"] * (len(parts) - 1)
    names = [line["request"] for part in [*parts, path] for line in lines(part)]
    assert names == [f"r{number}" for number in range(1000)]


def test_each_engine_writes_its_own_file(tmp_path) -> None:
    logs = [make_log(tmp_path / "events.jsonl", engine) for engine in (0, 2)]
    for log in logs:
        log.moved(transition(1))
        log.close()
    assert lines(tmp_path / "events.jsonl")[0]["engine"] == 0
    assert lines(tmp_path / "events-2.jsonl")[0]["engine"] == 2


def test_hanging_disk_drops_lines_and_does_not_block(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(event_log, "_QUEUE", 100)
    log = make_log(tmp_path / "events.jsonl")
    hang = threading.Event()
    write = log.file.write
    monkeypatch.setattr(log.file, "write", lambda text: (hang.wait(30), write(text))[1])
    for number in range(2000):  # while the disk hangs
        log.moved(transition(number))
    assert counts(log).total("event_log_dropped_lines", "queue_full") >= 1000
    hang.set()
    log.close()
    counters = counts(log)
    written = len(lines(tmp_path / "events.jsonl"))
    assert written == counters.total("event_log_lines")
    assert written + counters.total("event_log_dropped_lines") == 2000
    assert "lost" in about(tmp_path / "events.jsonl")
    audit = Audit(tmp_path / "events.jsonl")
    assert audit.whole and any("lost" in finding.text for finding in audit.findings)


def test_full_disk_is_counted_and_does_not_stop_the_log(caplog, monkeypatch) -> None:
    monkeypatch.setattr(event_log, "logger", logging.getLogger("test"))
    log = make_log("/dev/full")
    for number in range(300):
        log.moved(transition(number))
    log.close()
    assert not log._thread.is_alive()
    counters = counts(log)
    assert counters.total("event_log_dropped_lines", "not_writable") == 300
    assert counters.total("event_log_lines") == 0
    assert len(caplog.records) == 1 and "No space left" in caplog.text


def test_failed_writes_are_not_kept_in_memory() -> None:
    log = make_log("/dev/full")
    log.close()
    log.file.stream = log.file._open()
    log.write([Event.of(transition(1), time.time())])
    assert log.file.stream is None


def test_log_continues_when_space_is_free_again(tmp_path, monkeypatch) -> None:
    path = tmp_path / "events.jsonl"
    log = make_log(path)
    write = log.file.write

    def half(text: str) -> None:
        with path.open("a") as file:
            file.write('{"half": "a li')
        raise OSError(28, "No space left on device")

    log.write([Event.of(transition(6), time.time())])
    monkeypatch.setattr(log.file, "write", half)
    log.write([Event.of(transition(0), time.time())])
    monkeypatch.setattr(log.file, "write", write)
    log.moved(transition(7))
    log.close()
    requests = [json.loads(line).get("request") for line in path.read_text().splitlines()[-3:]]
    assert requests == [None, "r7", None] and about(path) == ["started", "resumed", "closed"]
    audit = Audit(path)
    assert audit.whole
    assert {finding.kind for finding in audit.findings} == {"gap", "note"}


def test_unwritable_path_stops_the_start(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PolicyError, match=r"events\.path: cannot write .*file/events"):
        make_log(tmp_path / "file" / "events.jsonl")


def test_scheduler_logs_each_request_once_with_legal_transitions(tmp_path) -> None:
    path, policy = tmp_path / "events.jsonl", tmp_path / "policy.yaml"
    policy.write_text(f"predictor: {{enabled: false}}\nevents: {{path: {path}}}\n")
    scheduler = build_scheduler(
        SemanticScheduler, max_num_seqs=1, semantic_sched={"policy": str(policy)}
    )
    scheduler.add_request(make_request("routine", urgency=4, output_tokens=30))
    for _ in range(3):
        run_step(scheduler)
    scheduler.add_request(make_request("urgent", urgency=0, output_tokens=5))
    while scheduler.get_num_unfinished_requests():
        run_step(scheduler)
    scheduler.shutdown()
    log = lines(path)

    def states(name: str) -> list[tuple]:
        mine = [e for e in log if e["request"] == name and e["from"] != e["state"]]
        return [(e["state"], e.get("reason"), e.get("plan")) for e in mine]

    assert states("urgent") == [
        ("queued", None, None),
        ("running", None, None),
        ("completed", "length", None),
    ]
    assert states("routine") == [
        ("queued", None, None),
        ("running", None, None),
        ("queued", "urgent", "recompute"),
        ("running", None, None),
        ("completed", "length", None),
    ]
    assert [e["output_tokens"] for e in log if e["state"] == "completed"] == [5, 30]
    assert all(e["first_token"] <= e["time"] for e in log if e["state"] == "completed")


@pytest.mark.parametrize("read", [False, True])
def test_end_has_the_newest_reading(tmp_path, read) -> None:
    """The instant reader's, if the request ended before the predictor answered."""
    log = make_log(tmp_path / "events.jsonl")
    end = transition(2, JobState.COMPLETED)
    end.job.prediction = Prediction((0.1, 0.7, 0.2), (0.25, 0.75))
    end.job.read_at = 0.5 if read else None
    log.moved(end)
    log.close()
    line = next(one for one in lines(tmp_path / "events.jsonl") if one.get("request") == "r2")
    assert (line["urgency"], line["length"]) == ([0.1, 0.7, 0.2], [0.25, 0.75])
    assert line.get("read_after") == (0.5 if read else None)
