"""Figures of `semsched top`, from made-up metrics pages."""

from collections import deque

import pytest
from fake_server import MadeUpPage, busy_page
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.operate.figures import (
    Figures,
    Interval,
    Page,
    add_page,
    compute,
    quantile,
)

TTFT = "time_to_first_token_seconds"


def reading(page: MadeUpPage, time: float = 0.0) -> Page:
    return Page(page.text(), time)


def added(history: deque[Page], page: MadeUpPage, time: float = 0.0) -> Figures:
    return compute([add_page(history, reading(page, time))])


def test_gauges_are_shown_by_level_and_engines_are_added_up() -> None:
    page = busy_page()
    page.tiers("immediate", "urgent", "non-urgent", engine=1)
    page.set("waiting_requests", 4, "non-urgent", engine=1)
    page.set("longest_wait_seconds", 100.0, "non-urgent", engine=1)
    page.set("predictor_up", 0, engine=1)
    page.set("policy_version", 3, engine=1)
    page.kv_use(0.125, engine=1)
    figures = compute([Interval(reading(page), None)])
    assert [(tier.level, tier.tier) for tier in figures.tiers] == [
        (0, "immediate"),
        (1, "urgent"),
        (2, "non-urgent"),
    ]
    assert [tier.waiting for tier in figures.tiers] == [0, 2, 35]
    assert [tier.running for tier in figures.tiers] == [5, 11, 0]
    assert figures.tiers[2].longest_wait == 100.0
    assert figures.kv_use == 0.5 and figures.host_pool_use == 0.25
    assert figures.predictor == "loading" and figures.predictor_queue == 7
    assert figures.policy_versions == (2, 3)


def test_predictor_that_was_restarted_is_down_until_it_is_up() -> None:
    page = busy_page()
    page.set("predictor_up", 0)
    assert compute([Interval(reading(page), None)]).predictor == "loading"
    page.add("predictor_restarts", 1, engine=1)  # another engine's
    page.set("predictor_up", 1, engine=1)
    assert compute([Interval(reading(page), None)]).predictor == "loading"
    page.add("predictor_restarts", 1)
    assert compute([Interval(reading(page), None)]).predictor == "down"
    page.set("predictor_up", 1)
    assert compute([Interval(reading(page), None)]).predictor == "up"


def test_first_reading_counts_from_the_start_of_the_server() -> None:
    figures = added(deque(), busy_page())
    assert figures.window is None and figures.tiers[1].held is None
    assert figures.preemptions["recompute"] == 4 and figures.preemptions["swap"] == 2
    top = figures.tiers[0]
    assert top.started == 100
    assert 0.15 < top.ttft_p50 < 0.2 and top.ttft_p99 == 0.2
    assert figures.tiers[1].ttft_p50 is None


def test_second_reading_counts_from_the_first() -> None:
    page, history = busy_page(), deque()
    added(history, page, 100.0)
    page.observe(TTFT, [20.0] * 10, "immediate")
    page.add("preemptions", 5, "swap", "kv_shortage")
    page.add("held_seconds", 30.0, "urgent")
    figures = added(history, page, 110.0)
    assert figures.window == 10.0
    assert figures.preemptions["swap"] == 5 and figures.preemptions["recompute"] == 0
    assert figures.tiers[0].started == 10 and 10.0 < figures.tiers[0].ttft_p50 < 30.0
    assert figures.tiers[1].held == 3.0


def test_window_is_the_last_minute() -> None:
    page, history = busy_page(), deque()
    for second in range(0, 200, 5):
        page.observe(TTFT, [1.0], "urgent")
        figures = added(history, page, second)
    assert figures.window == 60.0 and figures.tiers[1].started == 12


def test_restarted_server_counts_from_its_start() -> None:
    page, history = busy_page(), deque()
    added(history, page, 0.0)
    restarted = MadeUpPage()
    restarted.tiers("immediate")
    restarted.observe(TTFT, [0.7], "immediate")
    figures = added(history, restarted, 5.0)
    assert figures.window is None and figures.tiers[0].started == 1
    restarted.observe(TTFT, [0.7], "immediate")
    figures = added(history, restarted, 15.0)
    assert figures.window == 10.0 and figures.tiers[0].started == 1


def test_servers_are_added_up_by_tier() -> None:
    quiet = MadeUpPage()
    quiet.tiers("immediate")
    quiet.observe(TTFT, [4.0] * 200, "immediate")
    quiet.set("policy_version", 1)
    for engine in (0, 1):
        quiet.kv_use(0.125, engine=engine)
    total = compute([Interval(reading(page), None) for page in (busy_page(), quiet)])
    assert [tier.tier for tier in total.tiers] == ["immediate", "urgent", "non-urgent"]
    assert total.tiers[0].started == 300 and 2.5 < total.tiers[0].ttft_p50 < 5.0
    assert sum(tier.running for tier in total.tiers) == 16
    assert sum(tier.waiting for tier in total.tiers) == 33
    assert total.kv_use == 1.125 / 3 and total.predictor == "up"  # over all engines
    assert total.policy_versions == (1, 2) and total.preemptions["swap"] == 2


def test_server_without_requests_has_empty_figures() -> None:
    page = Page("# HELP other A metric.\n# TYPE other gauge\nother 1\n", 0.0)
    figures = compute([Interval(page, None)])
    assert not page and not figures.tiers and not figures.preemptions
    assert figures.kv_use is None and figures.predictor is None
    assert figures.policy_versions == ()


@pytest.mark.parametrize("text", ["<html>", "hello world", "{}", 'a{b="c} 1'])
def test_other_pages_are_rejected(text) -> None:
    with pytest.raises(ValueError, match="not a page of Prometheus metrics"):
        Page(text, 0.0)


@given(st.lists(st.floats(0.001, 2000.0), min_size=1, max_size=50), st.sampled_from([0.5, 0.99]))
def test_quantile_is_in_the_bucket_of_the_true_one(values, share) -> None:
    bounds = [0.01, 0.1, 1.0, 10.0, 100.0, float("inf")]
    buckets = {bound: sum(value <= bound for value in values) for bound in bounds}
    found = quantile(buckets, share)
    rank = next(n for n in range(1, len(values) + 1) if n >= share * len(values))
    true = sorted(values)[rank - 1]
    upper = next(bound for bound in bounds if true <= bound)
    lower = max((bound for bound in bounds if bound < upper), default=0.0)
    assert lower <= found <= upper
    if upper == float("inf"):
        assert found == 100.0


def test_quantile_of_nothing_is_none() -> None:
    assert quantile({}, 0.5) is None and quantile({1.0: 0.0, float("inf"): 0.0}, 0.5) is None
