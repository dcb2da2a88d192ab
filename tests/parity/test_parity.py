"""The engine and the simulator take the same decisions: recorded runs of the real engine are
replayed through the simulator's view."""

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


@pytest.fixture(scope="module")
def recordings(model, tmp_path_factory) -> dict[str, Recording]:
    out = tmp_path_factory.mktemp("parity") / "recordings.pickle"
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler within reach of the recorder
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
    }
    command = [sys.executable, "-m", "parity.record_engine", str(model), str(out), *POLICIES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return {recording.policy: recording for recording in pickle.loads(out.read_bytes())}


@pytest.mark.parametrize("policy", POLICIES)
def test_simulator_decides_as_the_engine_did(recordings, policy) -> None:
    recording = recordings[policy]
    for event, expected, got in zip(
        recording.events, recording.decisions, replay(recording), strict=True
    ):
        assert got == expected, event


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
                seen["provisional"] += any(state[2] == "instant" for state in decision[1])
                seen["predicted"] += any(state[2] == "prediction" for state in decision[1])
    for kind in ("queued urgent", "queued kv_shortage", "limits", "promoted",
                 "near a deadline", "predicted", "provisional",
                 "refused queue_timeout", "refused superseded"):  # fmt: skip
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
