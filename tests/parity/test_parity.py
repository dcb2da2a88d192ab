"""The engine and the simulator take the same decisions: recorded runs of the real engine are
replayed through the simulator's view."""

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from parity.recording import Recording
from parity.replay import replay
from vllm_semantic_sched.policy.facts.files import shipped_names

pytestmark = pytest.mark.engine

# Under `fcfs` vLLM's own scheduler decides.
POLICIES = [name for name in shipped_names("policy") if name != "fcfs"]

DISTURBING = """
preemption: {max_per_request: 1000, max_victims_per_step: 8}
retention: {mode: MODE, max_stall: 100}
correct_profile: false
profile: PROFILE
"""
"""Preempts whenever somebody more urgent waits."""

# Copies cheap enough to be the plan of least cost even for a hundred tokens.
PROFILE = """
hardware: any
model: small
source: made up
alpha1: 0.0
alpha2: 1.0e-4
beta_load: 1.0e-6
beta_save: 1.0e-6
gamma1: 0.0
gamma2: 3.0e-3
"""

MODES = {
    "": (False, False),
    "asynchronous": (True, False),
    "swap": (False, True),
    "asynchronous swap": (True, True),
}
"""Asynchronous scheduling and swap, by the name of the mode."""

REPLAYED = [*(f"{policy} " for policy in POLICIES), *(f"disturbing {mode}" for mode in MODES)]


@pytest.fixture(scope="module")
def recordings(model, tmp_path_factory) -> dict[str, Recording]:
    """By policy and mode."""
    folder = tmp_path_factory.mktemp("parity")
    out, profile = folder / "recordings.pickle", folder / "profile.yaml"
    profile.write_text(PROFILE)
    engines = []
    for mode, (asynchronous, swap) in MODES.items():
        policy = folder / f"{mode}.yaml"
        text = DISTURBING.replace("MODE", "swap" if swap else "recompute")
        policy.write_text(text.replace("PROFILE", str(profile)))
        policies = [str(policy)] if mode else [*POLICIES, str(policy), "fcfs"]
        engines.append({"asynchronous": asynchronous, "swap": swap, "policies": policies})
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler within reach of the recorder
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
    }
    arguments = [str(model), str(out), json.dumps(engines)]
    command = [sys.executable, "-m", "parity.record_engine", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    recordings = {}
    for mode, group in zip(MODES, pickle.loads(out.read_bytes()), strict=True):
        for recording in group:
            name = recording.policy if recording.policy in shipped_names("policy") else "disturbing"
            recordings[f"{name} {mode}"] = recording
    return recordings


@pytest.mark.parametrize("name", REPLAYED)
def test_simulator_decides_as_the_engine_did(recordings, name) -> None:
    recording = recordings[name]
    for event, expected, got in zip(
        recording.events, recording.decisions, replay(recording), strict=True
    ):
        assert got == expected, event


@pytest.mark.parametrize("name", REPLAYED)
def test_answers_equal_those_of_vllm_without_this_package(recordings, name) -> None:
    answers, expected = recordings[name].answers, recordings["fcfs "].answers
    assert (
        len(expected) == 60
        and len({token for tokens in expected.values() for token in tokens}) > 250
    )
    assert len(answers) > 40
    assert answers == {request: expected[request] for request in answers}


@pytest.mark.parametrize("mode", MODES)
def test_disturbed_answers_were_preempted_in_both_ways(recordings, mode) -> None:
    """Else equal answers would say little."""
    counters = recordings[f"disturbing {mode}"].counters
    preempted = {
        kind: sum(n for name, n in counters.items() if name.startswith(f"preemptions_{kind}"))
        for kind in ("swap", "recompute")
    }
    assert sum(preempted.values()) >= 20, counters
    if "swap" in mode:
        assert preempted["swap"] >= 10


def test_recordings_hold_every_kind_of_decision(recordings) -> None:
    """Else agreement would say little."""
    seen: Counter[str] = Counter()
    for recording in recordings.values():
        for decision in (each for decisions in recording.decisions for each in decisions):
            seen[decision[0]] += 1
            if decision[0] == "moved":
                seen[f"{decision[3]} {decision[4]}"] += 1
            elif decision[0] == "waiting":
                seen["promoted"] += any(state[3] for state in decision[1])
                seen["near a deadline"] += any(state[4] for state in decision[1])
                seen["predicted"] += any(state[2] == "prediction" for state in decision[1])
    for kind in ("queued urgent", "queued kv_shortage", "limits", "promoted", "near a deadline",
                 "predicted", "refused queue_timeout", "refused superseded"):  # fmt: skip
        assert seen[kind], (kind, seen)


PARTS = ["predictions", "revise", "end", "reservations", "room", "limits"]


@pytest.mark.parametrize("first", ["predictions", "end", "room"])
def test_exchanging_two_parts_of_the_step_is_noticed(recordings, first) -> None:
    place = 1 + PARTS.index(first)
    second = len(PARTS) if first != "room" else 1
    assert any(
        replay(recording, exchanged=(place, second)) != recording.decisions
        for recording in recordings.values()
    )
