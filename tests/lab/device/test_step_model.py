"""What the scheduler believes about the device's steps, and what it pays for urgency."""

from pathlib import Path

import pytest

from vllm_semantic_sched.lab.device.figures import HoldCosts, device_figures
from vllm_semantic_sched.lab.device.load import LoadConfig, draw_load
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine
from vllm_semantic_sched.policy.profile.formula import EngineProfile, load_profile, write_profile

pytestmark = pytest.mark.engine

SECONDS = 30.0
SEATS = 64


def wrong(profile: EngineProfile, step: float, rest: float) -> EngineProfile:
    """A profile whose fixed time of a step is wrong by one factor, and all else by another."""
    terms = profile.batch_terms
    batch = terms.model_copy(
        update={
            "step": terms.step * step,
            "per_sequence": terms.per_sequence * rest,
            "per_context_token": terms.per_context_token * rest,
        }
    )
    prefill = {"alpha1": profile.alpha1 * rest, "alpha2": profile.alpha2 * rest}
    return profile.model_copy(update={"batch": batch, **prefill})


@pytest.mark.parametrize(
    ("asynchronous", "step", "rest"), [(True, 0.5, 2.0), (True, 2.0, 0.5), (False, 2.0, 0.5)]
)
def test_steps_are_predicted_within_5_percent_after_30_seconds(
    tmp_path: Path, asynchronous, step, rest
) -> None:
    truth = load_profile("default")
    given = tmp_path / "given.yaml"
    write_profile(wrong(truth, step, rest), given)
    config = EngineConfig(
        policy="ems", seats=SEATS, asynchronous=asynchronous, given_profile=str(given), noise=0.03
    )
    with VirtualEngine(config) as engine:
        engine.send(draw_load(LoadConfig(requests=200, rate=6.0)))
        engine.run(until=SECONDS)
        model = engine.scheduler.core.estimates.scale
        steps = [one.batch for one in engine.steps if one.end > SECONDS - 10]
        errors = sorted(abs(model.profile.step(one) / truth.step(one) - 1) for one in steps)
        assert engine.scheduler.counters.total("policy_errors") == 0
    assert model.certain
    assert errors[int(0.9 * len(errors))] < 0.05


def test_urgency_costs_no_more_than_its_price() -> None:
    """Under steady overload, against the same load without holds: output tokens per busy second."""
    load = draw_load(LoadConfig(requests=500, rate=6.0))
    tokens = {}
    for price in (0.0, 0.05):
        policy = {"protect": {"level": 0, "worth": 240, "price": price}}
        config = EngineConfig(policy=policy, seats=SEATS)
        with VirtualEngine(config) as engine:
            costs = HoldCosts(engine)
            engine.send(load)
            engine.run(until=load[-1].arrival)
            tokens[price] = device_figures(engine.steps, begin=20.0).tokens
            charged, lost = costs.between(20.0, load[-1].arrival)
    assert lost == pytest.approx(charged, rel=0.15)
    assert 0 < 1 - tokens[0.05] / tokens[0.0] <= 1.1 * 0.05
