"""Reloading the policy file of a running scheduler, without a model."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from vllm.v1.engine.core import EngineCore

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.http import commands
from vllm_semantic_sched.engine.metrics.table import COUNTERS, GAUGES
from vllm_semantic_sched.engine.vllm_api.capabilities import HOOKS
from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step

pytestmark = pytest.mark.engine

HINTS_ONLY = "predictor: {enabled: false}\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(HINTS_ONLY)
    return path


@pytest.fixture
def scheduler(file):
    scheduler = build_scheduler(
        SemanticScheduler, semantic_sched={"policy": str(file)}, max_num_seqs=2
    )
    yield scheduler
    scheduler.shutdown()


def add(scheduler, *names: str, **fields) -> None:
    for name in names:
        scheduler.add_request(make_request(name, **fields))


def reload(scheduler) -> dict:
    """Reload in the same way as an API server."""
    commands.run(scheduler, "load_policy").result(timeout=120)
    return commands.run(scheduler, "adopt_policy")


def test_valid_file_applies_from_the_next_step(scheduler, file) -> None:
    add(scheduler, "a", "b", urgency=3, output_tokens=50)
    run_step(scheduler)
    file.write_text(HINTS_ONLY + "preemption: {enabled: false}\n")
    report = reload(scheduler)
    assert report["result"] == "adopted"
    assert report["version"] == 2
    assert report["changed"] == ["preemption.enabled"]
    add(scheduler, "urgent", urgency=0)
    run_step(scheduler)
    assert {request.request_id for request in scheduler.running} == {"a", "b"}
    assert reload(scheduler)["result"] == "unchanged"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HINTS_ONLY + "preemption: {enabeld: false}\n", ["preemption.enabeld", "enabled"]),
        (HINTS_ONLY + "default_level: 9\n", ["default_level", "0 to 4"]),
        (HINTS_ONLY + "base: sjf\n", ["base", "'semantic' -> 'sjf'", "restart"]),
        ("predictor: {enabled: true}\n", ["predictor.enabled", "restart"]),
        ("{", ["YAML"]),
        (None, ["no such file"]),
    ],
)
def test_unusable_file_leaves_the_old_policy_in_force(scheduler, file, text, words) -> None:
    old = scheduler.core.policy
    file.unlink() if text is None else file.write_text(text)
    report = reload(scheduler)
    assert report["result"] == "refused" and report["version"] == 1
    for word in words:
        assert word in report["reason"]
    assert scheduler.core.policy is old
    assert scheduler.counters.total("policy_reloads", "refused") == 1
    assert scheduler.counters.total("policy_errors") == 0
    file.write_text(HINTS_ONLY + "default_level: 3\n")
    assert reload(scheduler)["result"] == "adopted"


def test_exception_while_switching_policy_is_reported(scheduler, file, monkeypatch) -> None:
    def fail(*args):
        raise RuntimeError("injected")

    monkeypatch.setattr(scheduler.core, "switch", fail)
    file.write_text(HINTS_ONLY + "default_level: 4\n")
    commands.run(scheduler, "load_policy").result(timeout=120)
    add(scheduler, "a", output_tokens=2)
    run_step(scheduler)
    assert scheduler.counters.total("policy_errors") == 1
    report = commands.run(scheduler, "adopt_policy")
    assert (report["result"], report["version"]) == ("refused", 1)


def test_steps_do_not_wait_for_the_file(scheduler, file) -> None:
    live = scheduler.live_policy
    load, begun, go_on = live.load, threading.Event(), threading.Event()

    def slow():
        begun.set()
        go_on.wait(120)
        return load()

    live.load = slow
    done = commands.run(scheduler, "load_policy")
    add(scheduler, "a", output_tokens=5)
    assert begun.wait(120)
    for _ in range(5):
        run_step(scheduler)
    assert not done.done()
    go_on.set()
    done.result(timeout=120)
    status = commands.run(scheduler, "status")
    assert status["scheduler"].endswith(".SemanticScheduler")
    assert status["policy"]["result"] == "unchanged"
    assert status["policy"]["name"] == str(file)
    assert (status["policy"]["base"], status["policy"]["levels"]) == ("semantic", 5)
    assert (status["kv_connector"], status["host_pool"]) == (None, 0)


def test_running_requests_are_reordered(scheduler, file) -> None:
    add(scheduler, "unknown", output_tokens=50)
    add(scheduler, "hinted", urgency=3, output_tokens=50)
    run_step(scheduler)
    assert [request.request_id for request in scheduler.running] == ["unknown", "hinted"]
    file.write_text(HINTS_ONLY + "default_level: 4\n")
    reload(scheduler)
    run_step(scheduler)
    assert [request.request_id for request in scheduler.running] == ["hinted", "unknown"]


def test_version_hash_and_reloads_are_published(scheduler, file) -> None:
    before = scheduler.gauges()
    file.write_text(HINTS_ONLY + "default_level: 4\n")
    reload(scheduler)
    after = scheduler.gauges()
    assert (before["policy_version"], after["policy_version"]) == (1, 2)
    assert before["policy_hash"] != after["policy_hash"]
    assert {"policy_version", "policy_hash"} <= set(GAUGES) and "policy_reloads" in COUNTERS


def test_engine_core_finds_the_command() -> None:
    scheduler = build_scheduler(SemanticScheduler, semantic_sched={"policy": "fcfs"})
    core = EngineCore.__new__(EngineCore)
    core.scheduler = scheduler
    if HOOKS.utilities:
        status = core.call_scheduler(commands.UTILITY, ["status"])
    else:
        status = getattr(core, commands.UTILITY)("status")
    assert status["running"] == status["waiting"] == 0 and not status["paused"]
    with pytest.raises(ValueError, match="base: fcfs"):
        commands.run(scheduler, "load_policy")


HANGUP = textwrap.dedent(
    """
    import multiprocessing, os, signal, sys, time
    from vllm_semantic_sched.engine.live_policy import reload_on_hangup

    def child(pipe):
        heard = []
        pipe.send(reload_on_hangup(lambda: heard.append(1)))
        os.kill(os.getpid(), signal.SIGHUP)
        ends = time.monotonic() + 60
        while not heard and time.monotonic() < ends:
            time.sleep(0.01)
        pipe.send(len(heard))

    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    print(ours.recv())
    process.join()
    print(ours.recv() if ours.poll() else "ended", process.exitcode)
    """
)


@pytest.mark.parametrize("terminal", [False, True])
def test_sighup_reloads_only_without_a_terminal(terminal) -> None:
    command = [sys.executable, "-c", HANGUP]
    if not terminal:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=120, start_new_session=True
        )
        assert result.stdout.split() == ["True", "1", "0"], result.stderr
        return
    import pty

    pid, screen = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the parent process may ignore it
        os.execv(command[0], command)
    shown = b""
    try:
        while chunk := os.read(screen, 1000):
            shown += chunk
    except OSError:  # Linux ends a terminal that way
        pass
    os.waitpid(pid, 0)
    assert shown.split() == [b"False", b"ended", str(-signal.SIGHUP).encode()]
