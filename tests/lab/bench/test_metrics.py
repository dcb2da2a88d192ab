"""Metrics of given records, and which outputs count as different."""

import math
from dataclasses import replace

import pytest

from vllm_semantic_sched.lab.bench.client import Record
from vllm_semantic_sched.lab.bench.metrics import (
    Difference,
    IdleModel,
    by_level,
    differences,
    explain,
    fairness,
    finish_order_violations,
    fit_idle,
    summarize,
    throughput,
)

IDLE = IdleModel(base=0.1, per_prompt_token=0.0, per_output_token=0.01, floor=0.05)


def record(index=0, level=0, arrival=1.0, first=2.0, finish=4.0, tokens=5, **fields) -> Record:
    defaults = {
        "sent": arrival,
        "prompt_tokens": 10,
        "finish_reason": "stop",
        "status": 200,
        "engine_queue_seconds": 0.5,
        "token_ids": list(range(tokens)),
    }
    return Record(
        index, level, "hash", tokens, arrival,
        first_token=first, finish=finish, output_tokens=tokens, **(defaults | fields),
    )  # fmt: skip


def test_metrics_of_one_record():
    values = by_level([record()], IDLE)["0"]
    expected = {
        "ttft": 1.0,
        "tpot": 0.5,
        "e2e": 3.0,
        "queueing": 0.5,
        "normalized_waiting": 0.6,
        "slowdown": 20.0,
    }
    assert {key: value for key, (value,) in values.items()} == pytest.approx(expected)
    assert by_level([record()], None)["0"]["slowdown"] == []


def test_finish_order_violations_follow_equation_2():
    first = record(level=4, arrival=0.0, finish=3.0)
    there, later = record(arrival=2.0, finish=5.0), record(arrival=3.5, finish=5.0)
    equal = record(level=4, arrival=2.0, finish=6.0)
    assert finish_order_violations([there, first, later, equal]) == 0.25


def test_fairness_compares_the_tokens_per_second_of_tenants():
    one = record(tenant="a", arrival=0.0, finish=4.0, tokens=8)
    other = record(tenant="b", arrival=2.0, finish=4.0, tokens=4)
    assert fairness([one, other]) == 1.0
    assert fairness([one, replace(other, arrival=0.0)]) == pytest.approx(0.9)
    refused = record(tenant="b", arrival=0.0, error="tenant_over_share")
    assert fairness([one, other, refused]) == 1.0
    assert math.isnan(fairness([one]))
    assert math.isnan(fairness([replace(one, tenant=""), replace(other, tenant="")]))


def test_times_count_from_arrival_even_if_sent_late():
    late = record(sent=1.9)
    assert by_level([late], IDLE)["0"]["ttft"] == [1.0]


def test_tpot_is_undefined_for_one_token():
    assert by_level([record(tokens=1)], IDLE)["0"]["tpot"] == []


def test_levels_are_separate_and_failures_excluded():
    records = [record(0, 0), record(1, 4, finish=6.0), record(2, 4, error="refused")]
    levels = by_level(records, IDLE)
    assert list(levels) == ["0", "4", "all"]
    assert levels["4"]["e2e"] == [5.0]
    assert len(levels["all"]["e2e"]) == 2
    assert [item.index for item in records if not item.ok] == [2]


def test_answer_with_wrong_length_is_a_failure():
    assert not replace(record(), wanted_tokens=6).ok


def test_percentiles_interpolate():
    summary = summarize(range(101))
    assert (summary.mean, summary.p50, summary.p99) == (50.0, 50.0, 99.0)
    assert summarize([]).count == 0


def test_p99_can_be_over_more_requests():
    summary = summarize([1.0, 3.0], tail=range(201))
    assert (summary.mean, summary.p50, summary.p99) == (2.0, 2.0, 198.0)
    assert (summary.count, summary.tail_count) == (2, 201)


def test_throughput_runs_from_first_arrival_to_last_finish():
    assert throughput([record(), record(1, arrival=3.0, finish=11.0)]) == 1.0
    assert throughput([record(finish=None)]) == 0.0


def test_idle_model_recovers_a_line():
    records = [
        record(n, prompt_tokens=p, tokens=t, arrival=0.0, finish=0.2 + 0.001 * p + 0.01 * t)
        for n, (p, t) in enumerate([(10, 8), (40, 20), (20, 50), (80, 100), (30, 10)])
    ]
    model = fit_idle(records)
    assert model.seconds(50, 60) == pytest.approx(0.85)
    assert model.seconds(0, 0) == min(item.finish for item in records)


def test_idle_model_has_no_negative_coefficient():
    records = [
        record(n, prompt_tokens=100 - t, tokens=t, arrival=0.0, finish=0.5 + 0.01 * t - 0.001 * n)
        for n, t in enumerate((5, 10, 20, 40, 80))
    ]
    model = fit_idle(records)
    assert min(model.base, model.per_prompt_token, model.per_output_token) >= 0


def test_idle_model_needs_answers():
    assert fit_idle([record(error="refused")] * 4) is None


def test_difference_has_its_first_position():
    other = record(token_ids=[0, 1, 9, 9, 9])
    assert differences([record()], [other]) == [Difference(0, 2)]
    assert differences([record()], [record()]) == []


def test_difference_counts_unless_margin_is_below_limit():
    answer = record(token_ids=[0, 1, 9, 9, 9])
    found = Difference(0, 2)
    assert found.counts  # unknown margin

    def with_margin(margin: float) -> Difference:
        return explain(found, answer, record(margins=[1.0, 1.0, margin]))

    assert not with_margin(0.9e-4).counts
    assert with_margin(1.1e-4).counts


def test_margin_after_another_prefix_is_ignored():
    answer = record(token_ids=[0, 1, 9, 9, 9])
    elsewhere = record(token_ids=[5, 1, 2, 3, 4], margins=[0.0] * 5)
    assert explain(Difference(0, 2), answer, elsewhere).counts
