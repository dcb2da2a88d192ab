"""Checking a profile: a good one passes, a bad one fails."""

from vllm_semantic_sched.lab.profiling.check import Point, judge, make_lengths
from vllm_semantic_sched.lab.profiling.measure import geometric_steps
from vllm_semantic_sched.policy.profile.formula import BatchTerms, EngineProfile

PROFILE = EngineProfile(
    hardware="h",
    model="m",
    source="s",
    alpha1=4e-8,
    alpha2=2e-4,
    beta_load=1e-6,
    beta_save=1e-6,
    gamma1=1e-6,
    gamma2=7e-3,
    batch=BatchTerms(step=7e-3),
)


def measured(truth: EngineProfile, profile: EngineProfile) -> list[Point]:
    points = []
    for prompt, generated in make_lengths(8447):
        tokens = prompt + generated
        points.append(
            Point(
                prompt,
                generated,
                recompute=truth.prefill_alone(tokens, 2048),
                swap=truth.save(tokens) + truth.load(tokens),
                predicted_recompute=profile.prefill_alone(tokens, 2048),
                predicted_swap=profile.save(tokens) + profile.load(tokens),
            )
        )
    return points


def test_points_cover_64_to_8000_tokens() -> None:
    totals = [sum(pair) for pair in make_lengths(8447)]
    assert len(totals) >= 30
    assert min(totals) <= 70 and max(totals) >= 8000
    assert all(sum(pair) <= 300 for pair in make_lengths(300))


def test_perfect_profile_meets_the_targets() -> None:
    verdict = judge(PROFILE, measured(PROFILE, PROFILE))
    assert verdict.met
    assert verdict.recompute == verdict.swap == (0.0, 0.0)
    assert verdict.worst_choice > 0.95


def test_wrong_profile_misses_the_targets_and_chooses_badly() -> None:
    wrong = PROFILE.scaled(2.0, 1.0, 1.0)
    verdict = judge(wrong, measured(PROFILE, wrong))
    assert not verdict.met
    assert verdict.recompute[0] > 0.3
    assert verdict.choice == 1.0  # copies are so cheap here that no error matters
    assert verdict.worst_choice < 0.95
    backwards = PROFILE.scaled(1e-4, 1.0, 1e3)
    assert judge(backwards, measured(PROFILE, backwards)).choice < 0.95


def test_geometric_steps_end_at_the_last_value() -> None:
    assert geometric_steps(16, 300, 2) == [16, 32, 64, 128, 300]
    assert geometric_steps(1, 16, 4) == [1, 4, 16]
    assert geometric_steps(32, 20, 4) == [20]
