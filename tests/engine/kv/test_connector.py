"""KV swap on the real engine gives the same answers as an engine without preemption."""

import json
from pathlib import Path

import pytest
from made_up_profile import CHEAP_COPIES

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).with_name("swap_engine.py")
POLICY = """
predictor: {enabled: false}
retention: {mode: swap}
preemption: {max_per_request: 1000}
correct_profile: false
profile: PROFILE
"""
PLAIN = [
    "alone",
    "sync",
    "beside",
    "partial",
    "partial_beside",
    "optimal",
    "recompute",
    "aborts",
    "resets",
    "broken",
    "without_loading",
    "saving_too_late",
    "logprobs",
]
CACHING = ["alone", "sync", "beside", "partial", "aborts", "resets"]
ASYNCHRONOUS = [*PLAIN[1:6], "aborts", "resets", "broken"]
UNHARMED = [
    *(("plain", name) for name in PLAIN[1:7]),
    *(("caching", name) for name in CACHING[1:4]),
    *(("asynchronous", name) for name in ASYNCHRONOUS[:5]),
]


@pytest.fixture(scope="module")
def reports(slim_model, tmp_path_factory, run_offline) -> dict[str, dict]:
    """What came out of three engines: one without a prefix cache, one with it, where the connector
    is one of a MultiConnector, and one with two steps in flight, as on a GPU."""
    engines = {
        "plain": ({"enable_prefix_caching": False}, PLAIN),
        "caching": ({"enable_prefix_caching": True, "inside_multi_connector": True}, CACHING),
        "asynchronous": (
            {"enable_prefix_caching": False, "asynchronous": True, "answers_of": "plain"},
            ASYNCHRONOUS,
        ),
    }
    reports = run_engines(run_offline, slim_model, tmp_path_factory.mktemp("swap"), engines)
    reports["asynchronous"]["alone"] = reports["plain"]["alone"]  # the same prompts
    return reports


def run_engines(run_offline, model, folder, engines) -> dict[str, dict]:
    policy = folder / "policy.yaml"
    profile = folder / "profile.yaml"
    profile.write_text(CHEAP_COPIES)
    policy.write_text(POLICY.replace("PROFILE", str(profile)))
    run_offline(SCRIPT, model, policy, folder, json.dumps(engines))
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in engines}


def test_engines_have_the_expected_configuration(reports) -> None:
    plain, caching = reports["plain"]["engine"], reports["caching"]["engine"]
    ahead = reports["asynchronous"]["engine"]
    assert ahead["asynchronous"] and not plain["asynchronous"]
    assert (plain["caching"], plain["connector"]) == (False, "SemanticSwapConnector")
    assert (caching["caching"], caching["connector"]) == (True, "MultiConnector")
    assert plain["policy_errors"] == caching["policy_errors"] == ahead["policy_errors"] == 0
    # Else a wrong KV could go unnoticed.
    assert reports["plain"]["alone"]["distinct"] > 250


def test_scenarios_contain_many_preemptions(reports) -> None:
    forced = [
        run["forced"] for engine in reports.values() for run in engine.values() if "forced" in run
    ]
    assert sum(forced) >= 200


@pytest.mark.parametrize(("engine", "name"), UNHARMED)
def test_answers_equal_those_without_preemption(reports, engine, name) -> None:
    run = reports[engine][name]
    assert run["answers"] == reports[engine]["alone"]["answers"]
    assert (run["host_blocks_left"], run["device_blocks_left"], run["jobs_left"]) == (0, 0, 0)


@pytest.mark.parametrize(("engine", "name"), UNHARMED)
def test_every_held_token_is_loaded_cached_or_recomputed(reports, engine, name) -> None:
    counters = reports[engine][name]["counters"]

    def tokens(what: str) -> float:
        return counters.get(f"{what}_tokens", 0)

    resumed = tokens("loaded") + tokens("found") + tokens("recomputed")
    if engine == "asynchronous":
        # A request may end while it is away: its last token was in flight already.
        assert 0.8 * tokens("preempted") < resumed <= tokens("preempted")
    else:
        assert tokens("preempted") == resumed > 0
    assert tokens("loaded") <= tokens("saved")
    if name == "recompute":
        assert tokens("saved") == 0
    else:
        assert tokens("loaded") > 0
    if name in ("sync", "beside") and engine == "plain":
        assert tokens("loaded") == tokens("preempted")  # nothing at all is computed again
    if name.startswith(("partial", "optimal")):
        assert tokens("recomputed") > 0 < counters["preemptions_partial_urgent"]
    if engine == "caching":
        assert tokens("found") > 0
    if tokens("saved"):
        assert counters["copy_seconds_save_measured"] > 0 < counters["copy_seconds_load_measured"]
    kinds = {key: seconds for key, seconds in counters.items() if "resume_seconds" in key}
    assert sum(kinds.values()) > 0


@pytest.mark.parametrize("engine", ["plain", "caching", "asynchronous"])
def test_requests_cancelled_while_swapped_free_everything(reports, engine) -> None:
    run = reports[engine]["aborts"]
    assert run["cancelled"] >= 3
    assert run["answers"].count(None) == run["cancelled"]
    for answer, alone in zip(run["answers"], reports[engine]["alone"]["answers"], strict=True):
        assert answer in (None, alone)
    assert (run["host_blocks_left"], run["device_blocks_left"], run["jobs_left"]) == (0, 0, 0)


@pytest.mark.parametrize("engine", ["plain", "caching", "asynchronous"])
def test_cache_reset_loses_copies_but_not_answers(reports, engine) -> None:
    run = reports[engine]["resets"]
    assert run["lost"] > 0
    assert run["counters"]["recomputed_tokens"] > 0
    assert run["answers"] == reports[engine]["alone"]["answers"]
    assert (run["host_blocks_left"], run["device_blocks_left"], run["jobs_left"]) == (0, 0, 0)


# Four prompts leave seats free, so that nothing is preempted for a waiting one.
OF_FULL_SEATS = {
    "scheduler.core.eviction.victims_for",
    "scheduler.core.eviction.worth_preempting",
    "scheduler.predictions.reads",
    "scheduler.vllm_api.blocks_needed",
    "worker.backend.load beside",
}


def check_broken(report: dict, alone: list) -> None:
    run = report["broken" if "broken" in report else "thousand_broken"]
    assert run["wrong"] == {} and run["answers"] == alone
    unharmed = set(run["unharmed"]) - (OF_FULL_SEATS if "broken" in report else set())
    assert run["errors"] > 0 and not unharmed, unharmed
    assert run["later_errors"] == 0 and run["first"]
    assert (run["host_blocks_left"], run["device_blocks_left"], run["jobs_left"]) == (0, 0, 0)


@pytest.mark.parametrize("engine", ["plain", "asynchronous"])
def test_answers_stay_whatever_method_fails(reports, engine) -> None:
    check_broken(reports[engine], reports["plain"]["alone"]["answers"])


@pytest.mark.study
def test_answers_of_1000_requests_survive_failing_methods(
    slim_model, tmp_path, run_offline
) -> None:
    engines = {
        name: ({"asynchronous": ahead, "enable_prefix_caching": ahead}, scenarios)
        for name, ahead, scenarios in (
            ("plain", False, ["alone", "thousand_broken"]),
            ("asynchronous", True, ["alone", "thousand_broken"]),
        )
    }
    for report in run_engines(run_offline, slim_model, tmp_path, engines).values():
        assert report["thousand_broken"]["requests"] >= 1000
        check_broken(report, report["alone"]["answers"])


@pytest.mark.parametrize("control", ["without_loading", "saving_too_late"])
def test_comparison_detects_wrong_kv(reports, control) -> None:
    assert reports["plain"][control]["answers"] != reports["plain"]["alone"]["answers"]


def test_resuming_from_swap_is_bit_exact(reports) -> None:
    logprobs = reports["plain"]["logprobs"]
    assert logprobs["swap"] == logprobs["positions"] == 40
