"""Fair shares on a real server: policies and figures; no server."""

import shares
from fake_results import fake_records, fake_workload

from vllm_semantic_sched.policy.config import load_policy


def test_variants_differ_in_refusals_alone(tmp_path):
    shipped, lenient = (
        load_policy(shares.write_policy(tmp_path, name)) for name in shares.VARIANTS
    )
    assert shipped == load_policy("shares") and lenient.admission.over_share == "off"
    assert lenient.tiers == shipped.tiers


def test_shares_are_of_the_tokens_that_finish_in_each_window():
    records = [one for one in fake_records(fake_workload(40), lambda _: 0.01) if one.level < 3]
    last = max(one.finish for one in records)
    (row,) = shares.shares_over_time(records, last + 1, last + 1)
    assert abs(sum(row) - 1) < 1e-9
    premium = sum(one.output_tokens for one in records if one.level == 0)
    assert row[0] == premium / sum(one.output_tokens for one in records)


def test_refusals_without_pressure_and_of_premium_are_problems():
    good = {"calm_refused": 0, "refused": [[2, "tier_over_share", 9]]}
    assert shares.problems_of({"shares": good}) == []
    assert (
        len(shares.problems_of({"shares": good | {"calm_refused": 1, "refused": [[0, "x", 1]]}}))
        == 2
    )
