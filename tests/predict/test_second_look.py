"""Which parts of a prompt are read again, and that first readings never wait for it."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_semantic_sched.policy.config.estimates import Predictor
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.predict import service as service_module
from vllm_semantic_sched.predict.second_look import MOST_PARTS, parts_of
from vllm_semantic_sched.predict.service import PredictionService

LONG = " ".join(f"word{number}" for number in range(400))
CALM, URGENT = Prediction((0.0, 1.0)), Prediction((1.0, 0.0))


def test_parts_cover_text_outside_the_window() -> None:
    parts = parts_of(LONG[:1900])
    assert 1 < len(parts) <= MOST_PARTS
    for part in parts:
        assert part.startswith("word0 word1 ") and part.endswith(LONG[1880:1900])
    for number in range(40, 190):
        assert any(f"word{number} " in part for part in parts), number


def test_what_was_seen_is_not_read_again() -> None:
    assert parts_of("") == parts_of("He is not breathing.") == []
    chat = "<|im_start|>assistant\n" + LONG + "<|im_end|>\n<|im_start|>user\nthanks<|im_end|>"
    assert parts_of(chat) == []  # the model's own words were no part of the first reading


@given(st.text(), st.integers(1, 4000))
@settings(max_examples=50)
def test_any_text_has_at_most_eight_short_parts(text: str, times: int) -> None:
    parts = parts_of(text * times)
    assert len(parts) <= MOST_PARTS
    assert all(len(part.encode("utf-8", "replace")) <= 3.2 * 128 for part in parts)


@pytest.fixture(autouse=True)
def small_batches_and_no_memory(monkeypatch) -> None:
    monkeypatch.setattr(service_module, "MAX_BATCH", 2)
    monkeypatch.setattr(service_module, "CACHE_SIZE", 0)


def make_service() -> PredictionService:
    """A service whose thread the test plays."""
    return PredictionService(Predictor(), logging.getLogger("test"))


def look(service: PredictionService, name: str, level: int = 1, key: float = 0.0) -> None:
    service.look_again(name, level, (False, key), lambda: LONG)


def read(service: PredictionService, answer: Prediction = CALM) -> list[str]:
    """One turn of the service's thread; the texts that it reads."""
    batch = service._next_batch()
    assert batch is not None
    service._deliver(batch, [answer] * len(batch))
    return [prompt.text for prompt in batch.values()]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 4)),
        st.tuples(st.just("look"), st.integers(0, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 60)),
        st.tuples(st.just("read"), st.booleans()),
    ),
    max_size=60,
)


@given(operations)
def test_second_looks_never_delay_a_first_reading(operations) -> None:
    """The passes that begin while prompts wait are those of a service without second looks."""
    service, without = make_service(), make_service()
    for number, (operation, value) in enumerate(operations):
        if operation == "submit":
            assert service.submit(str(number), f"{number}", value)
            assert without.submit(str(number), f"{number}", value)
        elif operation == "look":
            look(service, f"look {number}", key=value)
        elif operation == "cancel":
            service.cancel(str(value))
            service.cancel(f"look {value}")
            without.cancel(str(value))
        elif service.pending:
            assert read(service) == read(without)
        elif service.second_looks:
            assert len(read(service, URGENT if value else CALM)) <= 1
        assert service.pending == without.pending


def test_prompt_that_comes_while_parts_are_cut_goes_first() -> None:
    service = make_service()

    def text() -> str:
        service.submit("newcomer", "help")
        return LONG

    service.look_again("hidden", 1, (False, 0.0), text)
    assert read(service) == []
    assert read(service) == ["help"]
    assert read(service) == [parts_of(LONG)[0]]


def test_most_doubtful_request_is_read_until_most_urgent() -> None:
    service = make_service()
    look(service, "calm", key=-1.0)
    look(service, "doubtful", key=-2.0)
    read(service, Prediction((0.9, 0.1)))  # not certain enough
    read(service, URGENT)
    assert service.drain() == [("doubtful", Prediction((1.0, 0.0), again=True))]
    for _ in range(MOST_PARTS):
        assert len(read(service)) == 1
    assert read(service) == [] and not service.second_looks
    assert service.drain() == [] and service.second_looks.ended == {True: 1, False: 1}


def test_look_ends_with_its_request_and_with_a_failure() -> None:
    service = make_service()
    look(service, "ended")
    batch = service._next_batch()
    service.cancel("ended")
    service._deliver(batch, [URGENT])
    assert service.drain() == [] and not service.second_looks
    look(service, "failed")
    read(service, None)
    assert not service.second_looks and service.drain() == []
    assert service.second_looks.ended == {True: 0, False: 1}


def test_prompt_that_cannot_be_cut_costs_nothing_but_its_look() -> None:
    service = make_service()

    def broken() -> str:
        raise RuntimeError("Already borrowed")

    service.look_again("a", 1, (False, 0.0), broken)
    assert read(service) == [] and not service.second_looks
