"""scripts/gpu_check.sh: GPU code in a made-up file, sizes, weights that come back, pages."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu import aside, checks, kit, served, steps
from gpu.fatbin import BadFile, fat_binaries, thin

from vllm_semantic_sched.lab.bench.client import Record

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"

# GPU code of a shared object


def entry(architecture: int, payload: bytes, kind: int = 2) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(payload))
    return head + bytes(12) + struct.pack("<I", architecture) + bytes(32) + payload


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def shared_object(*binaries: bytes) -> bytearray:
    """An ELF file with a section `.nv_fatbin`, something behind it, and a table of sections."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    code = b"\0\0\0\0\0\0\0\0".join(binaries)  # they lie on multiples of eight bytes
    rest = b"what follows"
    at = 64
    table = at + len(code) + len(rest) + len(names)
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + bytes(24) + struct.pack("<Q", table)
    head += bytes(10) + struct.pack("<HHH", 64, 3, 2)

    def section(name: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQ", name, 1, 0, 0, offset, size) + bytes(24)

    sections = bytes(64) + section(1, at, len(code)) + section(12, table - len(names), len(names))
    return bytearray(head + code + rest + names + sections)


def kept(data: bytearray) -> list[list[tuple[int, bytes]]]:
    return [
        [
            (part.architecture, bytes(data[part.begin + 64 : part.begin + part.size]))
            for part in binary.entries
        ]
        for binary in fat_binaries(data)
    ]


EXAMPLE = (
    fat_binary(entry(80, b"old code"), entry(90, b"_Z4copyv" * 3), entry(90, b"ptx of 9", kind=1)),
    fat_binary(entry(80, b"_Z4addv.")),
    fat_binary(entry(90, b"_Z4mulv."), entry(100, b"newer code......"), entry(90, b"_Z4subv.")),
)


def test_other_architectures_and_ptx_are_taken_out():
    data = shared_object(*EXAMPLE)
    size, end = len(data), data[data.index(b"what follows") :]
    done = thin(data, 90)
    assert kept(data) == [
        [(90, b"_Z4copyv" * 3)],
        [(80, b"old code")],  # no code for this device, but not empty
        [(90, b"_Z4mulv."), (90, b"_Z4subv.")],
    ]
    assert len(data) == size and data[data.index(b"what follows") :] == end
    assert done.emptied == 1 and done.kept == 3 * 64 + 24 + 16
    assert done.dropped == sum(map(len, EXAMPLE)) - 3 * 16 - done.kept
    assert b"newer code" not in data and b"ptx" not in data


def test_only_kernels_that_are_wanted_stay():
    data = shared_object(*EXAMPLE)
    thin(data, 90, "copy|sub")
    assert [[code for _, code in each] for each in kept(data)] == [
        [b"_Z4copyv" * 3],
        [b"old code"],
        [b"_Z4subv."],
    ]


def test_a_file_without_foreign_code_takes_it_from_a_spare():
    data = shared_object(fat_binary(entry(90, b"_Z4copyv" * 2)), fat_binary(entry(90, b"_Z4mulv.")))
    thin(data, 90, "copy", spare=bytes(shared_object(*EXAMPLE)))
    assert kept(data) == [[(90, b"_Z4copyv" * 2)], [(80, b"old code")]]


@pytest.mark.parametrize(
    "data",
    [
        b"#!/bin/sh",
        bytes(shared_object(*EXAMPLE)).replace(b".nv_fatbin", b".nv_fatbix"),
        bytes(shared_object(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 4096) + bytes(64))),
        bytes(shared_object(fat_binary(entry(90, b"code")[:-4] + b"\xff" * 2))),
    ],
)
def test_unusable_file_raises(data: bytes):
    with pytest.raises(BadFile):
        list(fat_binaries(data))


# The kit


def test_kit_and_tracked_files_must_fit(capsys: pytest.CaptureFixture[str]):
    kit.check_size(36 * 2**20, 14 * 2**20, 64.0)
    assert "archive 36.0 MiB" in capsys.readouterr().out
    with pytest.raises(kit.TooLarge, match=r"1\.0 MiB too large"):
        kit.check_size(51 * 2**20, 14 * 2**20, 64.0)


def test_packages_of_the_kit_are_locked():
    found = kit.requirements()
    assert len(found) > 40 and all("==" in one for one in found)


def test_cached_wheels_are_found_by_what_is_required(tmp_path: Path):
    wheel = tmp_path / "oss_harmony-0.0.11-cp312-abi3-manylinux_2_28_x86_64.whl"
    wheel.touch()
    assert kit.cached(tmp_path) == {"oss-harmony==0.0.11": wheel}


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", True),
        ("vllm/_flashmla_C.abi3.so", True),
        ("vllm/third_party/deep_gemm/include/a/b.hpp", True),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", False),
        ("vllm/vllm_flash_attn/flash_attn_interface.py", False),
        ("vllm/_C_stable_libtorch.abi3.so", False),
    ],
)
def test_what_stays_of_vllm(name: str, out: bool):
    assert kit.is_left_out(name, kit._NOT_OF_VLLM) is out


# Weights that are moved aside


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "a" / "b").mkdir(parents=True)
    for path, text in {"a/one.safetensors": "1", "a/b/two.safetensors": "22", "c.py": "3"}.items():
        (root / path).write_text(text)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        git(root, *command)
    (root / "untracked.safetensors").write_text("mine")
    return root


def git(root: Path, *command: str) -> str:
    who = ["-c", "user.name=Test", "-c", "user.email=test@example.com"]
    done = subprocess.run(["git", *who, *command], cwd=root, check=True, capture_output=True)
    return done.stdout.decode()


def run_aside(root: Path, *command: object) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    start = [sys.executable, "-m", "gpu.aside", *map(str, command)]
    return subprocess.Popen(start, cwd=root / "a", env=environment, stderr=subprocess.PIPE)


def is_whole(root: Path) -> bool:
    status = git(root, "status", "--porcelain")
    return status == "?? untracked.safetensors\n" and not (root / ".git" / "weights-aside").exists()


def test_tracked_weights_are_away_while_a_command_runs(repository: Path, tmp_path: Path):
    listing = tmp_path / "listing"
    code = f"ls -R .. > {listing}; exit 7"
    assert run_aside(repository, "sh", "-c", code).wait(120) == 7
    assert "one.safetensors" not in listing.read_text()
    assert "untracked.safetensors" in listing.read_text() and "c.py" in listing.read_text()
    assert is_whole(repository)
    assert kit.tracked_bytes(repository) == 1  # c.py


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_interrupted_command_gives_the_weights_back(repository: Path, number: int):
    process = run_aside(repository, "sleep", "60")
    wait_until(lambda: not (repository / "a" / "b" / "two.safetensors").exists())
    process.send_signal(number)
    assert process.wait(120) == 128 + number
    assert is_whole(repository)


def test_next_call_gives_the_weights_back_after_a_kill(repository: Path):
    aside.move_aside(repository)
    assert not is_whole(repository)
    assert run_aside(repository, "true").wait(120) == 0
    assert is_whole(repository)


def test_weights_that_were_altered_meanwhile_are_reported(repository: Path):
    code = "printf other > ../.git/weights-aside/0"
    process = run_aside(repository, "sh", "-c", code)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and b"a/b/two.safetensors" in errors


def test_command_that_does_not_exist_gives_the_weights_back(repository: Path):
    assert run_aside(repository, "no-such-command").wait(120) != 0
    assert is_whole(repository)


def wait_until(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# Steps and pages


def shell(name: str, code: str, seconds: float = 30.0) -> steps.Step:
    return steps.Step(name, ["sh", "-c", code], seconds)


def test_page_has_every_step_whatever_fails(tmp_path: Path):
    def broken(output: Path) -> str:
        raise ValueError("no figures")

    sections = (broken, lambda output: "## Still there")
    with steps.Run("A check", tmp_path, 60.0, sections) as run:
        assert run.step(shell("first", "echo fine"))
        assert not run.step(shell("second", "echo why it failed; exit 3"))
        assert not run.step(steps.Step("absent", ["/no/such/program"], 5.0))
        assert not run.together([shell("long", "sleep 60", 0.2), shell("short", "true")])
        run.judge("answers", ["one differs"])
    assert run.failed
    page = (tmp_path / "README.md").read_text()
    assert "| [first](first.log) | passed |" in page
    assert "| [second](second.log) | failed (3) |" in page
    assert "stopped after" in page and "| [short](short.log) | passed |" in page
    assert "failed: one differs" in page and "## Still there" in page
    assert "could not be written: ValueError('no figures')" in page
    assert "why it failed" in page  # the end of its log
    found = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert [one["name"] for one in found] == [
        *("first", "second", "absent", "long", "short", "answers")
    ]


def test_steps_without_time_are_left_out(tmp_path: Path):
    with steps.Run("A check", tmp_path, 5.0, ()) as run:
        assert not run.step(shell("late", f"touch {tmp_path / 'ran'}"))
    assert "left out: no time" in (tmp_path / "README.md").read_text()
    assert run.failed and not (tmp_path / "ran").exists()


def test_stopped_step_leaves_no_process(tmp_path: Path):
    with steps.Run("A check", tmp_path, 60.0, ()) as run:
        run.step(shell("starts", f"sleep 60 & echo $! > {tmp_path / 'pid'}; wait", 3.0))
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(child))


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_interrupted_check_leaves_its_page(tmp_path: Path):
    code = (
        "from pathlib import Path; from gpu.steps import Run, Step; import sys\n"
        "with Run('A check', Path(sys.argv[1]), 60.0, ()) as run:\n"
        "    run.step(Step('first', ['true'], 5.0))\n"
        "    run.step(Step('second', ['sh', '-c', 'touch started; sleep 60'], 50.0))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, env=environment
    )
    wait_until((tmp_path / "started").exists)
    process.terminate()
    process.wait(120)
    page = (tmp_path / "README.md").read_text()
    assert "| [first](first.log) | passed |" in page and "interrupted: SystemExit" in page


def record(level: int, arrival: float, first: float | None, finish: float | None) -> Record:
    one = Record(0, level, "", 8, arrival, first_token=first, finish=finish)
    one.output_tokens = 8 if finish else 0
    return one


def test_requests_that_were_cut_off_count_with_their_wait():
    found = served.level_figures([record(0, 2.0, 3.0, 6.0), record(0, 4.0, None, None)], 20.0)
    assert (found.sent, found.done) == (2, 1)
    assert found.ttft == (1.0 + 16.0) / 2 and found.ttft_p99 == 16.0 and found.latency == 4.0


def test_capacity_leaves_out_the_last_quarter():
    ends = [1.0, 2.0, 3.0, 60.0]
    assert served.capacity_of([record(0, 0.0, 0.5, end) for end in ends]) == 1.0
    with pytest.raises(ValueError, match="not served"):
        served.capacity_of([record(0, 0.0, 0.5, None)])


def test_page_of_a_load_has_servers_and_levels(tmp_path: Path):
    records = [record(0, 0.0, 0.5, 2.0), record(4, 0.0, 1.0, None)]
    found = {"rate": 2.0, "start": 9.0, "counters": {"vllm:num_preemptions_total": 3.0}}
    (tmp_path / "ours.json").write_text(json.dumps(found | served.figures(records, 4.0)))
    page = checks.load_section(tmp_path)
    assert "| ours | 2.00 | 1 of 2 | 2 | 2.00 | 3 | 9 | - |" in page
    assert "| ours | 0 | 1 of 1 | 0.50 |" in page and "| ours | 4 | 0 of 1 | 1.00 |" in page


def answers(tokens: dict[str, list[int]], **fields) -> dict:
    order = [f"urgent{index}" for index in range(5)]
    found = {"tokens": tokens, "order": order, "counters": {}, "step": 0.01, "started": 2.0}
    found |= {
        "wrong_lengths": [],
        "runner": 2,
        "attention": "X",
        "graphs": "NONE",
        "asynchronous": True,
    }
    return found | fields


@pytest.mark.parametrize(
    ("kind", "tokens", "counters", "wrong"),
    [
        ("float32", [1, 2], {"preemptions swap urgent": 5.0}, []),
        ("float32", [1, 3], {"preemptions swap urgent": 5.0}, ["answers differ"]),
        ("bf16", [1, 3], {"preemptions swap urgent": 5.0}, []),
        ("bf16", [1, 2], {"preemptions recompute urgent": 5.0}, ["no preemptions swap"]),
    ],
)
def test_answers_are_judged(tmp_path: Path, kind, tokens, counters, wrong):
    runs = {"fcfs": answers({"a": [1, 2]}), "swap": answers({"a": tokens}, counters=counters)}
    for name, run in runs.items():
        (tmp_path / f"{name}-{kind}.json").write_text(json.dumps(run))
    found = checks.problems_of(checks.read_answers(tmp_path))
    assert len(found) == len(wrong) and all(map(str.__contains__, found, wrong))
    equal = "1 of 1" if tokens == [1, 2] else "0 of 1"
    assert f"| swap, {kind} | {equal} |" in checks.answers_section(tmp_path)


def test_other_lengths_are_a_problem():
    runs = {"fcfs": answers({"a": [1, 2]}, wrong_lengths=["a"])}
    assert checks.problems_of({"bf16": runs}) == ["fcfs, bf16: other lengths than asked for"]


def test_no_answers_are_a_problem(tmp_path: Path):
    assert checks.problems_of(checks.read_answers(tmp_path))


def test_step_times_stand_beside_those_of_the_emulated_device(tmp_path: Path):
    assert checks.steps_section(tmp_path) == ""
    profile = ROOT / "configs" / "profiles" / "a100-qwen1.5-7b.yaml"
    (tmp_path / "measured.yaml").write_text(profile.read_text())
    page = checks.steps_section(tmp_path)
    assert "|  | emulated device | measured |" in page and "decode step of 64" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Usage:"),
        (("bogus",), "Usage:"),
        (("check", "--bogus"), "unrecognized arguments: --bogus"),
        (("load", "--seats", "many"), "invalid int value"),
        (("build",), "required: out"),
        (("aside",), "usage: gpu_check.sh aside"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    done = subprocess.run(
        [SCRIPT, *arguments],
        cwd="/",
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and message in done.stdout + done.stderr
