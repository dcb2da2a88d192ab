"""Plans, rounds, picture and file of a comparison, without a server."""

import json
from collections import namedtuple
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_results import (
    IDLE_PACE,
    add_fake_round,
    fake_comparison,
    fake_idle,
    fake_records,
    fake_usage,
    fake_workload,
)
from rich.console import Console

from vllm_semantic_sched.lab.bench import compare as comparing
from vllm_semantic_sched.lab.bench.client import LoadClient, Progress, Record
from vllm_semantic_sched.lab.bench.command_line import print_summary
from vllm_semantic_sched.lab.bench.compare import RunPlan, compare, idle_sample
from vllm_semantic_sched.lab.bench.device_use import LABEL
from vllm_semantic_sched.lab.bench.metrics import Difference
from vllm_semantic_sched.lab.bench.page import draw_comparison, figures_of_picture
from vllm_semantic_sched.lab.bench.results import MixResult, Round
from vllm_semantic_sched.lab.bench.schedulers import NAMES, end_token, parse_schedulers
from vllm_semantic_sched.lab.bench.server import PREDICTOR, ServerConfig, process_title
from vllm_semantic_sched.lab.bench.usage import STEPS, Usage, read_counters

WORKLOAD = fake_workload()
PACES = dict(zip(NAMES, (1.0, 0.3, 0.15, 0.1, 0.1), strict=True))


@pytest.fixture
def comparison():
    return fake_comparison(WORKLOAD, PACES)


@pytest.fixture
def plan(tmp_path) -> RunPlan:
    return RunPlan(
        ServerConfig(Path(), Path()), parse_schedulers("fcfs,priority,semantic-true", None),
        [WORKLOAD, fake_workload(mix="rare")], tmp_path, overload=None, rounds=3,
    )  # fmt: skip


def rounds(*settings):
    """A scheduler with a round for each (steal, engine CPU seconds, seconds per token)."""
    row = MixResult(parse_schedulers("fcfs", None)[0], WORKLOAD)
    for number, (steal, seconds, pace) in enumerate(settings, start=1):
        usage = fake_usage(steal=steal, engine_seconds=seconds)
        row.rounds.append(Round(number, fake_records(WORKLOAD, pace), usage=usage))
    return row


def test_best_round_has_the_least_steal_then_the_least_cpu_time():
    assert rounds((0.04, 1.0, 0.1), (0.01, 9.0, 0.3)).best.number == 2
    assert rounds((0.011, 2.0, 0.1), (0.009, 3.0, 0.1)).best.number == 1  # 1 % each


def test_steal_on_the_idle_engine_counts_too():
    done = Round(1, [], usage=fake_usage(0.01), idle_usage=fake_usage(0.2))
    assert done.steal == 0.2 and not done.calm


def test_means_are_of_the_best_round_and_p99_of_all_calm_ones():
    row = rounds((0.0, 1.0, 0.1), (0.01, 1.0, 0.3), (0.5, 1.0, 9.0))
    ttft = row.levels["all"]["ttft"]
    assert (ttft.mean, ttft.count, ttft.tail_count) == (pytest.approx(0.1), 20, 40)
    assert ttft.p99 == pytest.approx(0.3)
    assert row.requests == 60  # failures are counted in every round
    only_noisy = rounds((0.5, 1.0, 9.0), (0.6, 1.0, 0.1))
    assert only_noisy.levels["all"]["ttft"].tail_count == 20


def test_figures_of_a_round(comparison):
    tokens = WORKLOAD.output_tokens
    done = Round(
        1,
        fake_records(WORKLOAD, 0.1),
        idle=fake_idle(WORKLOAD),
        usage=fake_usage(engine_seconds=3.0, counters={STEPS: 50.0}, elsewhere=0.25),
    )
    assert done.engine_seconds_per_1000 == pytest.approx(3000 / tokens)
    assert done.steps_per_1000 == pytest.approx(50_000 / tokens)
    assert done.usage.elsewhere == pytest.approx(0.25)
    assert done.idle_ratio == pytest.approx(0.1 / IDLE_PACE)


def test_idle_ratio_compares_the_same_requests():
    urgent = [record for record in fake_idle(WORKLOAD) if record.level == 0]
    alone, slow = urgent[:2], {record.index for record in urgent[2:]}
    records = fake_records(WORKLOAD, lambda request: 9.0 if request.index in slow else 0.1)
    assert Round(1, records, idle=alone).idle_ratio == pytest.approx(0.1 / IDLE_PACE)
    failed = [replace(record, error="refused") for record in records]
    assert Round(1, failed, idle=alone).idle_ratio != pytest.approx(2.0)


def test_natural_answer_length_is_the_first_schedulers(plan, comparison):
    natural = replace(WORKLOAD, config=replace(WORKLOAD.config, natural=True))
    for record in comparison.reference(WORKLOAD.config.mix).records:
        record.output_tokens = 7 + record.index
    run = comparing._Run(plan, comparison, Progress())
    known, told = parse_schedulers("semantic-known,semantic-true", None)
    lengths = [one.output_tokens for one in run._told(known, natural)]
    assert lengths == [7 + index for index in range(len(lengths))]
    assert run._told(told, natural) == natural.requests
    assert run._told(known, WORKLOAD) == WORKLOAD.requests


def test_slow_machine_gets_fewer_requests_within_the_minutes(plan, comparison, monkeypatch):
    """Three schedulers, two mixes and three rounds: 18 runs."""
    many = [fake_workload(200), fake_workload(200, mix="rare")]
    plan = replace(plan, workloads=many, overload=4.0)
    tokens = many[0].output_tokens / 200

    def sizes(per_second: float, minutes: float | None) -> list[int]:
        """With so many requests per second."""
        monkeypatch.setattr(comparing._Run, "_capacity", lambda *_: per_second * tokens)
        run = comparing._Run(replace(plan, minutes=minutes), comparison, Progress())
        return [len(workload.requests) for workload in run._set_pace(None)]

    assert sizes(10.0, None) == sizes(1000.0, 3.0) == [200, 200]
    assert sizes(10.0, 3.0)[0] == 100  # 1,800 in three minutes, by 18
    assert sizes(1.0, 3.0) == [40, 40]
    with pytest.raises(ValueError, match="minutes must be above 0"):
        replace(plan, minutes=0.0)


def test_idle_sample_has_urgent_requests_of_all_lengths():
    requests = fake_workload(200).requests
    sample = idle_sample(requests)
    assert sum(request.level == 0 for request in sample) == 24
    others = [len(request.text) for request in sample if request.level > 0]
    assert others == sorted(others) and len(others) == 4
    assert others[-1] == max(len(request.text) for request in requests if request.level > 0)
    assert len({request.index for request in sample}) == 28


def test_latest_send_is_the_largest_of_all_rounds():
    record = Record(0, 0, "", 1, arrival=1.0)
    row = MixResult(parse_schedulers("fcfs", None)[0], WORKLOAD)
    for number, sent in enumerate((1.5, 1.2), start=1):
        row.rounds.append(Round(number, [replace(record, sent=sent)]))
    assert row.latest_send == 0.5
    assert row.best.tokens_per_second == 0.0  # nothing finished


def test_every_second_round_is_reversed(plan):
    names = ["".join(v.leader.name[0] for v in plan.visits(number)) for number in (1, 2, 3)]
    assert names == ["fps", "spf", "fps"]
    for wrong in ({"rounds": 0}, {"repeats": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong)).rstrip("s")):
            replace(plan, **wrong)


def test_quick_comparison_shares_one_server(plan):
    names = "fcfs,semantic,priority,semantic-true,semantic@sjf"
    quick = replace(plan, schedulers=parse_schedulers(names, "ems"), quick=True)
    groups = [(v.leader.name, [spec.name for spec in v.specs]) for v in quick.visits(1)]
    assert groups == [
        ("priority", ["fcfs", "priority"]),
        ("semantic", ["semantic", "semantic-true"]),
        ("semantic@sjf", ["semantic@sjf"]),
    ]
    assert [v.leader.name for v in quick.visits(2)] == ["semantic@sjf", "semantic", "priority"]
    # Requests of one server keep their own ids, and no KV is shared between schedulers.
    first, second = parse_schedulers("semantic,semantic-true", "ems")
    assert first.request_id("even", 3) != second.request_id("even", 3)


@pytest.mark.parametrize(("quick", "starts", "idle"), [(False, 3, 6), (True, 2, 2)])
def test_quick_comparison_measures_the_idle_engine_once_per_mix(
    plan, monkeypatch, quick, starts, idle
):
    log, measured, salts = [], [], set()

    class FakeServer:
        url = ""

        def __init__(self, config):
            self.config = config
            self.launch, self.stop = partial(log.append, "launch"), partial(log.append, "stop")

        def __enter__(self):
            log.append("use")
            return self

        def __exit__(self, *error): ...

        def check(self): ...

    def send(client, requests, label="", stop_after=None):
        salts.update(client.extras(one).get("cache_salt") for one in requests)
        return fake_records(WORKLOAD, 0.1)

    def alone(client, workload, label, quick):
        measured.append(label)
        return fake_idle(WORKLOAD)

    monkeypatch.setattr(comparing, "VllmServer", FakeServer)
    monkeypatch.setattr("vllm_semantic_sched.lab.bench.schedulers.end_token", lambda model: 2)
    monkeypatch.setattr(comparing.Usage, "now", lambda server: fake_usage())
    monkeypatch.setattr(LoadClient, "send", send)
    monkeypatch.setattr(comparing, "measure_idle", alone)
    monkeypatch.setattr(comparing, "prefer_client", lambda nice: None)
    found = compare(replace(plan, rounds=1, quick=quick), {}, Progress())
    assert (log.count("use"), len(measured)) == (starts, idle)
    # Without a GPU the servers of a quick comparison start together.
    together = starts if quick and not comparing.has_gpu() else 0
    assert log == ["launch"] * together + ["use"] * starts + ["stop"] * together
    assert all(row.best.idle_ratio > 0 for row in found.rows()) and len(list(found.rows())) == 6
    assert salts == {None, "fcfs", "priority", "semantic-true"}  # None: the warm-up


def test_summary_fits_a_terminal_and_names_every_scheduler(comparison):
    rows = comparison.mixes["even"]
    console = Console(width=100, record=True, file=StringIO())
    print_summary(console, "even", rows, LABEL)
    printed = console.export_text()
    assert LABEL in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 100
    for row in rows.values():
        assert row.scheduler.title[:12] in printed


class NoisyRun:
    """Serves nothing; the first two visits of `priority` lose time in the mix `rare`."""

    visits: list

    def __init__(self, plan, comparison, progress):
        self.comparison = comparison

    def server(self, visit): ...

    def serve(self, visit, server):
        NoisyRun.visits.append(visit)
        noisy = visit.leader.name == "priority" and visit.attempt <= 2
        return tuple(mix for mix in visit.mixes if noisy and mix == "rare")


@pytest.mark.parametrize(("repeats", "starts"), [(0, "fps"), (1, "fpsp"), (2, "fpspp")])
def test_noisy_mixes_are_repeated_at_the_end_of_the_round(plan, monkeypatch, repeats, starts):
    NoisyRun.visits = []
    monkeypatch.setattr(comparing, "_Run", NoisyRun)
    monkeypatch.setattr(comparing, "prefer_client", lambda nice: None)
    compare(replace(plan, rounds=1, repeats=repeats), {}, Progress())
    made = NoisyRun.visits
    assert "".join(visit.leader.name[0] for visit in made) == starts
    assert [v.mixes for v in made] == [("even", "rare")] * 3 + [("rare",)] * (len(made) - 3)
    assert [v.name for v in made[3:]] == ["1.2", "1.3"][: len(made) - 3]


def test_picture_and_file_are_written(comparison, tmp_path):
    draw_comparison(comparison, tmp_path / "p.png")
    shown = figures_of_picture(tmp_path / "p.png")
    rows = comparison.mixes["even"]
    assert shown == {"even": {name: f"{row.p99_ttft():.3g}" for name, row in rows.items()}}
    comparison.write(tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())
    row = document["mixes"]["even"]["semantic-true"]
    assert len(row["rounds"][0]["records"]) == 20
    assert len(row["rounds"][0]["idle_records"]) == 8
    assert row["idle_levels"]["0"]["ttft"]["mean"] == pytest.approx(IDLE_PACE)
    assert document["environment"]["cores"] >= 1


def test_file_has_every_round_marked(tmp_path):
    made = fake_comparison(WORKLOAD, {})
    for number, (pace, steal) in enumerate(((0.1, 0.5), (0.3, 0.01), (0.2, 0.02)), start=1):
        add_fake_round(
            made, WORKLOAD, "fcfs", pace, number,
            usage=fake_usage(steal), differences=[Difference(number, 0)],
        )  # fmt: skip
    row = made.mixes["even"]["fcfs"]
    assert made.reference("even") is row.rounds[0]
    assert [difference.index for difference in row.counted_differences] == [1, 2, 3]
    made.write(tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())["mixes"]["even"]["fcfs"]
    marks = [[one[key] for key in ("calm", "counted", "best")] for one in document["rounds"]]
    assert marks == [[False, False, False], [True, True, True], [True, True, False]]
    assert document["tokens_per_second"] == row.rounds[1].tokens_per_second
    assert len(document["rounds"][0]["records"]) == 20


def test_misread_requests_are_listed_with_their_text(tmp_path):
    made = fake_comparison(WORKLOAD, {})
    records = fake_records(WORKLOAD, 0.1)
    urgent = [record for record in records if record.level == 0]
    for record, read in zip(urgent, (0, 3, None), strict=False):
        record.read_level = read
    spec = parse_schedulers("semantic", None)[0]
    made.add(spec, WORKLOAD, Round(1, records))
    made.write(tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())["mixes"]["even"]["semantic"]
    (found,) = document["misread"]
    assert found["text"] == WORKLOAD.requests[urgent[1].index].text
    assert (found["level"], found["read_level"]) == (0, 3)


def test_request_body_hides_the_length_from_the_scheduler():
    request = WORKLOAD.requests[0]
    body = LoadClient("http://x", eos_token=2, max_tokens=500).request_body(request)
    assert body["max_tokens"] == 500
    assert body["vllm_xargs"] == {"bench_answer": [request.output_tokens, 2]}
    known = {"min_tokens", "logit_bias", "ignore_eos", "stop", "structured_outputs"}
    assert not known & set(body)


def test_extras_are_added_to_the_clients_own_fields():
    request = WORKLOAD.requests[0]
    (spec,) = parse_schedulers("semantic-known", None)
    body = LoadClient("http://x", 2, 500, spec.body_extras).request_body(request)
    assert body["vllm_xargs"] == {
        "bench_answer": [request.output_tokens, 2],
        "urgency": request.level,
    }
    assert (body["ignore_eos"], body["max_tokens"]) == (True, request.output_tokens)


def test_prompt_may_be_given_as_tokens():
    request = WORKLOAD.requests[0]
    client = LoadClient("http://x", 2, 500, lambda one: {"prompt": [7, one.index]})
    assert client.request_body(request)["prompt"] == [7, request.index]
    assert LoadClient("http://x", 2, 500).request_body(request)["prompt"] == request.text


def test_counters_are_summed_over_labels():
    text = (
        '# HELP x\nvllm:num_preemptions_total{engine="0"} 3.0\n'
        'vllm:num_preemptions_total{engine="1"} 4.0\nsemsched:errors_total 1.0\nother 9.0\n'
        'vllm:iteration_tokens_total_count{engine="0"} 12.0\n'
        'vllm:iteration_tokens_total_bucket{le="1.0"} 5.0\n'
    )
    expected = {"vllm:num_preemptions_total": 7.0, "semsched:errors_total": 1.0, STEPS: 12.0}
    assert read_counters(text) == expected


def test_steal_is_neither_idle_time_nor_used_by_programs(monkeypatch):
    times = namedtuple("times", "user system idle iowait steal guest")
    monkeypatch.setattr("psutil.cpu_times", lambda: times(30.0, 10.0, 40.0, 5.0, 15.0, 9.0))
    server = SimpleNamespace(
        cpu_seconds=lambda: {"VLLM::EngineCore": 7.0}, get_text=lambda path: ""
    )
    usage = Usage.now(server)
    assert (usage.total, usage.busy, usage.stolen) == (100.0, 40.0, 15.0)
    assert usage.engine_seconds == 7.0


def test_usage_between_two_moments():
    before = fake_usage(counters={"a": 1.0})
    after = replace(fake_usage(0.5, counters={"a": 5.0}, elsewhere=0.2), total=200.0)
    added = after.since(before)
    assert added.counters == {"a": 4.0}
    assert (added.steal, added.elsewhere) == (pytest.approx(0.5), pytest.approx(0.2))


def test_model_without_end_token_raises(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="eos_token_id"):
        end_token(tmp_path)


def test_processes_are_named_after_their_module_or_program():
    assert process_title(["/usr/bin/python", "-m", PREDICTOR, "--threads", "1"]) == PREDICTOR
    assert process_title(["VLLM::EngineCore"]) == "VLLM::EngineCore"
    assert process_title(["/usr/bin/python", "script.py"]) == "python"
    assert process_title([]) == ""
