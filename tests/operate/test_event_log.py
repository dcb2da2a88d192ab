"""`semsched trace` on logs with known contents."""

import json
import random

import pytest
from html_pages import read_page

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.operate.event_log import LogReader, log_parts

START = 1_700_000_000.0


def event(time, request, state, before, level=2, **more) -> str:
    line = {
        "time": START + time,
        "engine": 0,
        "request": request,
        "tier": f"tier{level}",
        "level": level,
        "level_from": "hint",
        "from": before,
        "state": state,
    }
    return json.dumps(line | more) + "\n"


STORY = [
    event(0.0, "routine", "queued", None, 4),
    event(1.0, "routine", "running", "queued", 4),
    event(2.0, "urgent", "queued", None, 0),
    event(2.0, "routine", "queued", "running", 4, reason="urgent", plan="recompute"),
    event(2.5, "urgent", "running", "queued", 0),
    event(3.0, "gone", "queued", None, 4),
    '{"time": 12, "half a li\n',
    "\n",
    event(3.5, "gone", "cancelled", "queued", 4),
    event(4.5, "urgent", "completed", "running", 0, first_token=START + 2.6),
    event(4.5, "routine", "running", "queued", 4),
    event(6.0, "routine", "swapped", "running", 4, reason="urgent", plan="swap"),
    event(7.0, "routine", "running", "swapped", 4),
    event(9.0, "routine", "completed", "running", 4, first_token=START + 1.5),
    event(9.5, "open", "queued", None, 4),
    event(9.6, "open", "running", "queued", 4),
    event(9.9, "late", "queued", None, 4),
]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(STORY))
    return path


def test_table_counts_requests_preemptions_and_times(log, tmp_path, capsys) -> None:
    assert main(["trace", str(log), "--output", str(tmp_path / "out")]) == 0
    urgent, routine = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (urgent["tier"], urgent["completed"], urgent["ttft_p50"]) == (
        "tier0",
        1,
        pytest.approx(0.6),
    )
    assert urgent["queueing_delay_p50"] == pytest.approx(0.5)
    assert (routine["requests"], routine["cancelled"], routine["unfinished"]) == (4, 1, 2)
    assert routine["preemptions"] == {"recompute": 1, "swap": 1}
    assert routine["e2e_p99"] == pytest.approx(9.0)
    printed = capsys.readouterr().out
    assert "1 lines could not be read" in printed and "1 recompute, 1 swap" in printed


def test_page_has_the_table_and_the_seats(log, tmp_path) -> None:
    main(["trace", str(log), "--output", str(tmp_path)])
    page = read_page(tmp_path / "report.html")
    header, urgent, routine = page.tables["Tiers"]
    assert urgent[:3] == ["0", "tier0", "1"]
    assert "cancelled" in header and "failed" not in header, "none failed"
    assert len(header) <= 10
    assert next(iter(page.charts)) == "Seats"
    header, _, routine = page.tables["All figures"]
    assert dict(zip(header, routine, strict=True))["swap"] == "1"
    assert "Of the first 4 requests, half of level 0 had a seat within 0.5 s; half" in page.text
    labels = page.labels("Seats")
    for text in (
        "request urgent, level 0: waiting from 2.000 to 2.500 s",
        "request urgent, level 0: running from 2.500 to 4.500 s",
        "request routine, level 4: recompute at 2.000 s",
        "request routine, level 4: swapped from 6.000 to 7.000 s",
        "request gone, level 4: cancelled at 3.500 s",
    ):
        assert text in labels
    assert len(page.charts["Queue depth"]) == 2
    assert "1 lines could not be read" in page.text and "4 of 5 requests are shown" in page.text


def test_chrome_trace_shows_seats_and_waits(log, tmp_path) -> None:
    main(["trace", str(log), "--output", str(tmp_path)])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}

    def slices(request: str) -> list[tuple]:
        return [
            (e["name"], round(e["ts"] / 1e6, 3), round(e["dur"] / 1e6, 3))
            for e in events
            if e["ph"] == "X" and f"request {request} " in threads[e["tid"]]
        ]

    assert slices("routine") == [
        ("waiting", 0.0, 1.0),
        ("running, recompute", 1.0, 1.0),
        ("waiting", 2.0, 2.5),
        ("running, swap", 4.5, 1.5),
        ("swapped", 6.0, 1.0),
        ("running, finish", 7.0, 2.0),
    ]
    assert slices("gone") == [("waiting", 3.0, 0.5), ("cancelled", 3.5, 0.0)]
    assert slices("open")[-1][0] == "running, unfinished"
    assert any(e["ph"] == "C" for e in events)


def test_queue_depths_count_waiting_requests(log) -> None:
    reader = LogReader(limit=10)
    list(reader.requests(log))
    depths = {round(moment, 1): counts for moment, counts in reader.depths}
    assert depths[0.0] == {"tier4": 1}
    assert depths[2.0]["tier0"] == 1
    assert depths[3.0] == {"tier0": 0, "tier4": 2}
    assert depths[7.0] == {"tier0": 0, "tier4": 0}


def test_rotated_parts_are_read_oldest_first(tmp_path) -> None:
    path = tmp_path / "e.jsonl"
    for name, lines in ((".2", STORY[:4]), (".1", STORY[4:9]), ("", STORY[9:])):
        (tmp_path / f"e.jsonl{name}").write_text("".join(lines))
    assert [part.name for part in log_parts(path)] == ["e.jsonl.2", "e.jsonl.1", "e.jsonl"]
    found = {one.request: one for one in LogReader(limit=10).requests(path)}
    assert found["routine"].end == 9.0 and len(found["routine"].spans) == 3


def test_requests_older_than_the_log_have_no_times(tmp_path) -> None:
    (tmp_path / "e.jsonl").write_text("".join(STORY[4:]))
    reader = LogReader(limit=10)
    found = {one.request: one for one in reader.requests(tmp_path / "e.jsonl")}
    assert not found["routine"].whole and found["routine"].first_seat is None
    assert not found["urgent"].whole and found["gone"].whole


def test_limit_and_since_select_the_drawn_requests(log) -> None:
    def drawn(**options) -> list[str]:
        return [one.request for one in LogReader(**options).requests(log) if one.keeps_spans]

    assert drawn(limit=2) == ["urgent", "routine"]
    assert drawn(limit=2, since=2.9) == ["gone", "open"]


def test_empty_and_missing_logs_fail(tmp_path, capsys) -> None:
    (tmp_path / "empty.jsonl").write_text("not a log\n")
    assert main(["trace", str(tmp_path / "empty.jsonl"), "--output", str(tmp_path)]) == 2
    assert main(["trace", str(tmp_path / "no.jsonl"), "--output", str(tmp_path)]) == 1
    assert "no.jsonl" in capsys.readouterr().err


def test_only_unfinished_requests_stay_in_memory(tmp_path) -> None:
    path, rng = tmp_path / "big.jsonl", random.Random(0)
    with path.open("w") as file:
        for number in range(20_000):
            level = rng.randrange(5)
            file.write(event(number / 100, f"r{number}", "queued", None, level))
            file.write(event(number / 100 + 0.001, f"r{number}", "running", "queued", level))
            file.write(event(number / 100 + 0.002, f"r{number}", "completed", "running", level))
    reader, most = LogReader(limit=50), 0
    kept = 0
    for request in reader.requests(path):
        most = max(most, len(reader._requests))
        kept += len(request.spans)
    assert most <= 1 and kept == 50 and len(reader.depths) < 100
