"""KV swap on the real engine gives the same answers as an engine without preemption."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_profile import CHEAP_COPIES

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).with_name("swap_engine.py")
POLICY = """
predictor: {enabled: false}
retention: {mode: swap, survival: 1.0}
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
    "without_loading",
    "saving_too_late",
    "logprobs",
]
CACHING = ["alone", "sync", "beside", "partial", "aborts", "resets"]
ASYNCHRONOUS = [*PLAIN[1:6], "aborts", "resets"]
UNHARMED = [
    *(("plain", name) for name in PLAIN[1:7]),
    *(("caching", name) for name in CACHING[1:4]),
    *(("asynchronous", name) for name in ASYNCHRONOUS[:5]),
]


@pytest.fixture(scope="module")
def reports(model, tmp_path_factory, offline_environment) -> dict[str, dict]:
    """What came out of three engines: one without a prefix cache, one with it, where the connector
    is one of a MultiConnector, and one with two steps in flight, as on a GPU."""
    folder = tmp_path_factory.mktemp("swap")
    policy = folder / "policy.yaml"
    profile = folder / "profile.yaml"
    profile.write_text(CHEAP_COPIES)
    policy.write_text(POLICY.replace("PROFILE", str(profile)))
    engines = {
        "plain": ({"enable_prefix_caching": False}, PLAIN),
        "caching": ({"enable_prefix_caching": True, "inside_multi_connector": True}, CACHING),
        "asynchronous": ({"enable_prefix_caching": False, "asynchronous": True}, ASYNCHRONOUS),
    }
    command = [sys.executable, SCRIPT, model, policy, folder, json.dumps(engines)]
    result = subprocess.run(
        command, env=offline_environment, capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stderr[-3000:]
    reports = {name: json.loads((folder / f"{name}.json").read_text()) for name in engines}
    reports["asynchronous"]["alone"] = reports["plain"]["alone"]  # the same prompts
    return reports


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


@pytest.mark.parametrize("control", ["without_loading", "saving_too_late"])
def test_comparison_detects_wrong_kv(reports, control) -> None:
    assert reports["plain"][control]["answers"] != reports["plain"]["alone"]["answers"]


def test_resuming_from_swap_is_bit_exact(reports) -> None:
    logprobs = reports["plain"]["logprobs"]
    assert logprobs["swap"] == logprobs["positions"] == 40
