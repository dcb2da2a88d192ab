"""The data readers on small files, and the stability of the split."""

import json

import pytest

from vllm_semantic_sched.lab import datasets


def test_split_is_stable_and_about_80_10_10():
    assert [datasets.split_of(key) for key in ("write a poem about rain", "a", "6")] == [
        "train",
        "test",
        "validation",
    ]
    splits = [datasets.split_of(f"prompt {number}") for number in range(5000)]
    assert 0.77 < splits.count("train") / 5000 < 0.83
    assert 0.08 < splits.count("test") / 5000 < 0.12


def test_instruction_pairs_join_input_and_count_tokens(tmp_path):
    folder = tmp_path / "alpagasus"
    folder.mkdir()
    record = {"instruction": "Add.", "input": "1 and 2", "output": "one two three four"}
    empty = {"instruction": "Say nothing.", "input": "", "output": " "}
    for name in ("random_9k.json", "dolly_3k.json"):
        (folder / name).write_text(json.dumps([record, empty]))
    pairs = list(datasets.instruction_pairs(tmp_path))
    assert pairs == [datasets.TextLength("Add.\n1 and 2", 5)] * 2


def test_medical_questions_occur_once(tmp_path):
    (tmp_path / "medquad").mkdir()
    line = json.dumps({"question": "What is flu ?", "answer_words": 100})
    (tmp_path / "medquad" / "medquad.jsonl").write_text(f"{line}\n{line}\n")
    assert list(datasets.medical_questions(tmp_path)) == [datasets.TextLength("What is flu?", 130)]


def test_triage_visits_start_at_level_zero_and_drop_outliers(tmp_path):
    (tmp_path / "nhamcs_ed_triage").mkdir()
    columns = (
        "level,text,age,sex,ambulance,pain,pulse,sbp,spo2,injury,"
        "reason1,reason2,reason3,reason4,reason5,hosp_l1_outlier,split"
    )
    rows = [
        "1,Someone.,40,male,yes,,90,120,97,no,Chest pain,,,,,0,val",
        "1,Someone.,40,male,yes,,90,120,97,no,Chest pain,,,,,1,train",
    ]
    (tmp_path / "nhamcs_ed_triage" / "a.csv").write_text("\n".join([columns, *rows]) + "\n")
    (visit,) = datasets.triage_visits(tmp_path)
    assert (visit.level, visit.split, visit.ambulance, visit.pain) == (0, "validation", True, None)
    assert visit.reasons == ("Chest pain",)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"medquad\.jsonl"):
        list(datasets.medical_questions(tmp_path))
    with pytest.raises(FileNotFoundError, match="nhamcs_ed_triage"):
        list(datasets.triage_visits(tmp_path))


def test_answers_of_several_models_leave_out_empty_ones(tmp_path):
    (tmp_path / "alpaca_eval_outputs").mkdir()
    records = [
        {"instruction": "a poem", "outputs": {"A": "x " * 10, "B": ""}},
        {"instruction": "a sum", "outputs": {"A": "x", "B": "x " * 20}},
    ]
    path = tmp_path / "alpaca_eval_outputs" / "alpaca_eval_outputs.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    answers = list(datasets.alpaca_eval_answers(tmp_path))
    assert answers == [("a poem", {"A": 13}), ("a sum", {"A": 1, "B": 26})]


def test_instruction_pairs_of_one_file(tmp_path):
    (tmp_path / "alpagasus").mkdir()
    record = {"instruction": "Add.", "output": "three"}
    for name, count in (("random_9k.json", 5), ("dolly_3k.json", 2)):
        (tmp_path / "alpagasus" / name).write_text(json.dumps([record] * count))
    assert len(list(datasets.instruction_pairs(tmp_path, ("dolly_3k.json",)))) == 2
    assert len(list(datasets.instruction_pairs(tmp_path))) == 7
