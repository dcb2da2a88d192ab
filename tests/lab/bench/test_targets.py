"""The targets of `bench run`, on chosen speeds."""

from dataclasses import replace

import pytest
from fake_results import add_fake_round, fake_comparison, fake_records, fake_usage, fake_workload

from vllm_semantic_sched.lab.bench.results import Round
from vllm_semantic_sched.lab.bench.schedulers import parse_schedulers
from vllm_semantic_sched.lab.bench.targets import Target, check_targets, missed

EVEN, RARE = fake_workload(40), fake_workload(40, "rare")
PACES = {"fcfs": 1.0, "priority": 0.3, "semantic": 0.12, "semantic-true": 0.1}


def targets_of(comparison) -> dict[str, Target]:
    return {target.text: target for target in check_targets(comparison.mixes)}


def test_targets_compare_schedulers_of_the_same_mix():
    found = targets_of(fake_comparison(EVEN, PACES))
    urgent = found["even: urgency 0, norm. waiting, fcfs / semantic-true"]
    assert (urgent.measured, urgent.required) == (pytest.approx(10.0), 10.0)
    assert found["even: urgency 0, norm. waiting, fcfs / semantic"].met
    assert found["even: urgency 0, norm. waiting, priority / semantic-true"].met
    assert found["even: all levels, norm. waiting, fcfs / semantic-true"].required == 1.3
    assert not any("rare" in text or "known" in text for text in found)


def test_known_lengths_have_a_higher_target():
    found = targets_of(fake_comparison(RARE, {"fcfs": 0.15, "semantic-known": 0.1}))
    target = found["rare: all levels, norm. waiting, fcfs / semantic-known"]
    assert (target.measured, target.required) == (pytest.approx(1.5), 1.6)
    assert not target.met


def test_targets_need_enough_load_requests_and_rounds():
    found = targets_of(fake_comparison(EVEN, PACES))
    assert not found["even: requests"].met
    assert found["even: overload, fcfs"].met
    assert not found["even: rounds of every scheduler"].met
    made = fake_comparison(EVEN, {"fcfs": 1.0})
    add_fake_round(made, EVEN, "fcfs", 1.0, number=1)
    assert targets_of(made)["even: rounds of every scheduler"].measured == 1
    add_fake_round(made, EVEN, "fcfs", 1.0, number=2)
    assert targets_of(made)["even: rounds of every scheduler"].met


def test_urgent_requests_are_compared_with_the_idle_engine_of_the_same_round():
    slow, fast = 0.07, 0.055  # the idle engine's pace is 0.05
    waiting = "rare: urgency 0, norm. waiting, semantic-true / idle engine"
    first_token = "rare: urgency 0, p99 TTFT, semantic-true / idle engine"
    found = targets_of(fake_comparison(RARE, {"semantic-true": slow}))
    assert (found[waiting].measured, found[waiting].met) == (pytest.approx(1.4), False)
    found = targets_of(fake_comparison(RARE, {"semantic-true": fast}))
    assert found[waiting].met and found[first_token].met
    assert found[first_token].measured == pytest.approx(1.1)


def test_misread_requests_do_not_count_in_the_p99_of_the_text():
    made = fake_comparison(RARE, {"semantic-true": 0.1})
    records = fake_records(RARE, 0.12)
    misread = next(record for record in records if record.level == 0)
    misread.first_token = misread.arrival + 60.0
    name = "rare: urgency 0 without misread, p99 TTFT, semantic / semantic-true"
    (spec,) = parse_schedulers("semantic", "ems")
    for read, met in ((0, False), (2, True)):
        misread.read_level = read
        made.mixes["rare"].pop("semantic", None)
        made.add(spec, RARE, Round(1, records, usage=fake_usage()))
        assert targets_of(made)[name].met is met


def test_row_without_holds_shows_the_cost_of_scheduling_and_of_holds():
    made = fake_comparison(EVEN, {"fcfs": 1.0})
    levels = {"semantic-true": 0.106, "semantic-true@no-holds.yaml": 0.1}
    for name, pace in levels.items():
        usage = fake_usage(engine_seconds=2.1)
        add_fake_round(made, EVEN, name, lambda r, p=pace: p if r.level else 0.05, usage=usage)
    found = targets_of(made)
    cpu = found["even: EngineCore CPU per output token, semantic-true@no-holds.yaml / fcfs"]
    assert (cpu.measured, cpu.met) == (pytest.approx(1.05), False)
    name = "even: urgency 1 to 4, norm. waiting, semantic-true / semantic-true@no-holds.yaml"
    assert (found[name].measured, found[name].met) == (pytest.approx(1.06), False)


def test_unanswered_requests_miss_a_target():
    made = fake_comparison(EVEN, {"fcfs": 1.0})
    done = made.mixes["even"]["fcfs"].rounds[0]
    records = [replace(done.records[0], error="refused"), *done.records[1:]]
    made.add(parse_schedulers("fcfs", None)[0], EVEN, replace(done, records=records))
    assert "target missed: even: share of requests answered, fcfs" in missed(
        check_targets(made.mixes)
    )
