"""`semsched trace verify`: no change of a log goes unnoticed, and its gaps are marked."""

import json
import random
import stat
import time
from pathlib import Path

import pytest
from jobs import make_job

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.engine.metrics import event_log
from vllm_semantic_sched.engine.metrics.event_log import EventLog
from vllm_semantic_sched.operate.audit import Audit
from vllm_semantic_sched.operate.event_log import log_parts
from vllm_semantic_sched.operate.why import account_of
from vllm_semantic_sched.policy.config.overload import Events
from vllm_semantic_sched.policy.facts.job import JobState
from vllm_semantic_sched.policy.record.lifecycle import Transition


def write(path: Path, count: int = 100, first: int = 0, engine: int = 0, **settings) -> EventLog:
    """A closed log with so many requests."""
    log = EventLog(Events(path=str(path), **settings), engine, lambda: ("a", "b"))
    for number in range(first, first + count):
        job = make_job(number % 2, request_id=f"cmpl-{number:03}-0-0a1b2c3d", tenant="acme")
        log.moved(Transition(job, None, JobState.WAITING, time.monotonic()))
    log.close()
    return log


def kinds(path: Path) -> list[str]:
    return [finding.kind for finding in Audit(path).findings]


def texts(path: Path) -> str:
    return " ".join(finding.text for finding in Audit(path).findings)


def change(lines: list[str], chance: random.Random) -> list[str]:
    """The lines after one change that somebody might make."""
    at, lines = chance.randrange(len(lines)), list(lines)
    other = chance.choice([place for place in range(len(lines)) if place != at])
    kind = chance.choice(["edit", "remove", "swap", "repeat", "insert", "cut", "join", "field"])
    if kind == "edit":
        place = chance.randrange(len(lines[at]))
        character = chance.choice([c for c in 'x0 "' if c != lines[at][place]])
        lines[at] = lines[at][:place] + character + lines[at][place + 1 :]
    elif kind == "remove":
        del lines[at : at + chance.randint(1, 5)]
    elif kind == "swap":
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == "repeat":
        lines.insert(other, lines[at])
    elif kind == "insert":
        lines.insert(at, '{"time": 1, "request": "made up", "state": "queued"}')
    elif kind == "cut":
        lines = lines[: max(1, at)]
    elif kind == "join":
        lines[at : at + 2] = [" ".join(lines[at : at + 2])] if at + 1 < len(lines) else []
    else:
        line = json.loads(lines[at])
        line["time"] += 1
        lines[at] = json.dumps(line)
    return lines


@pytest.mark.parametrize("keyed", [False, True])
def test_each_of_500_changes_is_found(tmp_path: Path, keyed: bool) -> None:
    path = tmp_path / "events.jsonl"
    if keyed:
        (tmp_path / "events.jsonl.key").write_text("secret")
    write(path, 15)
    write(path, 15, first=15)  # after a restart
    assert Audit(path).whole
    lines, found = path.read_text().splitlines(), 0
    for seed in range(500):
        changed = change(lines, random.Random(seed))
        assert changed != lines
        path.write_text("\n".join(changed) + "\n")
        found += not Audit(path).whole
    assert found == 500


def test_chain_goes_on_over_files_restarts_and_expiry(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr(event_log, "MAX_BYTES", 10_000)
    monkeypatch.setattr(event_log, "BACKUPS", 3)
    write(path, 200)
    write(path, 10, first=200)
    assert len(log_parts(path)) == 4
    audit = Audit(path)
    assert audit.whole and "expired" in texts(path)
    (tmp_path / "events.jsonl.2").unlink()
    (tmp_path / "events.jsonl.3").rename(tmp_path / "events.jsonl.2")
    assert not Audit(path).whole


def test_server_that_was_killed_leaves_a_gap_and_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, 10)
    lines = path.read_text().splitlines()[:-1]  # no closing line
    path.write_text("\n".join(lines) + "\n")
    (tmp_path / "events.jsonl.head").write_text(json.loads(lines[-1])["chain"] + "\n")
    assert "killed" in texts(path) and Audit(path).whole
    path.write_text("\n".join(lines) + '\n{"half": ')
    write(path, 10, first=10)
    assert kinds(path).count("gap") == 2 and Audit(path).whole


def test_key_is_what_makes_a_new_chain_impossible(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, 10)
    assert "not keyed" in texts(path) and Audit(path).whole
    (tmp_path / "events.jsonl.key").write_text("secret")
    assert not Audit(path).whole  # whoever has hashed it had no key
    write(path, 10, first=10)
    assert Audit(path).whole
    (tmp_path / "events.jsonl.key").unlink()
    assert not Audit(path).whole and "missing" in texts(path)


def test_hashed_ids_are_found_by_the_clients_id(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, 10, hash_ids=True)
    text = path.read_text()
    assert "cmpl" not in text and "acme" not in text
    key = tmp_path / "events.jsonl.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    write(path, 1, engine=1, hash_ids=True)  # with the same key
    assert Audit(tmp_path / "events-1.jsonl").whole
    account = account_of([path], "cmpl-003")
    assert account is not None and account.request.endswith("-0-0a1b2c3d")
    assert account_of([path], "cmpl-777") is None
    assert len({json.loads(line).get("tenant") for line in text.splitlines()}) == 2  # or none


def test_command_names_the_line_and_fails(tmp_path: Path, capsys) -> None:
    path = tmp_path / "events.jsonl"
    write(path, 5)
    assert main(["trace", "verify", str(tmp_path)]) == 0
    assert "7 lines unchanged" in capsys.readouterr().out
    path.write_text(path.read_text().replace("cmpl-003", "cmpl-999"))
    assert main(["trace", "verify", str(path)]) == 1
    assert "problem events.jsonl:5: changed" in capsys.readouterr().out
    assert main(["trace", str(path)]) == 2


def test_log_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1, "request": "old", "state": "queued"}\n')
    write(path, 3)
    assert Audit(path).whole and "1 lines before have no hash" in texts(path)
