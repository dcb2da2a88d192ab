"""A canary on a real server: its policies and what counts as a problem; no server."""

import canary

from vllm_semantic_sched.policy.config import parse_policy


def test_candidates_meet_the_slo_of_the_current_policy():
    current = canary.current_policy(1.5)
    assert parse_policy(current).tiers[0].slo.ttft == 1.5
    good, bad = (parse_policy(current | canary.CANDIDATES[name]) for name in ("good", "bad"))
    assert good.tiers == bad.tiers == parse_policy(current).tiers
    assert good.preemption.enabled and not bad.preemption.enabled


def test_only_the_bad_policy_may_be_rolled_back():
    ends = {"good": {"end": ["kept"]}, "bad": {"end": ["rolled back: premium ttft"]}}
    assert canary.problems_of({"1": ends}) == []
    assert len(canary.problems_of({"2": {"good": ends["bad"], "bad": ends["good"]}})) == 2
