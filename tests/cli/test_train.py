"""`semsched train`: the command on a handful of records, and its messages."""

import csv
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from vllm_semantic_sched.cli import main, parse, train
from vllm_semantic_sched.policy.facts.decision import DEFAULT_DECISION, decision_of


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """What a test trains on is soon learned: the instant reader takes fewer steps, and the length
    head chooses between two strengths."""
    from vllm_semantic_sched.lab.training import distil, length

    monkeypatch.setattr(distil, "_LEAST_STEPS", 40)
    monkeypatch.setattr(length, "_STRENGTHS", (1.0, 16.0))


def parsed(*arguments):
    return parse(["train", *map(str, arguments)])


def run(*arguments):
    return main(["train", *map(str, arguments)])


def test_training_starts_from_shipped_model_by_default():
    assert parsed("all", "--output", "m").base == "pretrained"
    for kind in ("urgency", "instant"):
        assert parsed(kind, "--output", "m").base == "shipped"
    assert parsed("length", "--csv", "t.csv", "--output", "m").base == "shipped"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A stored network of the shipped one's form, with one small layer, and its instant reader."""
    import numpy
    import torch
    from transformers import DistilBertConfig

    from vllm_semantic_sched.lab.training.stored import save_network
    from vllm_semantic_sched.predict import SHIPPED_WEIGHTS
    from vllm_semantic_sched.predict.instant import FeatureReader, InstantTable
    from vllm_semantic_sched.predict.network import UrgencyLengthClassifier

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=60_000,
        dim=64,
        hidden_dim=64,
        n_layers=1,
        n_heads=2,
        num_labels=5,
        length_bucket_edges=[50],
        length_bucket_means=[10.0, 200.0],
        window=128,
    )
    save_network(UrgencyLengthClassifier(config), SHIPPED_WEIGHTS, folder, "fp16")
    rows = numpy.zeros((FeatureReader.load(SHIPPED_WEIGHTS).rows, 7), numpy.float32)
    InstantTable(rows, rows[0], 5).save(folder)
    return folder


def small(packed):
    """The pretrained encoder with four of its layers, and the first numbers of its vectors."""
    state = {
        name: value[..., :64] if "embeddings" in name else value[tuple([slice(64)] * value.ndim)]
        for name, value in packed.state.items()
        if not name.startswith("transformer.layer.") or int(name.split(".")[2]) < 4
    }
    packed.config.update({"n_layers": 4, "dim": 64, "hidden_dim": 64, "n_heads": 2})
    return replace(packed, state=state)


def write_data(root):
    for name in ("alpagasus", "medquad", "nhamcs_ed_triage"):
        (root / name).mkdir(parents=True)
    prompts = [
        {"instruction": f"Count to {number}.", "input": "", "output": "one " * (number + 1)}
        for number in range(60)
    ]
    (root / "alpagasus" / "dolly_3k.json").write_text(json.dumps(prompts))
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


def test_trains_and_stores_a_model_that_loads(tmp_path, capsys, monkeypatch):
    from vllm_semantic_sched.lab.training import e5, languages, train
    from vllm_semantic_sched.predict.model import TextPredictor

    # The encoder learns each in the same way, from a large file of words.
    monkeypatch.setattr(languages, "LANGUAGES", ("en", "ja"))
    monkeypatch.setattr(train, "read_encoder", lambda path: small(e5.read_encoder(path)))
    write_data(tmp_path / "data")
    options = ("--data", tmp_path / "data", "--output", tmp_path / "model", "--epochs", 1)
    options += ("--scale", 0.0005)
    assert run("all", *options, "--layers", 2) == 0
    assert "bounds of the levels' probabilities" in capsys.readouterr().out
    predictor = TextPredictor.load(str(tmp_path / "model"))
    (prediction,) = predictor.predict(["hello"])
    assert len(prediction.urgency) == 5
    assert len(prediction.length) == len(predictor.length_buckets.means) > 2
    # The encoder is kept, to train other heads on.
    assert run("all", *options, "--base", tmp_path / "model" / "encoder") == 0


def test_student_layers_divide_encoder_layers(capsys):
    for layers in (2, 3, 4, 6, 12):
        assert parsed("all", "--output", "m", "--layers", layers).layers == layers
    for layers in (1, 5, 7, 24):
        with pytest.raises(SystemExit) as stopped:
            parsed("all", "--output", "m", "--layers", layers)
        assert stopped.value.code == 2
        assert "--layers" in (error := capsys.readouterr().err) and "2, 3, 4, 6, 12" in error


def test_missing_data_folder_fails_with_the_option_to_give(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SEMSCHED_DATA", str(tmp_path / "absent"))
    assert run("all", "--output", tmp_path / "model") == 1
    assert "--data DIR" in capsys.readouterr().err


def write_csv(path, columns, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def test_levels_are_learned_from_csv_with_domain_labels(tmp_path, capsys, base):
    from vllm_semantic_sched.predict.model import TextPredictor

    rows = [(f"the whole site is down, case {number}", "P1") for number in range(60)]
    rows += [(f"thank you for the nice help, case {number}", "P5") for number in range(60)]
    table = write_csv(tmp_path / "tickets.csv", ("text", "level"), rows)
    model = tmp_path / "model"
    other = [rows[0], ("nothing works", "P1"), ("thanks a lot", "P5")]
    tests = write_csv(tmp_path / "test.csv", ("text", "level"), other)
    arguments = ("--csv", table, "--domain", "incident", "--output", model, "--epochs", 15)
    assert run("urgency", *arguments, "--test", tests, "--base", base) == 0
    down, thanks = TextPredictor.load(str(model)).predict(
        ["the whole site is down, case 999", "thank you for the nice help, case 999"]
    )
    assert max(range(5), key=down.urgency.__getitem__) == 0
    assert max(range(5), key=thanks.urgency.__getitem__) == 4
    assert json.loads((model / "report" / "report.json").read_text())["n"] == 3
    settings = json.loads((model / "config.json").read_text())
    decision = TextPredictor.load(str(model)).decision
    assert decision == decision_of(settings) != DEFAULT_DECISION
    assert " of the 3 texts for the report are trained on as well" in capsys.readouterr().out


@pytest.mark.parametrize(("trained", "counted"), [(0.64, 0.92), (0.93, 0.92), (None, 0.9)])
def test_model_worse_than_a_count_of_words_is_not_to_be_served(
    tmp_path, capsys, monkeypatch, trained, counted
):
    from vllm_semantic_sched.lab.evaluation.baselines import TFIDF_LEVELS
    from vllm_semantic_sched.lab.training import fine_tune

    tuned = SimpleNamespace(tests=range(16))
    monkeypatch.setattr(fine_tune, "train_urgency", lambda *_: tuned)
    report = {"auc": trained, "baselines": {TFIDF_LEVELS: {"auc": counted}}}
    monkeypatch.setattr(train, "_report", lambda *_: report)
    assert run("urgency", "--csv", tmp_path / "t.csv", "--output", tmp_path / "m") == 0
    warned = "AUC 0.64) than a count of their words (0.92)" in capsys.readouterr().err
    assert warned == (trained == 0.64)


def test_unknown_label_fails_with_its_line(tmp_path, capsys):
    table = write_csv(tmp_path / "t.csv", ("text", "level"), [("a", "P1"), ("b", "whenever")])
    assert run("urgency", "--csv", table, "--domain", "incident", "--output", tmp_path / "m") == 1
    error = capsys.readouterr().err
    assert "line 3" in error
    assert "whenever" in error


class Server(BaseHTTPRequestHandler):
    """Answers long to "explain" and short to all else; refuses one prompt, cuts another."""

    def do_GET(self):
        self._send({"data": [{"id": "served"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "prompt" not in body:  # no chat template
            self.send_error(400)
            return
        if body["prompt"] == "refused":
            self.send_error(400)
            return
        tokens = 300 if "explain" in body["prompt"] else 10
        finish = "length" if body["prompt"] == "cut" else "stop"
        self._send({"usage": {"completion_tokens": tokens}, "choices": [{"finish_reason": finish}]})

    def _send(self, answer):
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/v1"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_lengths_are_learned_from_a_server(tmp_path, server, capsys, base):
    from vllm_semantic_sched.policy.estimates.length import expected_output_tokens
    from vllm_semantic_sched.predict.model import TextPredictor

    prompts = [f"explain matter {number} in depth" for number in range(50)]
    prompts += [f"say word {number}" for number in range(50)] + ["refused", "cut"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    model = tmp_path / "model"
    source = ("--server", server, "--prompts", tmp_path / "prompts.txt")
    assert run("length", *source, "--output", model, "--base", base) == 0
    said, error = capsys.readouterr()
    assert "unseen prompts: " in said and "1 prompts failed" in error
    assert "1 answers reached --max-tokens" in error
    with (model / "lengths.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 101
    predictor = TextPredictor.load(str(model))
    long, short = (
        expected_output_tokens(one.length, predictor.length_buckets, 0, "mean")
        for one in predictor.predict(["explain matter 7 in depth", "say word 7"])
    )
    assert long > 2 * short
    before = TextPredictor.load(str(base)).predict(["she is not breathing"])[0].urgency
    after = predictor.predict(["she is not breathing"])[0].urgency
    assert after == pytest.approx(before, abs=1e-4)


def test_worse_lengths_leave_the_model_as_it_was(tmp_path, capsys, base):
    model = tmp_path / "model"
    rows = [
        (f"{'explain' if n % 2 else 'say'} matter {n}", 300 if n % 2 else 10) for n in range(80)
    ]
    table = write_csv(tmp_path / "lengths.csv", ("text", "output_tokens"), rows)
    assert run("length", "--csv", table, "--output", model, "--base", base) == 0
    before = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    # The same prompts, and nothing in them says how long their answers are.
    even = [(text, 10 + 290 * (n // 2 % 2)) for n, (text, _) in enumerate(rows)]
    tests = write_csv(tmp_path / "tests.csv", ("text", "output_tokens"), rows)
    noise = write_csv(tmp_path / "noise.csv", ("text", "output_tokens"), even)
    again = ("--base", model, "--output", model, "--test", tests)
    assert run("length", "--csv", noise, *again) == 1
    assert "is as it was" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()} == before


def test_missing_server_fails_with_a_message(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("hello\n")
    source = ("--server", "http://127.0.0.1:9", "--prompts", tmp_path / "prompts.txt")
    assert run("length", *source, "--output", tmp_path / "model") == 1
    assert "lists no models" in capsys.readouterr().err
