"""Options, tables and exit status of `semsched bench`."""

import argparse
import io
import json

import pytest
from fake_results import (
    add_fake_round,
    fake_comparison,
    fake_records,
    fake_usage,
    fake_workload,
)
from rich.console import Console

from vllm_semantic_sched.cli import emulated, main, parse
from vllm_semantic_sched.lab.bench import command_line, overhead
from vllm_semantic_sched.lab.bench.results import Round
from vllm_semantic_sched.lab.bench.schedulers import NAMES, parse_schedulers
from vllm_semantic_sched.lab.bench.usage import STEPS
from vllm_semantic_sched.lab.device.gpus import SHIPPED
from vllm_semantic_sched.lab.device.model import SHAPES

WORKLOAD = fake_workload()


@pytest.fixture
def screen() -> Console:
    return Console(file=io.StringIO(), width=160)


def row_of(text: str, title: str) -> list[str]:
    return next(line for line in text.splitlines() if title in line).split()


def test_each_level_has_a_table_with_a_row_per_scheduler(screen):
    made = fake_comparison(WORKLOAD, dict.fromkeys(NAMES, 0.1))
    command_line.print_mix(screen, "even", made.mixes["even"])
    text = screen.file.getvalue()
    assert all(f"level {level}" in text for level in range(5))
    assert text.count("Semantic (text)") == 10  # rounds, totals, order, five levels, all, misread


@pytest.mark.parametrize("gpu", [True, False])
def test_a_real_model_on_a_cpu_is_served_in_short_steps(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "has_gpu", lambda: gpu)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    parser = argparse.ArgumentParser()
    command_line.add_plan_arguments(parser, requests=20, max_burst=5, overload=2.0)
    given = ["--model", str(tmp_path), "--output", str(tmp_path), "--seats", "4096"]
    for ends in ([], ["--natural-ends"]):
        plan = command_line.make_plan(
            parser.parse_args(given + ends), parse_schedulers("fcfs", None), ["rare"]
        )
        short = ("--max-num-batched-tokens", "4096") if ends and not gpu else ()
        assert plan.server.extra_args == short


def test_tables_fit_100_columns(screen):
    workload = fake_workload(tenants=(0.5, 0.5))
    made = fake_comparison(workload, {"fcfs": 9.87})
    names = ("priority", "semantic", "semantic-true", "semantic-known", "semantic-true@no-holds")
    usage = fake_usage(0.123, 23.4, {STEPS: 12345.0, "vllm:num_preemptions_total": 123.0}, 0.12)
    for name in names:
        for number in (1, 2):
            add_fake_round(made, workload, name, 12.34, number, usage=usage)
    command_line.print_mix(screen, "even", made.mixes["even"])
    lines = screen.file.getvalue().splitlines()
    lines = [line for line in lines if "answer lengths" not in line]
    assert any("Jain's index" in line for line in lines)
    assert max(len(line.rstrip()) for line in lines) <= 100
    assert not any("\u2026" in line for line in lines)


def test_rounds_are_all_shown_with_their_use(screen):
    made = fake_comparison(WORKLOAD, {})
    for number, (pace, steal) in enumerate(((0.1, 0.5), (0.3, 0.0), (0.2, 0.02)), start=1):
        add_fake_round(made, WORKLOAD, "fcfs", pace, number, usage=fake_usage(steal))
    command_line.print_mix(screen, "even", made.mixes["even"])
    lines = [line.split() for line in screen.file.getvalue().splitlines()]
    shown = [(*line[2:4], " ".join(line[11:])) for line in lines if line[:2] == ["vLLM", "FCFS"]]
    assert shown[:3] == [("1", "50.0", "noisy"), ("2", "0.0", "best p99"), ("3", "2.0", "p99")]


def test_idle_engine_has_a_row_for_urgency_0(screen):
    made = fake_comparison(WORKLOAD, {"fcfs": 0.2})
    command_line.print_mix(screen, "even", made.mixes["even"])
    idle = row_of(screen.file.getvalue(), "idle engine")
    assert idle[2:5] == ["0.050", "0.050", "0.050"]
    assert "4.000" in screen.file.getvalue()  # FCFS over idle


def test_misread_requests_are_printed(screen):
    made = fake_comparison(WORKLOAD, {})
    records = fake_records(WORKLOAD, 0.1)
    urgent = next(record for record in records if record.level == 0)
    urgent.read_level = 3
    made.add(parse_schedulers("semantic", None)[0], WORKLOAD, Round(1, records))
    command_line.print_mix(screen, "even", made.mixes["even"])
    text = screen.file.getvalue()
    assert "1 of level 0 read as less urgent" in text
    assert WORKLOAD.requests[urgent.index].text[:40] in text
    assert row_of(text, WORKLOAD.requests[urgent.index].text[:40])[:2] == [str(urgent.index), "3"]


def test_problems_are_printed_and_set_the_exit_status(screen):
    assert command_line.print_problems(screen, []) == 0
    assert command_line.print_problems(screen, ["one thing", "another"]) == 1
    assert screen.file.getvalue() == "one thing\nanother\n"


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, 2), (FileNotFoundError, 2), (RuntimeError, 1)]
)
def test_errors_set_the_exit_status(error, status, capsys, monkeypatch):
    def fail(*args) -> None:
        raise error("because")

    monkeypatch.setattr(overhead, "measure_simulator", fail)
    assert main(["bench", "simulator"]) == status
    assert capsys.readouterr().err == "semsched bench: because\n"


def test_run_refuses_a_model_without_end_token(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    command = ["bench", "run", "--model", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main(command) == 2
    assert "eos_token_id" in capsys.readouterr().err


def test_run_refuses_long_prompts_for_a_short_model(tmp_path, capsys):
    config = {"eos_token_id": 2, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["bench", "run", "--model", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main([*command, "--long-prompts", "0.2"]) == 2
    assert "--size small" in capsys.readouterr().err


@pytest.fixture
def prepared(tmp_path):
    """The arguments of a run on a device, prepared, and the device."""

    def prepare(*words: str):
        args = parse(["bench", "run", "--output", str(tmp_path), *words])
        return args, emulated.prepare(args)

    return prepare


def test_device_defaults_fill_missing_options(prepared, tmp_path):
    args, gpu = prepared("--device", "h100", "--seats", "16", "--overload=3")
    assert (args.seats, args.overload, args.requests, args.mix) == (16, 3.0, 600, "rare")
    assert (args.prompts, args.blocks, args.profile) == ("chat", 0, gpu.profile)
    assert prepared("--device", "h100")[0].seats == gpu.seats != 16
    assert (tmp_path / "model" / "tokenizer.model").is_file()
    args.gap = 1.0  # no need of the capacity
    plan = command_line.make_plan(args, parse_schedulers("fcfs", None), ["rare"])
    server = emulated.on_device(plan, gpu, args).server
    assert server.device == {"profile": gpu.profile, **gpu.memory}
    assert "--max-model-len" in server.extra_args and server.num_blocks is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "--model or --device is required"),
        ("--device h100 --natural-ends", "the device ends the answers"),
        ("--device h100 --engines 2", "has one engine"),
        ("--device h1000", "Did you mean 'h100'"),
        ("--device h100 --prompts no-such-file", "nor a file"),
    ],
)
def test_run_refuses_what_no_device_can_do(words, problem, tmp_path, capsys):
    assert main(["bench", "run", "--output", str(tmp_path), *words.split()]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.engine
def test_capacity_of_a_device_is_found_in_virtual_time():
    one, two = (emulated._capacity("short", 40, 0, SHIPPED["h100"], seats) for seats in (5, 10))
    assert 500 < one < two < 2 * one  # tokens per second of 4 ms steps


def test_simulator_prints_a_row_per_size(capsys):
    assert main(["bench", "simulator", "--requests", "200", "400"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row and row[0].isdigit()] == ["200", "400"]


@pytest.mark.engine
def test_overhead_measures_every_policy_and_size(tmp_path, capsys):
    path = tmp_path / "overhead.json"
    sizes = ["--waiting", "10,20", "--running", "16", "--steps", "10"]
    assert main(["bench", "overhead", *sizes, "--everything", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["microseconds"]
    names = ("stock", "ems", "fcfs", "everything", "ems, text", "everything, text")
    expected = {(name, size) for name in names for size in (10, 20)}
    assert {(one["scheduler"], one["waiting"]) for one in figures} == expected
    assert all(one["schedule"]["p50"] > 0 for one in figures)
    assert all(one["prepare"]["p50"] > 0 for one in figures if one["scheduler"] == "ems, text")
    printed = capsys.readouterr().out
    assert "whole step" in printed and "preempts for it" in printed
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "idefics3-8b", "e5-mistral-7b"])
def test_model_of_a_shape_has_a_tokenizer_and_no_weights(shape, tmp_path, capsys):
    pytest.importorskip("mistral_common")
    command = ["bench", "make-model", str(tmp_path), "--shape", shape]
    for said in ("wrote", "already there:"):
        assert not main(command)
        assert capsys.readouterr().out == f"{said} {tmp_path}\n"
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == SHAPES[shape]
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    image = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}.get("<image>")
    assert image == config.get("image_token_id")
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("options", [["--help"], ["--shape", "llama-9"]])
def test_shapes_are_named(options, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "make-model", str(tmp_path), *options])
    printed = capsys.readouterr()
    assert all(shape in (printed.out + printed.err).replace("\n", "") for shape in SHAPES)
