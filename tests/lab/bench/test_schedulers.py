"""Names, arguments and requests of the schedulers, and what they read from the texts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_results import fake_workload

import vllm_semantic_sched
from vllm_semantic_sched.lab.bench.schedulers import NAMES, client_id, parse_schedulers, read_levels
from vllm_semantic_sched.lab.bench.server import ServerConfig
from vllm_semantic_sched.lab.bench.workload import ANSWER_FIELD
from vllm_semantic_sched.lab.device.settings import device_settings
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.core import SchedulingCore

WORKLOAD = fake_workload()


def test_bodies_state_urgency_only_to_schedulers_told_it():
    request = WORKLOAD.requests[0]
    extras = {s.name: dict(s.body_extras(request)) for s in parse_schedulers(",".join(NAMES), None)}
    hint = {"vllm_xargs": {"urgency": request.level}}
    assert extras == {
        "fcfs": {},
        "priority": {"priority": request.level},
        "semantic": {},
        "semantic-true": hint,
        "semantic-known": {**hint, "ignore_eos": True, "max_tokens": request.output_tokens},
    }


def test_semantic_schedulers_are_told_the_tenant():
    request = replace(WORKLOAD.requests[0], tenant="a")
    extras = {s.name: dict(s.body_extras(request)) for s in parse_schedulers(",".join(NAMES), None)}
    assert extras["fcfs"] == {} and extras["priority"] == {"priority": request.level}
    assert extras["semantic"] == {"vllm_xargs": {"tenant": "a"}}
    assert extras["semantic-true"] == {"vllm_xargs": {"tenant": "a", "urgency": request.level}}


def test_no_scheduler_reads_the_hidden_length():
    package = Path(vllm_semantic_sched.__file__).parent
    assert SchedulingCore  # the package that is searched is the one under test
    for part in ("policy", "engine", "predict"):
        for source in (package / part).rglob("*.py"):
            text = source.read_text()
            assert ANSWER_FIELD not in text and "answer_length" not in text, source
            assert "ANSWER_FIELD" not in text, source


def test_scheduler_names_are_parsed_and_invalid_ones_raise():
    specs = parse_schedulers("semantic,semantic@sjf,semantic-true@a/no-holds.yaml", "ems")
    assert '"policy": "ems"' in specs[0].server_args()[-1]
    assert '"policy": "sjf"' in specs[1].server_args()[-1]
    assert [spec.variant for spec in specs] == ["", "sjf", "no-holds"]
    assert specs[2].title == "Semantic (hint) @no-holds"
    for bad in ("unknown", "fcfs@sjf", "fcfs,fcfs"):
        with pytest.raises(ValueError):
            parse_schedulers(bad, None)


def test_only_semantic_schedulers_get_profile_and_host_memory():
    stock, ours = parse_schedulers("fcfs,semantic", "ems", profile="mine.yaml", host_gib=0.5)
    assert stock.server_args() == ()
    config, connector = ours.server_args()[5::2]
    assert json.loads(config) == {"semantic_sched": {"policy": "ems", "profile": "mine.yaml"}}
    assert json.loads(connector)["kv_connector_extra_config"] == {"host_gib": 0.5}
    assert "--kv-transfer-config" not in parse_schedulers("semantic", "ems")[0].server_args()


def test_emulated_device_is_used_under_every_scheduler(tmp_path):
    base = ServerConfig(tmp_path, tmp_path / "x", device={"profile": "h100-8b", "kv_gib": 4.0})
    for spec in parse_schedulers("fcfs,priority,semantic-true", "ems", "h100-8b", host_gib=0.5):
        config = spec.configure(base, tmp_path, "2")
        command = config.command(1)
        assert command[1:4] == ["-m", "vllm_semantic_sched.lab.device.serve", "serve"]
        assert "--logits-processors" not in command and "--kv-cache-memory-bytes" not in command
        assert command.count("--additional-config") == 1
        settings = json.loads(command[command.index("--additional-config") + 1])
        steps = str(tmp_path / f"steps-{spec.name}-2.jsonl")
        assert settings["emulated_device"] == {**base.device, "trace": steps} == config.device
        assert ("semantic_sched" in settings) == spec.is_ours
    assert device_settings(settings).kv_gib == 4.0


def test_log_names_have_no_slashes(tmp_path):
    (spec,) = parse_schedulers("semantic-true@a/b.yaml", None)
    config = spec.configure(ServerConfig(tmp_path, tmp_path / "x"), tmp_path, "2")
    assert config.log == tmp_path / "server-semantic-true-a-b.yaml-2.log"
    assert config.scheduler_args == spec.server_args()


def test_all_servers_enforce_the_length_in_the_same_way(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for spec in parse_schedulers(",".join(NAMES), None):
        command = spec.configure(ServerConfig(tmp_path, tmp_path / "x"), tmp_path).command(1)
        place = command.index("--logits-processors")
        assert command[place + 1] == "vllm_semantic_sched.lab.bench.answer_length:AnswerLength"


def test_scheduler_that_reads_texts_logs_its_levels(tmp_path):
    (spec,) = parse_schedulers("semantic", "tiers")
    log = spec.events_file(tmp_path, "1.2")
    log.write_text("an earlier run\n")
    config = spec.configure(ServerConfig(tmp_path, tmp_path / "x"), tmp_path, "1.2")
    settings = json.loads(config.scheduler_args[-1])["semantic_sched"]
    policy = load_policy(settings["policy"])
    assert policy.events.path == str(log)
    assert policy.model_copy(update={"events": load_policy("tiers").events}) == load_policy("tiers")
    assert not log.exists()


def test_last_predicted_level_of_a_request_counts(tmp_path):
    def event(request, level, source):
        return json.dumps({"request": request, "level": level, "level_from": source})

    log = tmp_path / "events.jsonl"
    log.write_text(
        "\n".join(
            [
                event("cmpl-even-7-0-1234abcd", 2, "default"),
                event("cmpl-even-7-0-1234abcd", 3, "prediction"),
                event("cmpl-even-7-0-1234abcd", 0, "prediction"),
                event("cmpl-1:2:3:2:2-11-0-00000000", 4, "prediction"),
                event("cmpl-even-8-0-99999999", 1, "hint"),
            ]
        )
    )
    assert read_levels(log) == {"even-7": 0, "1:2:3:2:2-11": 4}
    assert read_levels(tmp_path / "none") == {}


@pytest.mark.parametrize(
    "engine_id", ["chatcmpl-semantic.even-0-a6b56b2d", "cmpl-semantic.even-0-0-1a2b3c4d"]
)
def test_client_id_is_what_the_client_gave(engine_id) -> None:
    assert client_id(engine_id) == "semantic.even-0"


def test_last_level_that_was_predicted_counts(tmp_path) -> None:
    log = tmp_path / "events.jsonl"
    events = [(3, "instant"), (2, "prediction"), (1, "prediction"), (4, "hint")]
    log.write_text(
        "".join(
            json.dumps({"request": "chatcmpl-a-0-12345678", "level": level, "level_from": source})
            + "\n"
            for level, source in events
        )
        + json.dumps({"time": 1.0, "engine": 0, "log": "engine", "seats": 16})  # of no request
    )
    assert read_levels(log) == {"a-0": 1}
    assert read_levels(tmp_path / "absent") == {}
