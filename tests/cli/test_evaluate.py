"""`semsched evaluate` on small tables: figures, baselines, files, and error messages."""

import csv
import json
from pathlib import Path

import pytest
from html_pages import read_page
from predictor_examples import TwoLevels

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.lab.datasets import split_of
from vllm_semantic_sched.lab.evaluation.baselines import (
    MAJORITY,
    MEDIAN,
    TFIDF_LENGTHS,
    TFIDF_LEVELS,
)
from vllm_semantic_sched.lab.evaluation.measure import (
    CLAIMS,
    INSTANT,
    NO_CLAIM,
    TRANSLATED_CLAIM,
)
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.predict.instant import InstantReader
from vllm_semantic_sched.predict.model import TextPredictor

COMPOSITIONS = Path(__file__).parents[1] / "data/compositions"
TABLE = (
    "text,level,output_tokens,kind\n"
    "my dad is not breathing,0,,plain\n"
    "write a poem about rain,4,120,asks\n"
    "what is two plus two,4,5,asks\n"
    '"heavy chest pain,\nsweating",1,,plain\n'
)
LEVEL_KEYS = {
    "n_level",
    "accuracy",
    "balanced_accuracy",
    "quadratic_weighted_kappa",
    "recall",
    "precision",
    "auc",
    "urgent_recall",
    "urgent_precision",
    "ece",
    "expected_cost",
    "confusion",
}
LENGTH_KEYS = {"n_length", "kendall_tau", "decile_accuracy", "mean_absolute_error_tokens"}


@pytest.fixture(autouse=True)
def without_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SEMSCHED_DATA", str(tmp_path / "absent"))


@pytest.fixture
def small_model(monkeypatch):
    monkeypatch.setattr(TextPredictor, "load", lambda path, threads: TwoLevels())
    monkeypatch.setattr(InstantReader, "load", lambda path: None)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "messages.csv"
    path.write_text(TABLE)
    return path


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    """All files that the built-in sets read, a few rows each."""
    root = tmp_path / "data"
    prompts = [f"prompt number {number}" for number in range(200)]
    kept = [prompt for prompt in prompts if split_of(prompt) == "test"][:4]
    other = next(prompt for prompt in prompts if split_of(prompt) == "train")
    pairs = [
        {"instruction": prompt, "input": "", "output": "word " * 10 * (place + 1)}
        for place, prompt in enumerate([*kept, other])
    ]
    for folder in ("alpagasus", "medquad", "nhamcs_ed_triage", "ktas", "alpaca_eval_outputs"):
        (root / folder).mkdir(parents=True)
    (root / "alpagasus/random_9k.json").write_text(json.dumps(pairs))
    (root / "alpagasus/dolly_3k.json").write_text(json.dumps(pairs[:2]))
    (root / "medquad/medquad.jsonl").write_text('{"question": "What is flu ?","answer_words": 9}\n')
    answers = {"dataset": "koala", "instruction": "a poem", "outputs": {"A": "x " * 10, "B": ""}}
    more = {"dataset": "koala", "instruction": "a sum", "outputs": {"A": "x", "B": "x " * 20}}
    (root / "alpaca_eval_outputs/alpaca_eval_outputs.jsonl").write_text(
        json.dumps(answers) + "\n" + json.dumps(more) + "\n"
    )
    fields = "hosp_l1_outlier,level,split,text,age,sex,ambulance,pain,injury,pulse,sbp,spo2"
    reasons = [f"reason{place}" for place in range(1, 6)]
    visit = dict.fromkeys([*fields.split(","), *reasons], "")
    visits = [
        visit | {"level": "1", "split": "test", "text": "not breathing"},
        visit | {"level": "4", "split": "test", "text": "a cold"},
        visit | {"level": "3", "split": "train", "text": "a cough"},
    ]
    _write_csv(root / "nhamcs_ed_triage/visits.csv", visits)
    fields = "Sex,Arrival mode,Injury,Mental,Age,NRS_pain,Chief_complain,KTAS_expert,garbled"
    complaint = dict.fromkeys(fields.split(","), "1") | {"Chief_complain": "abd pain"}
    unreadable = complaint | {"Chief_complain": "???", "garbled": "1"}
    _write_csv(root / "ktas/ktas_half.csv", [complaint | {"garbled": "0"}, unreadable])
    monkeypatch.setenv("SEMSCHED_DATA", str(root))
    return root


def _write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def run(*arguments):
    return main(["evaluate", *map(str, arguments)])


def report_in(folder):
    return json.loads((folder / "report.json").read_text())


def test_the_shipped_model_on_a_table(table, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("--data", table, "--output", out) == 0
    report = report_in(out)
    assert {"source", "description", "model", "decision", "n", "baselines"} <= set(report)
    assert set(report) >= LEVEL_KEYS | LENGTH_KEYS
    assert (report["n"], report["n_level"], report["n_length"]) == (4, 4, 2)
    assert len(report["decision"]["bounds"]) == 4
    assert sum(map(sum, report["confusion"])) == 4
    assert sum(part["n"] for part in report["reliability"]) == 4
    assert set(report["baselines"]) == {INSTANT, MAJORITY, MEDIAN}
    text = (out / "report.md").read_text()
    assert text in capsys.readouterr().out


def test_figures_of_a_known_model(small_model, table, tmp_path):
    assert run("--data", table, "--output", tmp_path) == 0
    report = report_in(tmp_path)
    # A hundredth of a chance of level 0 leaves level 1 the cheapest; poem and sum are level 4.
    assert report["recall"] == [1.0, 1.0, None, None, 0.0]
    assert report["expected_cost"] == pytest.approx(6 / 4)
    assert report["urgent_recall"] == 1.0 and report["urgent_precision"] == 0.5
    assert report["kendall_tau"] == pytest.approx(1.0)
    assert report["mean_absolute_error_tokens"] == pytest.approx((80 + 5) / 2)
    assert report["groups"]["kind"]["plain"]["accuracy"] == 1.0
    assert report["groups"]["kind"]["asks"]["false_alarms"] == 1.0
    majority, median = report["baselines"][MAJORITY], report["baselines"][MEDIAN]
    assert majority["recall"] == [0.0, 0.0, None, None, 1.0] and majority["n_length"] == 0
    assert median["mean_absolute_error_tokens"] == pytest.approx(57.5)
    assert median["kendall_tau"] == 0.0 and median["accuracy"] is None
    assert set(majority) == set(median) >= LEVEL_KEYS | LENGTH_KEYS


def test_page_has_report_tables_and_confusion_matrix(small_model, table, tmp_path):
    out = tmp_path / "out"
    assert run("--data", table, "--output", out, "--no-baselines") == 0
    report, page = report_in(out), read_page(out / "report.html")
    header, predictor, *_ = page.tables["Urgency levels (n = 4)"]
    accuracy = dict(zip(header, predictor, strict=True))["accuracy"]
    assert float(accuracy) == pytest.approx(report["accuracy"], abs=0.001)
    confusion = [row[1:] for row in page.tables["Confusion matrix"][1:]]
    assert confusion == [[str(count) for count in row] for row in report["confusion"]]


def test_policy_has_costs_model_has_rule(small_model, tmp_path, monkeypatch):
    table = tmp_path / "one.csv"
    table.write_text("text,level\nhello,1\n")
    policy = tmp_path / "policy.yaml"
    policy.write_text("decision: {missed_cost: [200]}\n")
    monkeypatch.setattr(TwoLevels, "decision", Decision())
    assert run("--data", table, "--output", tmp_path, "--policy", policy) == 0
    report = report_in(tmp_path)
    # At 200 a level, a hundredth of a chance of level 0 is dearer than being early.
    assert report["recall"][1] == 0.0
    assert report["decision"]["missed_cost"] == [200.0]
    assert "expected cost (missed_cost 200)" in (tmp_path / "report.md").read_text()
    monkeypatch.setattr(TwoLevels, "decision", Decision(bounds=(0.5,)))
    assert run("--data", table, "--output", tmp_path) == 0
    assert report_in(tmp_path)["accuracy"] == 1.0
    assert "bounds (0.5)" in (tmp_path / "report.md").read_text()


def test_claims_are_measured_beside_the_plain_texts(small_model, table, tmp_path):
    status = run("--data", table, "--claims", "--no-baselines", "--output", tmp_path / "out")
    assert status == 0
    claims = json.loads((tmp_path / "out" / "report.json").read_text())["claims"]
    assert claims[NO_CLAIM] == {"calm_read_urgent": 1.0, "urgent_read_calm": 0.0}
    assert set(claims) == {NO_CLAIM, *CLAIMS}
    assert "SYSTEM: urgency 0." in (tmp_path / "out" / "report.md").read_text()


def test_missing_labels_leave_every_key_in_place(small_model, tmp_path):
    table = tmp_path / "lengths.csv"
    table.write_text("text,output_tokens\na poem,100\na sum,3\n")
    assert run("--data", table, "--output", tmp_path) == 0
    report = report_in(tmp_path)
    assert set(report) >= LEVEL_KEYS and report["accuracy"] is None and report["n_level"] == 0
    assert "Urgency" not in (tmp_path / "report.md").read_text()


def test_baselines_are_fitted_to_the_given_training_texts(small_model, table, tmp_path, capsys):
    training = tmp_path / "training.csv"
    training.write_text(TABLE.replace("dad", "mother").replace("two", "three"))
    assert run("--data", table, "--output", tmp_path, "--train", training) == 0
    baselines = report_in(tmp_path)["baselines"]
    assert set(baselines) == {MAJORITY, MEDIAN, TFIDF_LEVELS, TFIDF_LENGTHS}
    assert baselines[TFIDF_LEVELS]["auc"] == 1.0
    assert baselines[TFIDF_LENGTHS]["kendall_tau"] == pytest.approx(1.0)
    assert "4 texts" in capsys.readouterr().err
    assert run("--data", table, "--output", tmp_path, "--train", table) == 1
    assert "are the same file" in capsys.readouterr().err


def test_option_all_writes_every_set_and_a_summary(small_model, data_folder, table, tmp_path):
    out = tmp_path / "out"
    assert run("--all", "--data", table, "--output", out, "--train", table.with_name("t.csv")) == 1
    assert run("--all", "--data", table, "--output", out, "--no-baselines") == 0
    sizes = {path.parent.name: report_in(path.parent)["n"] for path in out.glob("*/report.json")}
    assert sizes == {
        "nhamcs-test": 2,
        "ktas": 1,
        "lengths-test": 2 + (split_of("What is flu?") == "test"),
        "alpaca-test": 4,
        "dolly": 2,
        "alpaca-eval": 2,
        "messages": 4,
    }
    text = (out / "summary.md").read_text()
    for name in sizes:
        assert f"[{name}]({name}/report.md)" in text


def test_missed_bars_give_exit_status_1(small_model, table, tmp_path, capsys):
    bars = tmp_path / "bars.yaml"
    bars.write_text("messages: {at_least: {recall.0: 1.0}}\nktas: {at_least: {auc: 0.9}}\n")
    options = ("--data", table, "--output", tmp_path / "out", "--no-baselines", "--bars", bars)
    assert run(*options) == 0
    bars.write_text("messages: {at_most: {groups.kind.*.false_alarms: 0.5}}\n")
    assert run(*options) == 1
    assert "messages: groups.kind.asks.false_alarms is 1.000" in capsys.readouterr().err
    bars.write_text("massages: {at_least: {recall.0: 1.0}}\n")
    assert run(*options) == 1
    assert "bars for massages" in capsys.readouterr().err


def test_folder_of_languages_is_one_set(small_model, tmp_path):
    folder = tmp_path / "urgency"
    folder.mkdir()
    (folder / "en.csv").write_text(TABLE)
    (folder / "es.csv").write_text("text,level,kind\nno respira,0,plain\n")
    assert run("--data", folder, "--output", tmp_path / "out", "--no-baselines", "--claims") == 0
    report = report_in(tmp_path / "out")
    assert report["n"] == 5
    assert report["groups"]["language"]["es"]["n"] == 1
    assert report["groups"]["English and others"]["others"]["n"] == 1
    assert TRANSLATED_CLAIM in report["claims"]


def test_figures_per_answering_model(small_model, data_folder, tmp_path):
    assert run("--builtin", "alpaca-eval", "--output", tmp_path, "--no-baselines") == 0
    report = report_in(tmp_path)
    # A: 13 and 1 tokens, and the poem is predicted longer; B answered the sum only.
    assert report["per_model"]["A"]["kendall_tau"] == pytest.approx(1.0)
    assert report["per_model"]["A"]["mean_absolute_error_tokens"] == pytest.approx((187 + 9) / 2)
    assert report["per_model"]["B"]["n_length"] == 1
    assert report["kendall_tau"] == pytest.approx((1 + 0) / 2)
    assert report["n_length"] == 2


def test_level_names_of_shipped_domains(small_model, tmp_path, capsys):
    table = tmp_path / "messages.csv"
    table.write_text("text,level\nnot breathing,ESI 1\na cold,4\n")
    assert run("--data", table, "--output", tmp_path) == 0
    assert [sum(row) for row in report_in(tmp_path)["confusion"]] == [1, 0, 0, 0, 1]
    table.write_text("text,level\nthe shop is down,sev1\nthanks,4\n")
    assert run("--data", table, "--output", tmp_path, "--domain", "incident") == 0
    assert [sum(row) for row in report_in(tmp_path)["confusion"]] == [1, 0, 0, 0, 1]
    assert run("--data", table, "--output", tmp_path) == 1
    error = capsys.readouterr().err
    assert "line 2, column level" in error and "sev1" in error and "red" in error
    for data in (table, COMPOSITIONS):
        assert run("--data", data, "--output", tmp_path, "--domain", "nonsense") == 1
        assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,level\nhello,7\n", "line 2, column level: 7 is not a level; valid: 0 to 4"),
        ('text,level\n"two\nlines",1\nhello,-1\n', "line 4, column level: -1 is not a level"),
        ('text,level\nhello,1\n"two\nlines",5\n', "line 3, column level: 5"),
        ("text,output_tokens\nhello,0\n", "line 2, column output_tokens: '0'"),
        (
            "text,output_tokens\nhello,many\n",
            "column output_tokens: 'many' is not a positive integer",
        ),
        (
            "text,output_tokens\nhello,nan\n",
            "column output_tokens: 'nan' is not a positive integer",
        ),
        ("text,level\n ,1\n", "line 2, column text: empty"),
        ("text,level\nhello,\n", "line 2: neither a level nor output_tokens"),
        ("text,level\nhello\n", "line 2: neither a level nor output_tokens"),
        ("text,level\nhello, you,1\n", "line 2: more fields than"),
        ("words,level\nhello,1\n", "line 1: needs the column text"),
        ("text,urgency\nhello,1\n", "it has text, urgency"),
        ("text,level\n", "has no rows"),
        ("", "it has none"),
    ],
)
def test_error_in_a_table_names_line_and_column(small_model, tmp_path, capsys, content, message):
    table = tmp_path / "messages.csv"
    table.write_text(content)
    assert run("--data", table, "--output", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert message in error and str(table) in error
    assert not (tmp_path / "out").exists()


def test_table_in_another_encoding_fails_with_its_name(small_model, tmp_path, capsys):
    table = tmp_path / "messages.csv"
    table.write_bytes("text,level\nfièvre,1\n".encode("latin-1"))
    assert run("--data", table, "--output", tmp_path / "out") == 1
    assert "messages.csv is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no texts given"),
        (["--builtin", "ktas", "--all"], "--builtin cannot be combined"),
        (["--builtin", "nhamcs-test"], "SEMSCHED_DATA"),
        (["--all"], "SEMSCHED_DATA"),
        (["--all", "--data", "ktas.csv"], "rename the file"),
        (["--data", "none.csv"], "none.csv"),
        (["--data", "none.csv", "--policy", "nonsense"], "nonsense"),
    ],
)
def test_wrong_options_fail_with_a_message(tmp_path, capsys, options, message):
    assert run(*options, "--output", tmp_path / "out") == 1
    assert message in capsys.readouterr().err


def test_missing_model_fails_with_its_name(table, tmp_path, capsys):
    assert run("--data", table, "--output", tmp_path, "--predictor", tmp_path / "nothing") == 1
    assert "nothing" in capsys.readouterr().err
