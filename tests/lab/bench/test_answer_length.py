"""The logits processor that ends answers at a given length, with batches as vLLM describes them."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality  # noqa: E402

from vllm_semantic_sched.lab.bench.answer_length import (  # noqa: E402
    AnswerLength,
    SecondInterface,
)

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
    return read_verdicts(before, processor.apply(logits))


def read_verdicts(before, after) -> str:
    others = [token for token in range(5) if token != END]
    assert torch.equal(after[:, others], before[:, others])
    marks = []
    for row in range(len(after)):
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


# The second model runner: a slot for each request, rows in another order in every step


class SecondRunner:
    """The runner's part: prompts by slot, and rows as (slot, tokens written so far)."""

    def __init__(self, slots=4) -> None:
        self.prompts = torch.zeros(slots, dtype=torch.int32)
        self.states = SimpleNamespace(
            max_num_reqs=slots,
            device=torch.device("cpu"),
            prompt_len=SimpleNamespace(gpu=self.prompts),
        )
        self.processor = AnswerLength(None, self.states)

    def add(self, slot, length=None, prompt=3, stops=()) -> bool:
        self.prompts[slot] = prompt
        given = params(length)
        given._all_stop_token_ids = set(stops)
        changes = self.processor.add_request(slot, given)
        self.processor.apply_staged_writes()
        return changes

    def logits(self, *rows):
        """Before and after; a row's position is that of the token fed last."""
        slots = torch.tensor([slot for slot, _ in rows], dtype=torch.int32)
        written = torch.tensor([count for _, count in rows])
        context = SimpleNamespace(
            expanded_idx_mapping=slots, pos=self.prompts[slots.long()] - 1 + written
        )
        before = torch.arange(len(rows) * 5, dtype=torch.float32).reshape(-1, 5)
        return before, self.processor.apply(before.clone(), context)

    def verdicts(self, *rows) -> str:
        return read_verdicts(*self.logits(*rows))


def test_each_runner_gets_its_own_interface(processor):
    second = SecondRunner().processor
    assert isinstance(second, SecondInterface) and not isinstance(processor, SecondInterface)
    assert issubclass(AnswerLength, SecondInterface)  # vLLM asks this of the class it is given


def test_second_runner_ends_an_answer_at_its_length():
    runner = SecondRunner()
    assert runner.add(2, length=3) and not runner.add(1)
    steps = [runner.verdicts((1, count), (2, count)) for count in range(4)]
    assert steps == ["uf", "uf", "uc", "uc"]


def test_second_runner_follows_rows_and_slots():
    runner = SecondRunner()
    runner.add(0, length=1, prompt=7)
    runner.add(3, length=4, prompt=2)
    assert runner.verdicts((3, 1), (0, 0)) == "fc"
    assert runner.verdicts((3, 1), (3, 2), (3, 3)) == "ffc"  # the rows of drafts
    runner.add(0)  # its slot goes to a request without the field
    assert runner.verdicts((0, 0), (3, 3)) == "uc"


def test_second_runner_forbids_all_end_tokens():
    runner = SecondRunner()
    runner.add(0, length=2)
    runner.add(1, length=2, stops=(4, 0))
    _, after = runner.logits((0, 0), (1, 0), (2, 0))
    assert torch.isneginf(after).long().tolist() == [[0, 0, 1, 0, 0], [1, 0, 1, 0, 1], [0] * 5]
    _, after = runner.logits((1, 1))
    assert after.argmax().item() == END


def test_second_runner_sees_a_request_when_its_step_begins():
    runner = SecondRunner()
    runner.add(0, length=1)
    given = params(9)
    runner.processor.add_request(0, given)  # while a step of the last request is on the device
    assert runner.verdicts((0, 0)) == "c"
    runner.processor.apply_staged_writes()
    assert runner.verdicts((0, 0)) == "f"
