"""`semsched top` against fake servers: single frames, and the live view in a terminal."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_server import FakeServer, MadeUpPage, busy_page, serving

from vllm_semantic_sched.cli import main, top

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server():
    with serving(FakeServer(busy_page())) as fake:
        yield fake


@pytest.fixture
def gone() -> str:
    with serving(FakeServer()) as fake:
        pass
    return fake.url


def frame(capsys, *words: str) -> str:
    assert main(["top", "--once", *words]) == 0
    return capsys.readouterr().out


def name_of(server: FakeServer) -> str:
    return server.url.removeprefix("http://")


def row(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [start]]
    return line.split()


def test_one_frame_shows_servers_and_tiers(server, capsys) -> None:
    text = frame(capsys, "--server", server.url)
    assert row(text, name_of(server))[1:] == [
        "answers",
        "16",
        "33",
        "88%",
        "25%",
        "7",
        "queued",
        "v2",
    ]
    assert row(text, "non-urgent")[:6] == ["non-urgent", "2", "31", "0", "-", "92.4"]
    assert row(text, "immediate")[5:] == ["0", "s", "100", "0.175", "s", "0.2", "s"]
    assert "preemptions, since the start: " in text and "recompute 4" in text and "swap 2" in text
    assert "q quit" not in text


def test_frame_in_a_pipe_is_plain_and_narrow(server, capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    long = MadeUpPage()
    long.tiers("a [bold]name[/] " + "x" * 200)
    with serving(FakeServer(long)) as other:
        text = frame(capsys, "--server", server.url, "--server", other.url)
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text and "a [bold]name[/]" in text


def test_server_that_does_not_answer_is_shown_as_such(server, gone, capsys) -> None:
    text = frame(capsys, "--server", gone, "--server", server.url)
    assert row(text, gone.removeprefix("http://"))[1:] == ["no", "answer"] and "refused" in text
    assert row(text, name_of(server))[1] == "answers"


def test_exit_status_is_1_if_no_server_answers(gone, capsys) -> None:
    assert main(["top", "--once", "--server", gone, "--server", gone]) == 1
    assert "no answer" in capsys.readouterr().out
    assert main(["top", "--once", "--json", "--server", gone]) == 1
    assert json.loads(capsys.readouterr().out)["total"] is None


def test_paused_server_is_shown_as_paused(server, capsys) -> None:
    server.paused = True
    assert row(frame(capsys, "--server", server.url), name_of(server))[1] == "paused"


def test_predictor_that_loads_is_not_called_down(server, capsys) -> None:
    server.page.set("predictor_up", 0)
    assert row(frame(capsys, "--server", server.url), name_of(server))[6] == "loading"
    server.page.add("predictor_restarts", 1)
    assert row(frame(capsys, "--server", server.url), name_of(server))[6] == "down"


def test_observing_and_canary_are_shown(server, capsys) -> None:
    server.page.set("observing", 1)
    server.page.set("canary", 1)
    text = frame(capsys, "--server", server.url)
    assert row(text, name_of(server))[1] == "observes" and "v2 + canary" in text
    assert max(map(len, text.splitlines())) <= 100


def test_json_holds_the_figures_of_the_frame(server, gone, capsys) -> None:
    shown = json.loads(frame(capsys, "--json", "--server", server.url, "--server", gone))
    first, second = shown["servers"]
    assert first["url"] == server.url and first["paused"] is False and first["locked"] is None
    assert second["figures"] is None and "refused" in second["error"]
    figures = shown["total"]
    assert figures == first["figures"] and figures["kv_use"] == 0.875
    assert figures["preemptions"] == {"drop": 0, "partial": 0, "recompute": 4, "swap": 2} or (
        figures["preemptions"] == {"recompute": 4, "swap": 2}
    )
    assert [tier["waiting"] for tier in figures["tiers"]] == [0, 2, 31]
    assert figures["tiers"][0]["ttft_p99"] == 0.2 and figures["predictor_queue"] == 7


def test_live_view_needs_a_terminal(server, capsys) -> None:
    assert main(["top", "--server", server.url]) == 2
    assert "--once" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon"])
def test_bad_interval_is_rejected(server, interval, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["top", "--server", server.url, f"--interval={interval}"])
    assert "--interval" in capsys.readouterr().err


def test_frame_fits_80_columns(server, capsys, monkeypatch) -> None:
    monkeypatch.setattr(top, "_WIDTH", 80)
    assert "…" not in frame(capsys, "--server", server.url)


# In a terminal


class Terminal:
    """A tmux session of its own server, 100 by 30, that runs `semsched top`."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._socket = str(folder / "tmux")
        # Without the other commands, which take longer to import; it redraws more often.
        code = (
            "import argparse, sys; from vllm_semantic_sched.cli import top; top._REDRAW = 0.1;"
            "parser = argparse.ArgumentParser(); top.add_arguments(parser);"
            "sys.exit(top.run(parser.parse_args()))"
        )
        command = shlex.join([sys.executable, "-c", code, *words])
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._tmux(
            "new-session",
            "-d",
            "-x",
            "100",
            "-y",
            "30",
            "-e",
            f"PYTHONPATH={path}",
            f"unset COLUMNS LINES; {command}; echo exit status $?; sleep 600",
        )

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-S", self._socket, "-f", "/dev/null", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    @property
    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def close(self) -> None:
        self._tmux("kill-server")


def wait_until(condition, terminal: Terminal, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, terminal.screen
        time.sleep(0.05)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_live_view_shows_figures_and_obeys_keys(server, gone, tmp_path) -> None:
    server.key = "secret"
    words = ("--server", server.url, "--server", gone, "--interval", "0.1", "--api-key", "secret")
    terminal = Terminal(tmp_path, *words)
    try:
        for text in ("non-urgent", "no answer", "p pause"):
            wait_until(lambda text=text: text in terminal.screen, terminal)
        terminal.press("p")
        wait_until(lambda: server.calls == ["/pause"], terminal)
        wait_until(lambda: "paused" in terminal.screen, terminal)
        terminal.press("r")
        wait_until(lambda: server.calls[1:] == ["/resume"], terminal)
        terminal.press("l")
        wait_until(lambda: server.calls[2:] == ["/policy/reload"], terminal)
        wait_until(lambda: "policy adopted, version 3" in terminal.screen, terminal)
        server.page.observe("time_to_first_token_seconds", [100.0] * 5, "non-urgent")
        wait_until(lambda: "last " in terminal.screen and "120 s" in terminal.screen, terminal)
        server.page, kept = None, server.page  # it stops answering, and the view goes on
        wait_until(lambda: terminal.screen.count("no answer") == 2, terminal)
        server.page = kept
        wait_until(lambda: "non-urgent" in terminal.screen, terminal)
        terminal.press("q")
        wait_until(lambda: "exit status 0" in terminal.screen, terminal)
    finally:
        terminal.close()


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_keys_do_nothing_without_the_servers_key(server, tmp_path) -> None:
    server.key = "secret"
    terminal = Terminal(tmp_path, "--server", server.url, "--interval", "0.2")
    try:
        wait_until(lambda: "no operator's keys" in terminal.screen, terminal)
        assert "p pause" not in terminal.screen
        for key in "prl":
            terminal.press(key)
        terminal.press("q")
        wait_until(lambda: "exit status 0" in terminal.screen, terminal)
        assert server.attempts == 0
    finally:
        terminal.close()
