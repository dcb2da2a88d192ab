"""`semsched why` on a log with known contents."""

import json
import re

import pytest

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.operate.why import account_of, sentence, summarize, timeline

START = 1_700_000_000.0


def event(time, request, before, state, level, **more) -> str:
    line = {
        "time": START + time,
        "engine": 0,
        "request": f"cmpl-{request}-0-0a1b2c3d",
        "tier": f"tier{level}",
        "level": level,
        "level_from": "prediction",
        "from": before,
        "state": state,
        "prompt_tokens": 100,
        "output_tokens": 5,
        "policy": "0123456789ab",
    }
    if "for_" in more:
        more["for"], more["for_level"] = f"cmpl-{more.pop('for_')}-0-0a1b2c3d", 0
    return json.dumps(line | more)


P = [0.02, 0.08, 0.1, 0.7, 0.1]
STORY = [
    event(0.0, "x", None, "queued", 2, rule="instant", urgency=P),
    event(0.5, "x", "queued", "queued", 3, reason="read", level_before=2, rule="prediction",
          urgency=P, model="ab12"),
    event(1.0, "e", None, "queued", 0, rule="hint"),
    event(2.0, "e", "queued", "running", 0, waited=[["seat", None, 1.0]]),
    event(3.0, "a", None, "queued", 0, rule="hint"),
    event(10.0, "a", "queued", "running", 0, waited=[["seat", 0, 7.0]]),
    event(20.0, "x", "queued", "running", 3,
          waited=[["seat", None, 2.0], ["seat", 0, 15.0], ["tenant", None, 3.0]]),
    event(21.0, "b", None, "queued", 0, rule="hint"),
    event(27.0, "x", "running", "running", 3, reason="held", held=6.1, for_="b"),
    event(28.0, "x", "running", "swapped", 3, reason="urgent", plan="swap", for_="c"),
    event(28.0, "c", "queued", "running", 0, waited=[["step", None, 0.1]]),
    event(30.0, "x", "swapped", "running", 3, waited=[["seat", 0, 2.0]]),
    event(30.4, "x", "running", "running", 3, reason="restored", restored=0.4),
    event(33.0, "x", "running", "completed", 3, reason="stop", first_token=START + 20.5),
]  # fmt: skip


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(STORY) + "\n")
    return path


def test_causes_name_the_others_and_add_up(log) -> None:
    account = account_of([log], "cmpl-x")
    assert account is not None and account.waited == pytest.approx(20 + 6.1 + 2 + 0.4)
    text = sentence(account)
    assert re.match(
        r"cmpl-x-\S+ \(level 3, tier3\) waited 28\.5 s: 15\.0 s overtaken by level 0", text
    )
    for words in (
        "6.1 s held for cmpl-b-0-0a1b2c3d (level 0)",
        "3.0 s its tenant's limit",
        "2.0 s no seat",
        "2.0 s preempted for cmpl-c-0-0a1b2c3d (level 0), KV on the host",
        "0.4 s loading its KV",
        "seats went to 3 requests of level 0; after cmpl-a-0-0a1b2c3d (level 0)",
    ):
        assert words in text
    assert sum(
        map(float, re.findall(r"([\d.]+) s (?!until)", text.partition(": ")[2].split(". M")[0]))
    ) == (pytest.approx(account.waited, abs=0.3))


def test_answer_fits_on_a_screen(log, capsys) -> None:
    assert main(["why", "cmpl-x", str(log)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) <= 24 and max(map(len, printed)) <= 100
    shown = "\n".join(printed)
    for line in (
        "    0.000 s  arrived, level 2 by the instant reader (P = 0.02 0.08 0.10 0.70 0.10)",
        "    0.500 s  read: level 2 became 3 by the predictor (P = 0.02 0.08 0.10 0.70 0.10; "
        "model ab12)",
        "   20.000 s  got a seat",
        "   28.000 s  preempted (urgent) for cmpl-c-0-0a1b2c3d (level 0), KV on the host",
        "   33.000 s  completed (stop), 5 tokens",
        "policy 0123456789ab",
    ):
        assert line in shown


def test_long_stories_are_cut(tmp_path, capsys) -> None:
    path = tmp_path / "events.jsonl"
    holds = [
        event(20 + n, "x", "running", "running", 3, reason="held", held=0.5, for_="b")
        for n in range(200)
    ]
    path.write_text("\n".join([*STORY[:7], *holds, STORY[-1]]) + "\n")
    assert main(["why", "cmpl-x", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) <= 24 and "more" in "\n".join(printed)
    assert "100.0 s held for cmpl-b" in printed[0]


def test_level_and_window_are_added_up(log, capsys) -> None:
    assert main(["why", "--level", "3", "--last", "10m", str(log)]) == 0
    printed = capsys.readouterr().out
    assert "1 request of level 3 waited 28.5 s in all" in printed
    assert "overtaken  " in printed and max(map(len, printed.splitlines())) <= 100
    assert summarize([log], None, 5.0).seconds.total() == pytest.approx(2.0 + 0.4 + 0.1)
    assert main(["why", str(log)]) == 0
    assert "5 requests waited" in capsys.readouterr().out


def test_wait_without_recorded_causes_says_so(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join([STORY[0], event(9, "x", "queued", "running", 3)]) + "\n")
    account = account_of([path], "cmpl-x")
    assert account is not None and "9.0 s not recorded" in sentence(account)


def test_no_cause_is_shown_as_nothing(tmp_path, capsys) -> None:
    waits = [["seat", None, 2.0], ["kv_peak", None, 0.02], ["step", None, 0.004]]
    lines = [STORY[0], event(2.024, "x", "queued", "running", 3, waited=waits)]
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(lines) + "\n")
    account = account_of([path], "cmpl-x")
    assert account is not None
    assert sentence(account).endswith("waited 2.0 s: 2.0 s no seat.")
    assert main(["why", "--level", "3", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "1 request of level 3 waited 2.0 s in all" in printed
    assert "20 ms" in printed and "4 ms" in printed and "0.0" not in printed


def test_unknown_request_and_missing_log_fail(log, capsys) -> None:
    assert main(["why", "cmpl-no", str(log)]) == 2
    assert main(["why", "cmpl-x", str(log.with_name("no.jsonl"))]) == 1
    assert main(["why", "cmpl-x"]) == 2
    assert main(["why", "/no/file"]) == 2
    assert "no event log at /no/file" in capsys.readouterr().err
    assert main(["why", "--level", "9", str(log)]) == 2
    assert "no request of level 9 in the log; it has levels 0, 2, 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["why", "--last", "soon", str(log)])


def test_line_without_a_field_is_an_error_with_its_name(tmp_path, capsys) -> None:
    path = tmp_path / "events.jsonl"
    last = json.loads(STORY[-1])
    del last["output_tokens"]
    path.write_text("\n".join([*STORY[:-1], json.dumps(last)]))
    assert main(["why", "cmpl-x", str(path)]) == 1
    said = "semsched why: a line of the log lacks the field 'output_tokens'\n"
    assert capsys.readouterr().err == said


def test_timeline_shows_the_floor_of_a_session_and_its_evidence(tmp_path) -> None:
    floor = {"floor": 0, "floor_by": "cmpl-a", "floor_from": "prediction", "floor_age": 31.2}
    path = tmp_path / "events.jsonl"
    arrivals = [
        event(0.0, "x", None, "queued", 0, rule="session", turn=2, **floor),
        event(0.1, "x", "queued", "queued", 3, reason="read", level_before=0, rule="prediction",
              urgency=P, turn=2, **floor),
        event(0.0, "y", None, "queued", 2, rule="default", turn=1),
    ]  # fmt: skip
    path.write_text("\n".join(arrivals) + "\n")
    account = account_of([path], "cmpl-x")
    assert account is not None
    evidence = "turn 2 of its session, whose floor is level 0 by cmpl-a (prediction, 31 s ago)"
    (_, arrived), (_, read) = timeline(account)
    assert arrived == f"arrived, level 0 by session, {evidence}"
    shares = "0.02 0.08 0.10 0.70 0.10"
    assert read == f"read: level 0 became 3 by the predictor (P = {shares}), {evidence}"
    other = account_of([path], "cmpl-y")
    assert other is not None
    assert timeline(other)[0][1] == "arrived, level 2 by default, turn 1 of its session"
