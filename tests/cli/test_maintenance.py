"""`semsched maintenance` against a server that records its calls."""

import signal
import threading

import pytest

from vllm_semantic_sched.cli import main, maintenance
from vllm_semantic_sched.operate.client import AdminError


class Server:
    """A server whose running requests finish when `drained` is set or a call freezes them."""

    def __init__(self, fails: str = "", drained: bool = True, paused: bool = False) -> None:
        self.calls: list[tuple] = []
        self.paused = paused
        self.fails = fails
        self.drained = threading.Event()
        if drained:
            self.drained.set()

    def status(self):
        engines = [{"running": 1, "waiting": 2}, {"running": 0, "waiting": 3}]
        return [engine | {"paused": self.paused} for engine in engines]

    def post(self, path, **body):
        return self.call(path, body)

    def call(self, path, body=None, prefix=None):
        self.calls.append((path, *body.values()))
        if path == self.fails:
            raise AdminError("it is broken")
        if body.get("mode") == "keep":
            self.drained.set()
        if path == "/pause":
            assert self.drained.wait(10)
        return {}


@pytest.fixture
def act(monkeypatch):
    def run(server: Server, *words: str) -> int:
        monkeypatch.setattr(maintenance, "AdminClient", lambda url, key: server)
        monkeypatch.setattr(maintenance, "POLL_SECONDS", 0.02)
        return main(["maintenance", *words, "--server", "http://x"])

    return run


def test_weights_are_replaced_between_pause_and_resume(act, capsys) -> None:
    server = Server()
    assert act(server, "reload-weights") == 0
    paths = [call[0] for call in server.calls]
    assert paths == ["/pause", "/caches/drop", "/weights/reload", "/resume"]
    assert "paused: 1 running, 5 waiting" in capsys.readouterr().out


def test_sleep_leaves_the_server_paused(act, capsys) -> None:
    server = Server()
    assert act(server, "sleep", "--level", "2") == 0
    assert server.calls == [("/pause", "wait", 3600.0), ("/sleep", 2)]
    assert "asleep: " in capsys.readouterr().out


def test_sleep_that_the_platform_lacks_is_not_called_sleep(act, capsys, monkeypatch) -> None:
    server = Server()
    call = server.call
    monkeypatch.setattr(server, "call", lambda *words, **more: call(*words, **more) | {"asleep": 0})
    assert act(server, "sleep") == 0
    out = capsys.readouterr().out
    assert "no sleep mode on this platform" in out
    assert "asleep: " not in out and out.splitlines()[-1].startswith("paused: ")


def test_requests_that_outlast_the_patience_are_frozen(act) -> None:
    server = Server(drained=False)
    assert act(server, "pause", "--patience", "0.1") == 0
    assert server.calls == [("/pause", "wait", 3600.0), ("/pause", "keep", 3600.0)]


@pytest.mark.parametrize(
    ("words", "fails", "resumes"),
    [
        (["reload-weights"], "/caches/drop", True),
        (["reload-weights"], "/weights/reload", False),
        (["load-lora", "--lora-name", "a", "--lora-path", "x"], "/load_lora_adapter", True),
        (
            ["load-lora", "--lora-name", "a", "--lora-path", "x", "--in-place"],
            "/load_lora_adapter",
            False,
        ),
        (["unload-lora", "--lora-name", "a"], "/unload_lora_adapter", True),
    ],
)
def test_failure_keeps_pause_only_if_weights_may_be_mixed(
    act, capsys, words, fails, resumes
) -> None:
    server = Server(fails=fails)
    assert act(server, *words) == 1
    assert (server.calls[-1][0] == "/resume") == resumes
    message = capsys.readouterr().err
    assert "it is broken" in message
    assert ("stays paused" in message) != resumes


LORA = ["load-lora", "--lora-name", "a", "--lora-path", "x"]


def test_failure_leaves_a_server_paused_that_was_found_paused(act, capsys) -> None:
    server = Server(fails="/load_lora_adapter", paused=True)
    assert act(server, *LORA) == 1
    assert "/resume" not in [call[0] for call in server.calls]
    assert "stays paused, as it was before" in capsys.readouterr().err


class Interrupted(Server):
    """A server of which one call brings a signal."""

    def __init__(self, path: str, number: signal.Signals, drained: bool) -> None:
        super().__init__(drained=drained)
        self.at, self.number = path, number

    def status(self):
        if self.calls:  # not the first look, before the pause
            self._interrupt("/status")
        return super().status()

    def call(self, path, body=None, prefix=None):
        self._interrupt(path)
        return super().call(path, body, prefix)

    def _interrupt(self, path: str) -> None:
        if path == self.at:
            self.at = ""
            signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("action", "drained", "path", "last"),
    [
        ("pause", False, "/status", ["/pause", "/pause", "/resume"]),
        ("reload-weights", True, "/status", ["/pause", "/pause", "/resume"]),
        ("reload-weights", True, "/weights/reload", ["/resume", "/pause", "/resume"]),
        ("sleep", True, "/sleep", ["/sleep"]),
    ],
)
def test_interrupt_leaves_the_server_resumed_or_asleep(
    act, number, action, drained, path, last
) -> None:
    server = Interrupted(path, number, drained)
    assert act(server, action) == 130
    paths = [call[0] for call in server.calls]
    assert paths[-len(last) :] == last


def test_interrupt_leaves_a_server_paused_that_was_found_paused(act) -> None:
    server = Interrupted("/status", signal.SIGINT, drained=True)
    server.paused = True
    assert act(server, "reload-weights") == 130
    assert [call[0] for call in server.calls] == ["/pause"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["load-lora"], "--lora-name, --lora-path"),
        (["load-lora", "--lora-name", "a"], "--lora-path"),
        (["unload-lora"], "--lora-name"),
        (["pause", "--level", "2"], "--level 2"),
        (["resume", "--lease", "60"], "--lease 60"),
        (["reload-weights", "--in-place"], "--in-place"),
        (["unload-lora", "--lora-name", "a", "--lora-path", "x"], "--lora-path x"),
    ],
)
def test_each_action_takes_its_own_options_only(act, capsys, words, message) -> None:
    server = Server()
    with pytest.raises(SystemExit) as stopped:
        act(server, *words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err and not server.calls
