"""The logits processor that ends answers at a given length, with batches as vLLM describes them."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality  # noqa: E402

from vllm_semantic_sched.lab.bench.answer_length import AnswerLength  # noqa: E402

END = 2


def params(length=None) -> SamplingParams:
    extra = None if length is None else {"bench_answer": [length, END]}
    return SamplingParams(extra_args=extra)


def update(size, added=(), removed=(), moved=()) -> BatchUpdate:
    return BatchUpdate(size, tuple(removed), tuple(added), tuple(moved))


@pytest.fixture
def processor() -> AnswerLength:
    return AnswerLength(None, torch.device("cpu"), False)


def verdicts(processor, rows) -> str:
    """A letter per row: forbidden, certain or untouched end token."""
    logits = torch.arange(rows * 5, dtype=torch.float32).reshape(rows, 5)
    before = logits.clone()
    after = processor.apply(logits)
    others = [token for token in range(5) if token != END]
    assert torch.equal(after[:, others], before[:, others])
    marks = []
    for row in range(rows):
        if after[row, END] == before[row, END]:
            marks.append("u")
        else:
            marks.append("c" if after[row].argmax() == END else "f")
    return "".join(marks)


def test_end_token_is_forbidden_until_the_last_position(processor):
    written: list[int] = []
    processor.update_state(update(2, [(0, params(3), [1], written), (1, params(), [1], [])]))
    marks = []
    for _ in range(3):
        marks.append(verdicts(processor, 2))
        written.append(7)
        processor.update_state(None)
    assert marks == ["fu", "fu", "cu"]


def test_answer_of_one_token_ends_at_once(processor):
    processor.update_state(update(1, [(0, params(1), [1], [])]))
    assert verdicts(processor, 1) == "c"


def test_resumed_request_counts_the_tokens_that_it_has(processor):
    processor.update_state(update(1, [(0, params(4), [1], [7, 7])]))
    assert verdicts(processor, 1) == "f"
    processor.update_state(update(1, removed=[0]))
    assert verdicts(processor, 1) == "u"
    processor.update_state(update(1, [(0, params(4), [1], [7, 7, 7])]))
    assert verdicts(processor, 1) == "c"


def test_rows_follow_their_requests(processor):
    added = [(0, params(1), [1], []), (1, params(9), [1], []), (2, params(), [1], [])]
    processor.update_state(update(3, added))
    assert verdicts(processor, 3) == "cfu"
    processor.update_state(update(3, moved=[(0, 1, MoveDirectionality.SWAP)]))
    assert verdicts(processor, 3) == "fcu"
    processor.update_state(
        update(1, removed=[0, 1], moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)])
    )
    assert verdicts(processor, 1) == "u"


def test_all_end_tokens_of_the_model_are_forbidden(processor):
    both = params(9)
    both._all_stop_token_ids = {END, 4}
    processor.update_state(update(1, [(0, both, [1], [])]))
    logits = processor.apply(torch.zeros(1, 5))
    assert torch.isneginf(logits[0]).tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("wrong", [3, [3], [0, 2], ["3", 2], [True, 2]])
def test_unusable_field_raises(wrong):
    AnswerLength.validate_params(params(3))
    AnswerLength.validate_params(params())
    with pytest.raises(ValueError, match="bench_answer"):
        AnswerLength.validate_params(SamplingParams(extra_args={"bench_answer": wrong}))
