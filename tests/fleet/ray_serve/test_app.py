"""The application's configuration."""

import sys
from pathlib import Path

import pytest
import yaml

from vllm_semantic_sched.fleet.ray import with_urgency
from vllm_semantic_sched.policy.config.section import PolicyError

APP = Path(__file__).parents[3] / "configs" / "deploy" / "ray" / "app.yaml"


def completed(**fields):
    config = {"model_loading_config": {"model_id": "m"}} | fields
    return with_urgency({"llm_configs": [config]})["llm_configs"][0]


def test_package_is_imported_without_ray():
    import vllm_semantic_sched.fleet.ray  # noqa: F401

    assert not any(name.startswith("vllm_semantic_sched.fleet.ray.server") for name in sys.modules)


def test_shipped_application_is_complete():
    (application,) = yaml.safe_load(APP.read_text())["applications"]
    assert application["import_path"] == "vllm_semantic_sched.fleet.ray:build_app"
    args = with_urgency(application["args"])
    assert "policy" not in args  # unknown to Ray
    (config,) = args["llm_configs"]
    assert config["deployment_config"]["autoscaling_config"]["max_replicas"] > 1


def test_everything_is_added():
    args = with_urgency({"policy": "tiers", "llm_configs": [{}, {}]})
    assert args["ingress_cls_config"]["ingress_cls"].endswith(":UrgencyIngress")
    for config in args["llm_configs"]:
        assert config["server_cls"].endswith(":UrgencyServer")
        engine = config["engine_kwargs"]
        assert engine["scheduler_cls"] == "vllm_semantic_sched.SemanticScheduler"
        assert engine["additional_config"] == {"semantic_sched": {"policy": "tiers"}}
        router = config["deployment_config"]["request_router_config"]
        assert router["request_router_class"].endswith(".UrgencyRouter")
        assert router["request_router_kwargs"] == {"policy": "tiers"}
        assert router["request_routing_stats_period_s"] < 1


def test_what_is_set_stays():
    given = {
        "server_cls": "mine:Server",
        "engine_kwargs": {
            "max_num_seqs": 8,
            "additional_config": {"semantic_sched": {"policy": "fairness"}, "other": 1},
        },
        "deployment_config": {"num_replicas": 3},
    }
    config = completed(**given)
    assert config["server_cls"] == "mine:Server"
    assert config["engine_kwargs"]["max_num_seqs"] == 8
    assert (
        config["engine_kwargs"]["additional_config"] == given["engine_kwargs"]["additional_config"]
    )
    deployment = config["deployment_config"]
    assert deployment["num_replicas"] == 3
    # The router reads the replicas' policy.
    kwargs = deployment["request_router_config"]["request_router_kwargs"]
    assert kwargs == {"policy": "fairness"}
    assert "scheduler_cls" not in given["engine_kwargs"]  # the caller's own is not changed


def test_invalid_arguments_raise(monkeypatch):
    with pytest.raises(PolicyError, match="no such file"):
        with_urgency({"policy": "none", "llm_configs": [{}]})
    with pytest.raises(ValueError, match="not a mapping"):
        with_urgency({"llm_configs": ["config.yaml"]})
    monkeypatch.setenv("RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING", "1")
    with pytest.raises(ValueError, match="direct streaming"):
        with_urgency({"llm_configs": [{}]})
