"""`semsched level` against a server that records its calls; `tests/engine/http` has the server's
part."""

import getpass

import pytest

from vllm_semantic_sched.cli import level, main
from vllm_semantic_sched.operate.client import AdminError

WAITING = {"request": "cmpl-7-0", "engine": 0, "state": "queued", "level": 3, "level_from": "hint"}
PLACED = WAITING | {"ahead": 2, "expected_wait": 4.25}


class Server:
    """A server that knows one request, or fails."""

    def __init__(self, *standings: dict) -> None:
        self.standings = list(standings)
        self.calls: list[tuple] = []

    def call(self, path, body=None):
        self.calls.append((path, body))
        if not self.standings:
            raise AdminError("no request 'cmpl-7' waits or runs: it has ended, or never came")
        return {"requests": self.standings}

    def post(self, path, **body):
        return self.call(path, body)


@pytest.fixture
def run(monkeypatch):
    def call(server: Server, *words: str) -> int:
        monkeypatch.setattr(level, "AdminClient", lambda url, key: server)
        return main(["level", *words])

    return call


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (PLACED, "level 3 (hint), waits with 2 ahead, expected to start in 4.2 s"),
        (PLACED | {"expected_wait": None}, "waits with 2 ahead, the server is paused"),
        (PLACED | {"level": 0, "level_before": 3}, "level 3 became 0, waits with 2 ahead"),
        (WAITING | {"state": "running", "level_from": "service_tier"}, "(service tier), runs"),
        (WAITING, "waits outside the order"),
    ],
)
def test_standing_is_printed(run, capsys, standing, words) -> None:
    server = Server(standing)
    assert run(server, "a/b c") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("cmpl-7-0: ") and words in printed
    assert server.calls == [("/level?id=a%2Fb+c", None)]


def test_level_goes_with_who_and_why(run) -> None:
    server = Server(PLACED)
    assert run(server, "cmpl-7", "0", "--why", "chest pain") == 0
    assert run(server, "cmpl-7", "4", "--by", "ann") == 0
    by_user = {"id": "cmpl-7", "level": 0, "by": getpass.getuser(), "why": "chest pain"}
    by_name = {"id": "cmpl-7", "level": 4, "by": "ann", "why": ""}
    assert server.calls == [("/level", by_user), ("/level", by_name)]


def test_what_the_server_refuses_is_printed(run, capsys) -> None:
    assert run(Server(), "cmpl-7", "0") == 1
    assert "no request 'cmpl-7' waits or runs" in capsys.readouterr().err
