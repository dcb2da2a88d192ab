"""`semsched profile`: derived profiles, and options that are rejected before an engine starts."""

import json

import pytest

from vllm_semantic_sched import cli
from vllm_semantic_sched.policy.profile.devices import device_named
from vllm_semantic_sched.policy.profile.formula import load_profile
from vllm_semantic_sched.policy.profile.model_shape import ModelShape
from vllm_semantic_sched.policy.profile.roofline import Roofline
from vllm_semantic_sched.sim.scenario import load_scenarios

CONFIG = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def analytic(model, *options: str) -> int:
    return cli.main(["profile", "--analytic", "--model", str(model), *options])


def test_derived_profile_is_shown_written_and_usable_for_a_plan(model, tmp_path, capsys) -> None:
    path = tmp_path / "h100.yaml"
    options = ("--device", "h100", "--tensor-parallel", "2", "--output", str(path))
    assert analytic(model, *options) == 0
    shape = ModelShape.from_config("some-model", CONFIG)
    roofline = Roofline(shape, device_named("h100"), 2)
    assert load_profile(path) == roofline.profile()
    said = capsys.readouterr().out
    table, _, command = said.partition("written:")
    assert max(map(len, table.splitlines())) <= 100
    assert "some-model on 2 x h100" in table
    assert f"{roofline.profile().prefill_alone(8000) * 1e3:,.1f}" in table
    # The settings of the printed command are those that `semsched plan` understands.
    words = command.replace("\\\n", " ").split()
    given = dict(word.split("=") for word in words if word.startswith("engine."))
    assert int(given["engine.kv_blocks"]) == roofline.kv_tokens // 16
    changes = {"engine.profile": given["engine.profile"], "engine.batch": None}
    assert load_scenarios("capacity", changes)[0].profile == roofline.profile()


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (CONFIG, ("--device", "h1000"), "Did you mean 'h100'"),
        ({"hidden_size": 64}, ("--device", "h100"), "lacks num_hidden_layers"),
        ([], ("--device", "h100"), ""),
        (None, ("--device", "h100"), "config.json"),
    ],
)
def test_profile_that_cannot_be_derived(model, config, options, message, capsys) -> None:
    file = model / "config.json"
    file.unlink() if config is None else file.write_text(json.dumps(config))
    assert analytic(model, *options) == 2
    said = capsys.readouterr().err
    assert said.startswith("semsched profile: ") and message in said


def test_analytic_needs_a_model(capsys) -> None:
    assert cli.main(["profile", "--analytic", "--device", "h100"]) == 2
    assert "--model" in capsys.readouterr().err
    assert cli.main(["profile", "--output", "x.yaml"]) == 2
    assert "-- MODEL" in capsys.readouterr().err


def test_options_are_checked_before_the_engine_starts(capsys) -> None:
    assert cli.main(["profile", "--", "model"]) == 2
    assert "--output or --check" in capsys.readouterr().err
    assert cli.main(["profile", "--check", "no-such", "--", "model"]) == 2
    assert "no-such" in capsys.readouterr().err
