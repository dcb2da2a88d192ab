"""Engine profiles: what a step costs, ranges, and files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.profile.formula import (
    Batch,
    BatchTerms,
    Environment,
    Ranges,
    Residual,
    load_profile,
    write_profile,
)

PLAIN = load_profile("a100-qwen1.5-7b")
MEASURED = PLAIN.model_copy(
    update={
        "load_start": 1e-4,
        "save_start": 2e-4,
        "batch": BatchTerms(
            step=6.8e-3, per_sequence=3.6e-4, per_prefill=1.2e-3, per_context_token=9.3e-7
        ),
        "ranges": Ranges(
            prefill_tokens=(16, 4095),
            decode_context=(32, 4000),
            decode_batch=(1, 16),
            transfer_tokens=(32, 4096),
        ),
        "residuals": {"step": Residual(points=40, median=0.02, p90=0.09)},
        "environment": Environment(
            date="2026-11-21T12:00:00+00:00",
            vllm="0.32.0",
            torch="2.13.0",
            device="cuda",
            dtype="bfloat16",
            kv_dtype="auto",
            block_size=16,
            kv_bytes_per_token=4096,
            token_budget=2048,
            max_model_len=4096,
            options="MODEL",
            statistic="median of 5",
        ),
    }
)


def test_step_time_is_the_sum_of_its_terms() -> None:
    batch = Batch()
    batch.add_prefill(100, 300)
    batch.add_decode(50)
    batch.add_decode(70)
    batch.add_load(40)
    batch.add_load(0)
    terms = MEASURED.batch_terms
    expected = (
        terms.step + 3 * terms.per_sequence + terms.per_prefill + 120 * terms.per_context_token
    )
    expected += MEASURED.prefill(100, 300) + MEASURED.load(40)
    assert MEASURED.step(batch) == pytest.approx(expected)
    # Without batch terms a decode step takes gamma2.
    assert PLAIN.step(Batch(decodes=9, context=900)) == PLAIN.gamma2


@given(st.integers(1, 9000))
def test_prefill_alone_is_the_sum_of_its_steps(tokens) -> None:
    budget, seconds = 2048, 0.0
    for start in range(0, tokens, budget):
        batch = Batch()
        batch.add_prefill(start, min(start + budget, tokens))
        seconds += MEASURED.step(batch)
    assert MEASURED.prefill_alone(tokens) == pytest.approx(seconds)


def test_warning_about_longer_sequences_names_both_lengths() -> None:
    (doubt,) = MEASURED.warnings(32_768)
    assert "4000" in doubt and "32768" in doubt
    assert MEASURED.warnings(4096) == []
    (unmeasured,) = PLAIN.warnings(512)
    assert "semsched profile" in unmeasured and "A100" in unmeasured


def test_written_profile_is_read_back_unchanged(tmp_path) -> None:
    for profile in (PLAIN, MEASURED):
        write_profile(profile, tmp_path / "p.yaml")
        assert load_profile(tmp_path / "p.yaml") == profile


def test_scaling_multiplies_all_terms_of_a_kind() -> None:
    batch = Batch(decodes=3, context=99, saves=1, saved=50)
    batch.add_prefill(0, 80)
    batch.add_load(30)
    scaled = MEASURED.scaled(2.0, 3.0, 5.0)
    assert scaled.step_prefill(batch) == pytest.approx(2 * MEASURED.step_prefill(batch))
    assert scaled.step_decode(batch) == pytest.approx(3 * MEASURED.step_decode(batch))
    assert scaled.step_transfer(batch) == pytest.approx(5 * MEASURED.step_transfer(batch))
    assert scaled.decode(10, 5) == pytest.approx(3 * MEASURED.decode(10, 5))
