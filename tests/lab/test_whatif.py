"""Replays of event logs; the logs are written from simulated runs, so that the truth is known."""

import base64
import json
import random
import re

import numpy as np
import pytest
from drive import PROFILE, drive

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.lab.whatif import (
    MEASURED,
    SAME,
    EngineLog,
    UnusableLog,
    errors,
    read_log,
    replay,
)
from vllm_semantic_sched.policy.config import load_policy, parse_policy
from vllm_semantic_sched.policy.profile.formula import Batch, BatchTerms
from vllm_semantic_sched.sim.request import SimRequest

START = 1_795_000_000.0
ENGINE = {"seats": 4, "token_budget": 512, "block_size": 16, "kv_blocks": 200}
TERMS = BatchTerms(step=4e-3, per_sequence=3e-4, per_prefill=1e-3, per_context_token=1e-7)
TRUTH = PROFILE.model_copy(update={"batch": TERMS})
HINTS = {"predictor": {"enabled": False}}


def load(count: int = 120, shared: int = 0) -> list[SimRequest]:
    rng = random.Random(3)
    requests = []
    for index in range(count):
        prompt, output = rng.randint(8, 150) + 16 * shared, rng.randint(4, 60)
        blocks = (*range(shared), *(1000 * index + n for n in range((prompt + output) // 16)))
        requests.append(
            SimRequest(
                index, index * 0.055, rng.randint(0, 4), prompt, output, hint=None,
                limit=output, shortest=output, blocks=blocks[: (prompt + output) // 16],
            )
        )  # fmt: skip
    return requests


def steps(profile) -> list[list[int]]:
    """Times of all kinds of steps."""
    rows = []
    for decodes in range(5):
        for tokens in (0, 30, 120, 400):
            for context in (40 * decodes, 90 * decodes):
                batch = Batch(decodes=decodes, context=context)
                if tokens:
                    batch.add_prefill(0, tokens)
                if batch.sequences:
                    time = round(profile.step(batch) * 1e6)
                    rows.append([decodes, context, batch.prefills, tokens, tokens * tokens, time])
    return rows * 2


def log_of(path, runs, **facts):
    """Write what an observing server would have logged of these runs."""
    engine = {
        "time": START, "engine": 0, "log": "engine", **ENGINE, "prefix_caching": False,
        "policy": {"observe": True, **HINTS}, "profile": PROFILE.model_dump(exclude_none=True),
        "steps": steps(TRUTH), **facts,
    }  # fmt: skip
    lines = [engine]
    for run in runs:
        request = run.request
        common = {
            "engine": 0, "request": f"r{request.index}", "tier": str(request.level),
            "level": request.level, "level_from": "hint",
            "prompt_tokens": request.prompt_tokens,
        }  # fmt: skip
        arrival = {"time": START + request.arrival, "from": None, "state": "queued"}
        lines.append(common | arrival | {"output_tokens": 0})
        blocks = np.array([(b >> 16, b >> 8 & 255, b & 255) for b in request.blocks], np.uint8)
        end = {
            "time": START + run.finish, "from": "running", "state": "completed",
            "output_tokens": request.output_tokens, "first_token": START + run.first_token,
            "came": START + request.arrival, "max_tokens": request.limit,
            "min_tokens": request.shortest, "blocks": base64.b64encode(blocks.tobytes()).decode(),
        }  # fmt: skip
        lines.append(common | end)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def served(policy: dict, requests, **engine):
    return drive(policy, requests, profile=TRUTH, **ENGINE, **engine)


@pytest.fixture
def log(tmp_path):
    return log_of(tmp_path / "events.jsonl", served({"base": "fcfs"}, load()))


def metric(cell, level: str, name: str) -> float:
    return cell.levels[level][name]


def test_recorded_policy_is_simulated_as_it_was(log) -> None:
    answer = replay(read_log(log)[0], {})
    assert [cell.scheduler for cell in answer.cells] == [MEASURED, SAME]
    assert max(map(abs, errors(answer.cells).values())) < 0.02
    assert "Check: " in answer.checks[0]


@pytest.mark.parametrize("name", ["ems", "tiers", "sjf"])
def test_other_policies_match_simulation_without_log(log, tmp_path, name) -> None:
    keys = load_policy(name).model_dump(exclude_unset=True) | HINTS
    policy = parse_policy(keys)
    answer = replay(read_log(log)[0], {name: policy})
    last = policy.levels - 1
    requests = [
        SimRequest(r.index, r.arrival, min(r.level, last), r.prompt_tokens, r.output_tokens)
        for r in load()
    ]
    truth = log_of(tmp_path / "truth.jsonl", served(keys, requests))
    expected = replay(read_log(truth)[0], {}).cells[0]
    for level, row in expected.levels.items():
        if name != "tiers" or level in ("0", "1"):  # hints beyond its levels are no levels
            assert row["e2e_mean"] == pytest.approx(answer.cells[2].levels[level]["e2e_mean"], 0.1)
    assert answer.verdicts[0].startswith(f"{name}: level 0 p99 TTFT would be ")


def test_prefix_cache_is_simulated_by_the_hashes_in_the_log(tmp_path) -> None:
    runs = served({"base": "fcfs"}, load(shared=12), prefix_caching=True)
    path = log_of(tmp_path / "events.jsonl", runs, prefix_caching=True)
    assert max(map(abs, errors(replay(read_log(path)[0], {}).cells).values())) < 0.02
    blind = log_of(tmp_path / "blind.jsonl", runs, prefix_caching=False)
    found = errors(replay(read_log(blind)[0], {}).cells)
    assert max(found.values()) > 0.2  # else sharing would make no difference here


def test_says_what_it_does_not_know(tmp_path) -> None:
    runs = served({"base": "fcfs"}, load(40))
    path = log_of(tmp_path / "events.jsonl", runs, steps=[])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    late = {"request": "late", "time": START + 99, "from": None, "state": "queued"}
    lines += [lines[1] | late, lines[2] | {"request": "older"}]
    for line in lines[3:5]:
        line["level_from"] = "default"
    path.write_text("not a line\n" + "".join(json.dumps(line) + "\n" for line in lines))
    answer = replay(read_log(path)[0], {"tiers": load_policy("tiers")})
    text = "\n".join(answer.notes)
    assert "too few timed steps" in text and "1 older than the log, 1 unfinished" in text
    assert "Fewer than 30 requests: level 0, 1, 2, 3, 4" in text
    assert "1 requests have neither hint nor prediction" in text
    assert "tiers has 3 levels" in text and "clients that would" in text


@pytest.mark.parametrize(
    ("on_arrival", "at_the_end", "hint"),
    [
        ("hint", "hint", 0),
        ("service_tier", "service_tier", 0),
        ("session", "session", 0),
        ("session", "prediction", None),
        ("default", "default", None),
    ],
)
def test_levels_that_no_text_decides_are_replayed(tmp_path, on_arrival, at_the_end, hint) -> None:
    path = log_of(tmp_path / "events.jsonl", served({"base": "fcfs"}, load(1)))
    engine, arrival, end = (json.loads(line) for line in path.read_text().splitlines())
    arrival |= {"level": 0, "level_from": on_arrival}
    end["level_from"] = at_the_end
    path.write_text("".join(json.dumps(line) + "\n" for line in (engine, arrival, end)))
    [request] = read_log(path)[0].requests
    assert request.request.hint == hint


def test_log_without_requests_is_unusable(tmp_path, capsys) -> None:
    path = log_of(tmp_path / "events.jsonl", [])
    with pytest.raises(UnusableLog, match="no finished requests"):
        read_log(path)
    assert main(["whatif", str(path), "--policy", "ems"]) == 2
    assert main(["whatif", str(tmp_path / "none"), "--policy", "ems"]) == 1
    assert main(["whatif", str(path), "--policy", "no-such"]) == 2
    assert "no-such" in capsys.readouterr().err
    assert main(["whatif", str(path), *(["--policy", "ems"] * 6)]) == 2
    assert "6 policies; at most 5" in capsys.readouterr().err


def test_tables_fit_100_columns_and_files_are_written(log, tmp_path, capsys) -> None:
    names = ("ems", "tiers", "sjf", "priority", "latency")
    given = [word for name in names for word in ("--policy", name)]
    assert main(["whatif", str(log), *given, "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    body = out[: out.index("written:")]
    assert max(map(len, body.splitlines())) <= 100
    heading = r"p99 time to first token, s; engine 0: 120 requests in 6\.\d\d? s"
    assert re.search(heading, " ".join(body.split()))
    assert "ems: level 0 p99 TTFT" in body and "ttft_p99" not in body
    assert body.startswith("Check: "), "before the figures"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<title>semsched whatif: replay of events.jsonl under ems, tiers, sjf," in page
    assert "ttft_p99" not in page.partition("Configuration and versions")[0]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "results.csv", "results.json", "report.html",
    }  # fmt: skip


def test_step_times_follow_the_measured_ones() -> None:
    log = EngineLog(facts={"profile": PROFILE.model_dump(exclude_none=True)})
    from vllm_semantic_sched.lab import whatif

    log.steps = list(whatif._steps(steps(TRUTH)))
    profile, fitted = whatif._profile(log)
    assert fitted
    for step in log.steps:
        assert profile.step(step.batch) == pytest.approx(TRUTH.step(step.batch), rel=0.03)
