"""Figures of a run on the emulated device."""

import math

import pytest

from vllm_semantic_sched.lab.bench.prompts import Lengths
from vllm_semantic_sched.lab.device.clocks import StepTime, Timeline
from vllm_semantic_sched.lab.device.figures import HoldCosts, device_figures, level_figures
from vllm_semantic_sched.lab.device.load import LoadConfig, draw_load, faster
from vllm_semantic_sched.lab.device.virtual import EngineConfig, Record, VirtualEngine
from vllm_semantic_sched.policy.config.files import read_config
from vllm_semantic_sched.policy.profile.formula import Batch

pytestmark = pytest.mark.engine


def step(end: float, seconds: float, sampled: int, idle: float = 0.0) -> StepTime:
    return StepTime(1, end - seconds, end, idle, 0.0, Batch(decodes=sampled), sampled)


def test_window_counts_the_steps_that_end_in_it() -> None:
    steps = [step(1.0, 0.5, 4), step(2.0, 0.5, 6, idle=0.25), step(9.0, 0.5, 100)]
    figures = device_figures(steps, 0.5, 5.0)
    assert (figures.tokens, figures.steps, figures.batch) == (10.0, 2, 5.0)
    assert figures.idle == pytest.approx(0.25 / 1.25)
    with pytest.raises(ValueError, match="between 20 and 30"):
        device_figures(steps, 20, 30)


def test_level_without_requests_has_no_figures() -> None:
    record = Record("a", 0, 5, 4, 1.0, first_token=2.0, ended=5.0, tokens=[1, 2])
    figures = level_figures([record, Record("b", 0, 5, 4, 1.0)])
    assert (figures.requests, figures.ttft, figures.latency, figures.waiting) == (1, 1.0, 4.0, 2.0)
    assert math.isnan(level_figures([]).latency)


def test_step_waits_for_copies_in_line_and_not_for_those_beside() -> None:
    timeline = Timeline()
    first = timeline.step(1.0, 0.5, 1, Batch())
    assert timeline.copy(1.2, 3.0, beside=True) == (1.5, 4.5)  # after the steps before it
    second = timeline.step(1.2, 0.5, 2, Batch())
    assert timeline.copy(1.2, 1.0, beside=False) == (4.5, 5.5)  # after the copies before it
    third = timeline.step(1.2, 0.5, 3, Batch())
    late = timeline.step(7.0, 0.5, 4, Batch())
    assert [one.begin for one in (first, second, third, late)] == [1.0, 1.5, 5.5, 7.0]
    assert [one.waited for one in (first, second, third, late)] == [0.0, 0.0, 3.5, 0.0]
    assert [one.idle for one in (first, second, third, late)] == [0.0, 0.0, 0.0, 1.0]


def test_load_is_the_same_for_a_seed() -> None:
    config = LoadConfig(requests=300, rate=5.0, prefixes=2, prefix_tokens=32)
    load = draw_load(config)
    assert load == draw_load(config)
    assert load[-1].arrival == pytest.approx(60, rel=0.2)
    assert faster(load, 2.0)[-1].arrival == load[-1].arrival / 2
    assert len({one.prompt[:32] for one in load}) == 2
    share = sum(one.level == 3 for one in load) / len(load)
    assert share == pytest.approx(0.3, abs=0.06)


def test_holds_are_charged_what_they_cost_with_the_right_profile() -> None:
    lengths = {"prompts": Lengths(6.5, 0.5, 100, 2000), "answers": Lengths(4.5, 0.3, 20, 200)}
    load = draw_load(LoadConfig(requests=80, rate=40.0, mix=(1, 1, 1, 1, 1), **lengths))
    policy = read_config("ems", kind="policy")[0] | {"correct_profile": False}
    # Preemptions count toward the price as well: at that of `ems` they leave holds next to nothing.
    policy["protect"] = policy["protect"] | {"price": 0.5}
    with VirtualEngine(EngineConfig(policy=policy, seats=32)) as engine:
        costs = HoldCosts(engine)
        engine.send(load)
        engine.run()
        charged, lost = costs.between()
        assert engine.scheduler.core.protection.steps > 20
        assert charged > 0 and lost == pytest.approx(charged, rel=0.05)
        assert costs.between(end=0.0) == (0.0, 0.0)
