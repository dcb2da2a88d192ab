"""Output lengths that sampling parameters state."""

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.structured_output.utils import choice_as_grammar

from vllm_semantic_sched.engine.requests.arrivals import stated_length
from vllm_semantic_sched.policy.facts.job import FREE_LENGTH, StatedLength


def chosen(*choices: str, **params) -> StatedLength:
    """The bounds of a list of choices: as clients send it, and as vLLM's frontend passes it on."""
    sent = StructuredOutputsParams(choice=list(choices))
    grammar = StructuredOutputsParams(grammar=choice_as_grammar(list(choices)))
    found = [
        stated_length(SamplingParams(structured_outputs=one, **params)) for one in (sent, grammar)
    ]
    # Escapes and quotes make the grammar longer than the choices.
    assert found[0].longest <= found[1].longest
    return found[0]


def test_ignored_end_makes_the_limit_exact() -> None:
    assert stated_length(SamplingParams(max_tokens=64, ignore_eos=True)) == (64, 64)
    assert stated_length(SamplingParams(max_tokens=64, ignore_eos=True)).exact


@pytest.mark.parametrize(
    "other_end",
    [
        {"stop": "END"},
        {"stop_token_ids": [7]},
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=3)},
    ],
)
def test_other_ends_leave_the_length_open(other_end) -> None:
    found = stated_length(SamplingParams(max_tokens=64, ignore_eos=True, **other_end))
    assert found == FREE_LENGTH
    assert not found.exact


def test_min_tokens_is_a_lower_bound() -> None:
    assert stated_length(SamplingParams(max_tokens=64, min_tokens=10)) == (10, None)
    assert stated_length(SamplingParams(max_tokens=64)) is FREE_LENGTH
    assert stated_length(None) is FREE_LENGTH  # pooling


def test_choices_bound_the_length_by_their_bytes() -> None:
    assert chosen("yes", "maybe") == (0, 6)
    assert chosen("ja", "größer") == (0, 25)
    assert chosen('a "b" | "c"', "d\n") == (0, 12)
    assert chosen("yes", "no", min_tokens=8) == (4, 4)  # the grammar ends it in any case


def test_other_grammars_are_not_read() -> None:
    for one in (
        {"grammar": 'root ::= "a" | other\nother ::= "b"*'},
        {"grammar": 'root ::= "a" "b"*'},
        {"grammar": choice_as_grammar(["x" * 20_000])},
        {"choice": ["x"] * 2000},
        {"regex": "a{3}"},
        {"json": {"type": "integer"}},
    ):
        params = SamplingParams(
            max_tokens=64, ignore_eos=True, structured_outputs=StructuredOutputsParams(**one)
        )
        assert stated_length(params) == FREE_LENGTH


def test_each_answer_of_n_has_its_own_length() -> None:
    params = SamplingParams(n=3, max_tokens=64, ignore_eos=True)
    parent = ParentRequest.__new__(ParentRequest)
    parent.request_id, parent.sampling_params = "r", params
    parent.child_requests, parent.cached_child_sampling_params = set(), None
    children = [parent.get_child_info(index) for index in range(3)]
    assert [name for name, _ in children] == ["0_r", "1_r", "2_r"]
    assert all(stated_length(child) == (64, 64) for _, child in children)
