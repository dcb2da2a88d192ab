"""The sentence and the messages that a comparison's page opens with."""

import pytest
from fake_results import add_fake_round, fake_comparison, fake_usage, fake_workload

from vllm_semantic_sched.lab.bench.page import gain_in_words, messages_table

WORKLOAD = fake_workload(40)


@pytest.mark.parametrize(
    ("paces", "said"),
    [
        ({"fcfs": 1.0, "semantic": 0.1}, ("read from the text", "10 times sooner", "0.10 times")),
        ({"fcfs": 99.8, "semantic": 0.998}, ("after 1 s", "took 100 s", "100 times sooner")),
        ({"fcfs": 0.5, "semantic": 1.0}, ("read from the text", "2 times later", "2.00 times")),
        ({"fcfs": 1.0, "semantic-true": 1.02}, ("given as a hint", "about as soon", "took about")),
    ],
)
def test_sentence_is_right_for_gains_losses_and_ties(paces, said) -> None:
    sentence = gain_in_words(fake_comparison(WORKLOAD, paces).mixes["even"])
    assert all(part in sentence for part in said), sentence


@pytest.mark.parametrize(("elsewhere", "told"), [(0.15, True), (0.81, False)])
def test_busy_machine_gets_a_warning_in_place_of_the_gain(elsewhere, told) -> None:
    made = fake_comparison(WORKLOAD, {"fcfs": 1.0})
    add_fake_round(made, WORKLOAD, "semantic", 0.1, usage=fake_usage(elsewhere=elsewhere))
    sentence = gain_in_words(made.mixes["even"])
    assert ("10 times sooner" in sentence) == told
    assert ("used up to 81% of the machine" in sentence) != told


def test_no_story_without_reference_or_own_scheduler() -> None:
    for name in ("fcfs", "semantic"):
        assert gain_in_words(fake_comparison(WORKLOAD, {name: 1.0}).mixes["even"]) == ""


def test_messages_show_level_and_first_words_per_scheduler() -> None:
    made = fake_comparison(WORKLOAD, {"fcfs": 1.0, "priority": 0.5})
    add_fake_round(made, WORKLOAD, "semantic", 0.25)
    reader = made.mixes["even"]["semantic"]
    for record in reader.records:
        record.read_level, record.answer = 4 - record.level, f"Answer\nto {record.index}."
    table = messages_table("even", made.mixes["even"])
    assert table is not None and len(table.columns) == 7
    assert [row[1] for row in table.rows] == [0, 0, 0, 1, 2, 3, 4]
    for text, level, read, fcfs, priority, ours, answer in table.rows:
        index = next(n for n, one in enumerate(WORKLOAD.requests) if answer == f"Answer to {n}.")
        assert WORKLOAD.requests[index].text.startswith(text.removesuffix("...")[:60])
        assert read == 4 - level and len(text) <= 110
        assert (fcfs, priority, ours) == pytest.approx((1.0, 0.5, 0.25))
    assert messages_table("even", fake_comparison(WORKLOAD, {"fcfs": 1.0}).mixes["even"]) is None
