"""The engine and the simulator take the same decisions: recorded runs of the real engine are
replayed through the simulator's view."""

from collections import Counter
from pathlib import Path

import pytest
from made_up_profile import CHEAP_COPIES

from parity.record_engine import REQUESTS, EngineCase, run
from parity.recording import Recording
from parity.replay import replay
from vllm_semantic_sched.policy import step
from vllm_semantic_sched.policy.config.files import shipped_names
from vllm_semantic_sched.sim.engine import unguarded

pytestmark = pytest.mark.engine

# Under `fcfs` vLLM's own scheduler decides.
POLICIES = [name for name in shipped_names("policy") if name != "fcfs"]

# Preempts whenever somebody more urgent waits; with every level in use somebody often is.
PREEMPTING = """
preemption: {max_per_request: 1000}
retention: {mode: MODE}
correct_profile: false
profile: PROFILE
"""
# And holds the others while somebody urgent runs, within a price; a long hold promotes.
HOLDING = f"""{PREEMPTING}
protect: {{level: 1, price: 0.02, worth: 1.0e+6}}
aging: {{enabled: true, interval: 10}}
"""
# With `gating` no prefills run beside somebody urgent.
DISTURBING = {"preempting": PREEMPTING, "holding": HOLDING, "gating": PREEMPTING}

# Each sequence lengthens a step, else nobody would be held.
PROFILE = f"{CHEAP_COPIES}batch: {{step: 3.0e-3, per_sequence: 1.0e-4}}\n"

# Asynchronous scheduling and KV swap.
MODES = {
    "synchronous": (False, False),
    "asynchronous": (True, False),
    "synchronous with swap": (False, True),
    "asynchronous with swap": (True, True),
}
DISTURBED = [f"{name}, {mode}" for mode in MODES for name in DISTURBING]
REPLAYED = [*POLICIES, *DISTURBED]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> dict[str, Recording]:
    """By shipped policy, or by disturbing policy and mode."""
    folder = tmp_path_factory.mktemp("parity")
    profile = folder / "profile.yaml"
    profile.write_text(PROFILE)
    cases = [EngineCase(name) for name in [*POLICIES, "fcfs"]]
    for mode, (asynchronous, swap) in MODES.items():
        for name, text in DISTURBING.items():
            policy = folder / f"{name}, {mode}.yaml"
            text = text.replace("MODE", "swap" if swap else "recompute")
            policy.write_text(text.replace("PROFILE", str(profile)))
            gated_level = 1 if name == "gating" else None
            case = EngineCase(str(policy), str(profile), asynchronous, swap, gated_level)
            cases.append(case)
    return {Path(case.policy).stem: run(case, folder / "model") for case in cases}


@pytest.mark.parametrize("name", REPLAYED)
def test_simulator_decides_as_the_engine_did(recordings, name) -> None:
    recording = recordings[name]
    for event, expected, got in zip(
        recording.events, recording.decisions, replay(recording), strict=True
    ):
        assert got == expected, event


@pytest.mark.parametrize("name", REPLAYED)
def test_answers_equal_those_of_vllm_alone(recordings, name) -> None:
    answers, expected = recordings[name].answers, recordings["fcfs"].answers
    assert len(answers) > 30  # some policies refuse
    assert answers == {request: expected[request] for request in answers}


def test_answers_are_diverse(recordings) -> None:
    """Else a token of another request could go unnoticed."""
    answers = recordings["fcfs"].answers
    assert len(answers) == REQUESTS
    assert len({token for tokens in answers.values() for token in tokens}) > 250


@pytest.mark.parametrize("name", DISTURBED)
def test_disturbing_policies_disturb(recordings, name) -> None:
    """Else equal answers would say little."""
    counters = recordings[name].counters
    kind = "swap" if "swap" in name else "recompute"
    preempted = sum(counters[f"preemptions_{kind}_{why}"] for why in ("urgent", "kv_shortage"))
    decisions = [each for decisions in recordings[name].decisions for each in decisions]
    holds = sum(each[:2] == ("order", "hold") and bool(each[2]) for each in decisions)
    gated = sum(each[:2] == ("order", "limits") and each[2][2] for each in decisions)
    # Beside somebody urgent nobody else starts under the gate, so fewer are preempted.
    assert preempted > (5 if "gating" in name else 10)
    assert holds > 20 or "holding" not in name
    assert gated > 20 or "gating" not in name


def test_recordings_hold_every_kind_of_decision(recordings) -> None:
    """Else agreement would say little."""
    seen: Counter[str] = Counter()
    for recording in recordings.values():
        for decision in (each for decisions in recording.decisions for each in decisions):
            seen[decision[0]] += 1
            if decision[0] == "order":
                seen[f"{decision[1]} ordered"] += bool(decision[2])
            elif decision[0] == "moved":
                seen[f"{decision[3]} {decision[4]}"] += 1
            elif decision[0] == "waiting":
                seen["promoted"] += any(state[3] for state in decision[1])
                seen["near a deadline"] += any(state[4] for state in decision[1])
                seen["provisional"] += any(state[2] == "instant" for state in decision[1])
                seen["predicted"] += any(state[2] == "prediction" for state in decision[1])
    for kind in ("queued urgent", "queued kv_shortage", "limits ordered",
                 "preempt ordered", "end ordered", "hold ordered", "promoted",
                 "near a deadline", "predicted", "provisional",
                 "refused queue_timeout", "refused superseded"):  # fmt: skip
        assert seen[kind], (kind, seen)


# Those of parts that take any, for the part that runs in their place.
ARGUMENTS = {"read_predictions": (unguarded,), "limit_prefills": (False,)}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("read_predictions", "limit_prefills"),
        ("end_overdue", "limit_prefills"),
        ("read_predictions", "make_room"),
        ("make_room", "hold"),
    ],
)
def test_exchanging_two_parts_of_the_step_is_noticed(
    recordings, monkeypatch, first, second
) -> None:
    parts = {name: getattr(step._Step, name) for name in (first, second)}
    for name, other in ((first, second), (second, first)):

        def exchanged(decisions, *_, part=parts[other], name=other) -> None:
            part(decisions, *ARGUMENTS.get(name, ()))

        monkeypatch.setattr(step._Step, name, exchanged)
    decided = [recording for recording in recordings.values() if recording.decisions]
    assert any(differs(recording) for recording in decided)


def differs(recording: Recording) -> bool:
    """Whether a decision is another one, or concerns a request that has no seat any more."""
    try:
        return replay(recording) != recording.decisions
    except (KeyError, AssertionError):
        return True
