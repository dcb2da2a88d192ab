"""The size of forward passes."""

from vllm_semantic_sched.predict.process import PassSize


def largest(size: PassSize, length: int) -> int:
    return max(count for count in range(1, 500) if size.fits([length] * count))


def test_pass_holds_as_many_texts_as_the_measured_speed_allows() -> None:
    size = PassSize(0.1)
    for _ in range(30):
        size.measured([400] * 5, 0.05)  # 10 ms a text
    assert largest(size, 400) in (9, 10)
    assert largest(size, 200) in (19, 20)


def test_slowdown_counts_at_once_and_a_single_text_always_fits() -> None:
    size = PassSize(0.1)
    for _ in range(30):
        size.measured([400] * 5, 0.05)
    size.measured([400] * 5, 5.0)
    assert largest(size, 400) == 1
    assert size.fits([10**6])


def test_texts_are_padded_to_the_longest_and_cut_to_the_window() -> None:
    size = PassSize(0.1)
    assert not size.fits([10] * 7 + [1000])
    assert size.fits([10] * 7)
    before = largest(size, 1008)
    assert largest(size, 50_000) == before
