"""The HTML page of a comparison, without a server."""

import json

import pytest
from fake_results import fake_comparison, fake_records, fake_usage, fake_workload
from html_pages import read_page

from vllm_semantic_sched.lab.bench.device_use import LABEL, DeviceUse
from vllm_semantic_sched.lab.bench.page import comparison_page
from vllm_semantic_sched.lab.bench.results import Round
from vllm_semantic_sched.lab.bench.schedulers import parse_schedulers
from vllm_semantic_sched.lab.report.page import write_page

WORKLOAD = fake_workload()
WAITING = "Mix even: mean normalized waiting time [ms/token]"


def _event(time, request, state, before, **more) -> str:
    head = {"time": 100.0 + time, "engine": 0, "request": f"cmpl-{request}-0-1a2b3c4d"}
    line = head | {"tier": "t", "level": 2, "from": before, "state": state}
    return json.dumps(line | more) + "\n"


def _story(request: str, start: float) -> list[str]:
    return [
        _event(start, request, "queued", None),
        _event(start + 1.0, request, "running", "queued"),
        _event(start + 3.0, request, "completed", "running", first_token=101.5),
    ]


@pytest.fixture
def page(tmp_path):
    found = fake_comparison(WORKLOAD, {"fcfs": 1.0, "semantic": 0.1})
    misread = fake_records(WORKLOAD, 0.1)
    next(record for record in misread if record.level == 0).read_level = 3
    found.add(parse_schedulers("semantic", "ems")[0], WORKLOAD, Round(1, misread))
    log = found.mixes["even"]["semantic"].scheduler.events_file(tmp_path, "1")
    lines = [*_story("warm-up", 0.0), *_story("semantic.even-0", 10.0)]
    lines += [*_story("semantic.rare-0", 20.0), *_story("semantic-true.even-0", 30.0)]
    log.write_text("".join(lines))
    found.options = {"seed": 7, "run": print}
    return read_page(write_page(comparison_page(found, tmp_path), tmp_path))


def test_levels_have_a_bar_and_a_table_with_a_row_per_scheduler(page):
    fcfs, spread, semantic, idle = page.charts[WAITING]  # FCFS's waits are equal: no range
    assert len(spread["top"]) > 0
    assert fcfs["y"] == pytest.approx([1000.0] * 6) and semantic["y"][0] == pytest.approx(100.0)
    assert idle["y"] == pytest.approx([50.0] * 2)
    (title,) = (name for name in page.tables if name.startswith("Mix even: level 0"))
    cells = {row[0]: row[4] for row in page.tables[title]}
    waits = {name: cell.split()[0] for name, cell in cells.items()}
    assert waits["vLLM FCFS"] == "1000" and waits["idle engine"] == "50.00"
    levels = [name for name in page.tables if name.startswith("Mix even: level")]
    assert len(levels) == 5 and any(name.startswith("Mix even: all levels") for name in page.tables)


def test_seats_come_first_beside_fcfs_and_nothing_empty_is_shown(page, tmp_path):
    charts = [*page.charts]
    assert charts[:2] == [
        "Mix even, vLLM FCFS: seats in the best round",
        "Mix even, Semantic (text): seats in the best round",
    ]
    assert "In brackets: compared with vLLM FCFS." in page.text
    assert len(page.tables["Mix even: by level"][0]) <= 10
    all_read = fake_comparison(WORKLOAD, {"fcfs": 1.0, "semantic": 0.1})
    page = read_page(write_page(comparison_page(all_read, tmp_path), tmp_path))
    assert not any("read as less urgent" in title for title in page.tables)


def test_totals_rounds_and_misread_requests_are_listed(page):
    _, first, second = page.tables["Mix even: totals"]
    assert (first[0], first[1]) == ("vLLM FCFS", "20/20") and second[1] == "40/40"  # two rounds
    assert len(page.tables["Mix even: rounds"]) == 4
    (_, row) = page.tables["Mix even, Semantic (text): 1 of level 0 read as less urgent"]
    assert row[1] == "3" and row[2] == WORKLOAD.requests[int(row[0])].text
    assert "seed: 7" in page.text and "function" not in page.text


def test_emulated_device_is_named_wherever_its_figures_are(tmp_path):
    found = fake_comparison(WORKLOAD, {})
    records = fake_records(WORKLOAD, 0.1)
    used = Round(1, records, usage=fake_usage(), device=DeviceUse(1080.0, 0.004, 0.0015, 0.003))
    found.add(parse_schedulers("fcfs", None)[0], WORKLOAD, used)
    assert LABEL not in comparison_page(found, tmp_path).title
    found.options = {"device": "a100"}
    page = read_page(write_page(comparison_page(found, tmp_path), tmp_path))
    assert page.text.count(LABEL) >= 2
    (title,) = (name for name in page.tables if LABEL in name)
    assert page.tables[title][1][:5] == ["vLLM FCFS", "1080", "0.4", "1.500", "3.000"]
    assert page.tables[title][1][-1] == "-"  # no predictor
    found.write(tmp_path / "results.json")
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["label"] == LABEL
    assert document["mixes"]["even"]["fcfs"]["rounds"][0]["device"]["tokens"] == 1080.0


def test_seats_are_those_of_the_mix_from_its_first_arrival_on(page):
    assert page.labels("Mix even, Semantic (text): seats in the best round") == [
        "request even-0, level 2: waiting from 0.000 to 1.000 s",
        "request even-0, level 2: running from 1.000 to 3.000 s",
        "request even-0, level 2: finish at 3.000 s",
        "request even-0, level 2: arrives at 0.000 s",
    ]
    assert "1 of 20 requests are shown" in page.text
