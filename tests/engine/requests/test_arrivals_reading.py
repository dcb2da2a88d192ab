"""The HTTP server's reading on its way to the engine."""

from types import SimpleNamespace

import msgspec
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_semantic_sched.engine.requests.arrivals import READING, pass_reading, read_passed
from vllm_semantic_sched.policy.facts.prediction import Prediction

pytestmark = pytest.mark.engine

READINGS = [  # of the instant reader, the only one that the server passes on
    Prediction((0.75, 0.25), (0.1, 0.2, 0.7)),
    Prediction((0.25, 0.75), (0.1, 0.2, 0.7), part=(0.875, 0.125)),
    Prediction((0.2, 0.8), None, unreadable="empty"),
]


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("more", [None, {}, {"urgency": 3}])
def test_reading_arrives_as_it_was(reading, more) -> None:
    params = SamplingParams(extra_args=more)
    pass_reading(params, reading)
    sent = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params))
    assert read_passed(sent.extra_args) == (reading, None)
    assert {**sent.extra_args, READING: 0} == {**(more or {}), READING: 0}


@pytest.mark.parametrize("entry", ["[[1.0, 0.0], null, null]", 7, [1.0, 0.0], True, {}])
def test_what_a_client_sends_in_its_place_is_ignored(entry) -> None:
    params = SimpleNamespace(extra_args=msgspec.json.decode(msgspec.json.encode({READING: entry})))
    pass_reading(params, READINGS[0])  # does not hide the attempt
    reading, problem = read_passed(params.extra_args)
    assert reading is None
    assert READING in problem


@pytest.mark.parametrize("extra_args", [None, {}, {"urgency": 1}, [READING], "text", 7])
def test_no_reading_is_no_problem(extra_args) -> None:
    assert read_passed(extra_args) == (None, None)
