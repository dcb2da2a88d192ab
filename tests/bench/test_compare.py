"""Results, targets, picture and file of a comparison, without a server."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_results import IDLE, add_fake_round, fake_comparison, fake_workload

from vllm_semantic_sched.bench.client import LoadClient, Record
from vllm_semantic_sched.bench.compare import RunPlan, end_token, read_counters
from vllm_semantic_sched.bench.metrics import Difference
from vllm_semantic_sched.bench.plots import draw_comparison
from vllm_semantic_sched.bench.results import MixResult, Round
from vllm_semantic_sched.bench.schedulers import NAMES, parse_schedulers
from vllm_semantic_sched.bench.server import PREDICTOR, ServerConfig, process_title
from vllm_semantic_sched.bench.targets import check_targets

WORKLOAD = fake_workload()


@pytest.fixture
def comparison():
    return fake_comparison(WORKLOAD, dict(zip(NAMES, (1.0, 0.3, 0.15, 0.1), strict=True)))


def test_targets_compare_schedulers_of_the_same_mix(comparison):
    targets = {target.text: target for target in check_targets(comparison.mixes)}
    urgent = targets["even: urgency 0, mean normalized_waiting, fcfs / semantic-true"]
    assert urgent.measured == pytest.approx(10.0)
    assert targets["even: urgency 0, mean normalized_waiting, fcfs / semantic"].met
    assert targets["even: urgency 0, mean normalized_waiting, priority / semantic-true"].met
    assert not any("rare" in text for text in targets)


def test_a_slower_scheduler_misses_targets():
    made = fake_comparison(WORKLOAD, {"fcfs": 0.1, "semantic": 0.2})
    missed = [target.text for target in check_targets(made.mixes) if not target.met]
    assert "even: all levels, mean normalized_waiting, fcfs / semantic" in missed
    assert "even: output tokens per second, semantic / fcfs" in missed


def test_rounds_are_pooled_by_tokens_and_seconds(tmp_path):
    made = fake_comparison(WORKLOAD, {})
    for number, (pace, moved) in enumerate(((0.1, 3.0), (0.3, 4.0)), start=1):
        add_fake_round(
            made, WORKLOAD, "fcfs", pace, number,
            counters={"moves": moved}, cpu_seconds={"client": moved},
            machine_seconds=10.0, elsewhere_seconds=moved, differences=[Difference(number, 0)],
        )  # fmt: skip
    row = made.mixes["even"]["fcfs"]
    fast, slow = (done.tokens_per_second for done in row.rounds)
    assert slow < fast / 2
    # The same tokens in each round: the pooled rate is the harmonic mean, not the mean.
    assert row.tokens_per_second == pytest.approx(2 / (1 / fast + 1 / slow))
    assert row.levels["all"]["ttft"].mean == pytest.approx(0.2)
    assert row.levels["all"]["ttft"].count == row.requests == 40
    assert (row.counters["moves"], row.cpu_seconds["client"], row.elsewhere) == (7.0, 7.0, 0.35)
    assert [difference.index for difference in row.counted_differences] == [1, 2]
    assert made.reference("even") is row.rounds[0]

    made.write(tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())["mixes"]["even"]["fcfs"]
    assert [item["tokens_per_second"] for item in document["rounds"]] == [fast, slow]
    assert [record["round"] for record in document["records"]] == [1] * 20 + [2] * 20


def test_latest_send_is_the_largest_of_all_rounds():
    record = Record(0, 0, "", 1, arrival=1.0)
    row = MixResult(parse_schedulers("fcfs", None)[0], WORKLOAD)
    for number, sent in enumerate((1.5, 1.2), start=1):
        row.add(Round(number, [replace(record, sent=sent)]), IDLE)
    assert row.latest_send == 0.5
    assert row.tokens_per_second == 0.0  # nothing finished


def test_every_second_round_is_reversed():
    plan = RunPlan(
        ServerConfig(Path(), Path()), parse_schedulers("fcfs,priority,semantic", None),
        [WORKLOAD], Path(), overload=None, eos_token=2, rounds=3,
    )  # fmt: skip
    names = [(number, spec.name[0]) for number, spec in plan.servers()]
    assert names == [(1, "f"), (1, "p"), (1, "s"), (2, "s"), (2, "p"), (2, "f"),
                     (3, "f"), (3, "p"), (3, "s")]  # fmt: skip
    with pytest.raises(ValueError, match="round"):
        replace(plan, rounds=0)


def test_picture_and_file_are_written(comparison, tmp_path):
    draw_comparison(comparison, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    comparison.write(tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())
    row = document["mixes"]["even"]["semantic-true"]
    assert len(row["records"]) == 20
    assert document["environment"]["cores"] >= 1


def test_request_body_enforces_length_without_stating_it():
    request = WORKLOAD.requests[0]
    body = LoadClient("http://x", eos_token=2, max_tokens=500).request_body(request)
    assert body["max_tokens"] == 500
    assert body["min_tokens"] == request.output_tokens - 1
    assert body["logit_bias"] == {"2": 100}


def test_request_bodies_state_urgency_only_to_priority_and_hint_schedulers():
    request = WORKLOAD.requests[0]
    extras = {s.name: dict(s.body_extras(request)) for s in parse_schedulers(",".join(NAMES), None)}
    assert extras == {
        "fcfs": {},
        "priority": {"priority": request.level},
        "semantic": {},
        "semantic-true": {"vllm_xargs": {"urgency": request.level}},
    }


def test_scheduler_names_are_parsed_and_invalid_ones_raise():
    specs = parse_schedulers("semantic,semantic@sjf", "ems")
    assert '"policy": "ems"' in specs[0].server_args()[-1]
    assert '"policy": "sjf"' in specs[1].server_args()[-1]
    for bad in ("unknown", "fcfs@sjf", "fcfs,fcfs"):
        with pytest.raises(ValueError):
            parse_schedulers(bad, None)


def test_only_semantic_schedulers_get_profile_and_host_memory():
    stock, ours = parse_schedulers("fcfs,semantic", "ems", profile="mine.yaml", host_gib=0.5)
    assert stock.server_args() == ()
    config, connector = ours.server_args()[3::2]
    assert json.loads(config) == {"semantic_sched": {"policy": "ems", "profile": "mine.yaml"}}
    assert json.loads(connector)["kv_connector_extra_config"] == {"host_gib": 0.5}
    assert "--kv-transfer-config" not in parse_schedulers("semantic", "ems")[0].server_args()


def test_counters_are_summed_over_labels():
    text = (
        '# HELP x\nvllm:num_preemptions_total{engine="0"} 3.0\n'
        'vllm:num_preemptions_total{engine="1"} 4.0\nsemsched:errors_total 1.0\nother 9.0\n'
    )
    assert read_counters(text) == {"vllm:num_preemptions_total": 7.0, "semsched:errors_total": 1.0}


def test_model_without_end_token_raises(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="eos_token_id"):
        end_token(tmp_path)


def test_processes_are_named_after_their_module_or_program():
    assert process_title(["/usr/bin/python", "-m", PREDICTOR, "--threads", "1"]) == PREDICTOR
    assert process_title(["VLLM::EngineCore"]) == "VLLM::EngineCore"
    assert process_title(["/usr/bin/python", "script.py"]) == "python"
    assert process_title([]) == ""


def test_log_names_have_no_slashes(tmp_path):
    (spec,) = parse_schedulers("semantic@a/b.yaml", None)
    config = spec.configure(ServerConfig(tmp_path, tmp_path / "x"), tmp_path, 2)
    assert config.log == tmp_path / "server-semantic-a-b.yaml-2.log"
    assert config.scheduler_args == spec.server_args()
