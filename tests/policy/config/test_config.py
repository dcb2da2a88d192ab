"""Policy files: validation and error messages."""

import pytest
import yaml

from vllm_semantic_sched.cli.console import describe_keys
from vllm_semantic_sched.policy.config import Policy, load_policy, parse_policy
from vllm_semantic_sched.policy.config.files import shipped_names
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.profile.formula import load_profile


@pytest.mark.parametrize("name", shipped_names("policy"))
def test_every_shipped_policy_is_valid_and_names_a_valid_profile(name: str) -> None:
    load_profile(load_policy(name).profile)


@pytest.mark.parametrize("name", shipped_names("profile"))
def test_every_shipped_profile_is_valid(name: str) -> None:
    # A 100-token prompt takes milliseconds on the cards, 0.2 s on the phone; the paper's misprint
    # took 146 s.
    assert 0.001 < load_profile(name).prefill(0, 100) < 0.3


def test_documented_policies_are_shipped() -> None:
    wanted = {"ems", "tiers", "latency", "throughput", "fairness", "fcfs", "priority", "sjf"}
    assert wanted <= set(shipped_names("policy"))
    assert len(shipped_names("profile")) >= 4


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"bse": "fcfs"}, ["bse", "unknown key", "'base'", "predictor"]),
        ({"base": "round_robin"}, ["base", "'semantic'", "'sjf'", "'fcfs'", "round_robin"]),
        ({"preemption": {"max_per_req": 1}}, ["preemption.max_per_req", "'max_per_request'"]),
        ({"levels": "3"}, ["levels", "integer", "'3'"]),
        ({"levels": 0}, ["levels", "greater than or equal to 1"]),
        ({"default_level": 9}, ["default_level", "9", "0 to 4"]),
        ({"levels": 2, "default_level": 1, "protect": {"level": 2}}, ["protect.level", "0 to 1"]),
        ({"hints": 3}, ["hints", "3"]),
        ({"preemption": {"enabled": 1}}, ["preemption.enabled", "boolean"]),
        ({"admission": {"over_share": True}}, ["admission.over_share", "'off', 'probabilistic'"]),
        ({"levels": 1, "default_level": 0, "tiers": [{"nme": "a"}]}, ["tiers.0.nme", "'name'"]),
        ({"tiers": [{"name": "a", "slo": {"tft": 1}}]}, ["tiers.0.slo.tft", "'ttft'"]),
        ({"tiers": [{"name": "a"}]}, ["1 entries", "levels: 5"]),
        ({"hints": {"urgency": "cap"}}, ["hints.urgency", "most_urgent_level", "1 to 4"]),
        ({"hints": {"priority": "cap"}}, ["hints.priority", "most_urgent_level"]),
        (
            {"hints": {"urgency": "cap", "most_urgent_level_of": {"cad": 0}}},
            ["hints.urgency: cap has no effect"],
        ),
        (
            {"hints": {"urgency": "cap", "most_urgent_level_of": {"batch": 5}}},
            ["hints.most_urgent_level_of.batch: 5 is not a level", "0 to 4"],
        ),
        (
            {"hints": {"urgency": "cap", "most_urgent_level_of": {"batch": -1}}},
            ["hints.most_urgent_level_of.batch", "-1"],
        ),
        (
            {"hints": {"urgency": "cap", "most_urgent_level_of": {" batch": 1}}},
            ["no tenant has the name ' batch'"],
        ),
        (
            {"hints": {"most_urgent_level_of": {"batch": 1}}},
            ["hints.most_urgent_level_of: without effect"],
        ),
        ([1, 2], ["mapping"]),
        ("text", ["mapping"]),
    ],
)
def test_error_names_key_value_and_valid_choices(data, words) -> None:
    with pytest.raises(PolicyError) as refusal:
        parse_policy(data, source="my.yaml")
    for word in ["my.yaml", *words]:
        assert word in str(refusal.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(PolicyError) as refusal:
        parse_policy({"bse": 1, "levels": "x"})
    assert len(str(refusal.value).splitlines()) == 2


def test_error_for_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(PolicyError, match=r"Did you mean 'ems'.*fairness"):
        load_policy("emms")


@pytest.mark.parametrize("text", ["a: [", "\xff\xfe", "? [1, 2]\n: 3"])
def test_files_that_are_not_policies_are_rejected(tmp_path, text: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PolicyError, match=r"p\.yaml"):
        load_policy(path)


def test_off_is_a_string_and_an_empty_mapping_gives_the_defaults(tmp_path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("admission:\n  over_share: off\npredictor:\n  enabled: true\n")
    assert load_policy(path).admission.over_share == "off"
    path.write_text("{}\n")
    assert load_policy(path) == Policy()


def test_every_key_is_documented_with_its_default() -> None:
    text = describe_keys(Policy)
    assert "preemption.max_per_request: 3" in text
    assert "semantic | priority | sjf | fcfs" in text
    assert "tiers[].slo.ttft: None" in text
    documented = {line.split(":")[0] for line in text.splitlines() if not line.startswith(" ")}
    documented = {key for key in documented if not key.startswith("tiers[]")}
    assert "protect.price: 0.05" in text

    def leaves(values: dict, prefix: str = "") -> set[str]:
        return {
            leaf
            for key, value in values.items()
            for leaf in (
                leaves(value, f"{prefix}{key}.")
                if isinstance(value, dict) and value  # an empty mapping is a default
                else {prefix + key}
            )
        }

    keys = leaves(yaml.safe_load(Policy().model_dump_json()))
    assert keys <= documented
    # Groups are there too, where there is something to say about them.
    assert all(any(key.startswith(f"{group}.") for key in keys) for group in documented - keys)


@pytest.mark.parametrize(
    ("base", "hinted", "length_known", "reads"),
    [
        ("semantic", True, True, False),
        ("semantic", True, False, True),
        ("semantic", False, True, True),
        ("priority", True, False, False),
        ("priority", False, True, True),
        ("sjf", False, True, False),
        ("sjf", True, False, True),
        ("fcfs", False, False, False),
    ],
)
def test_texts_are_read_for_what_requests_do_not_state(base, hinted, length_known, reads) -> None:
    assert parse_policy({"base": base}).reads(hinted, length_known) is reads
    assert not parse_policy({"base": base, "predictor": {"enabled": False}}).reads(False)


def test_weighted_levels_need_lengths() -> None:
    with pytest.raises(PolicyError, match="needs base: semantic"):
        parse_policy({"base": "priority", "weighted_levels": {"factor": 4}})
    assert parse_policy({"levels": 1, "default_level": 0})
