"""Polling a server, and acting on it, against a fake HTTP server."""

import threading

import pytest
from fake_server import FakeServer, MadeUpPage, busy_page, serving

from vllm_semantic_sched.operate.client import AdminClient, AdminError
from vllm_semantic_sched.operate.watch import ServerWatch


@pytest.fixture
def server():
    with serving(FakeServer(busy_page())) as fake:
        yield fake


def watch(server: FakeServer, key: str | None = None, times=(0.0,)) -> ServerWatch:
    clock = iter(times)
    return ServerWatch(AdminClient(server.url + "/", key), clock=lambda: next(clock))


def test_poll_reads_figures_and_status(server) -> None:
    watched = watch(server, times=(0.0, 7.0))
    state = watched.poll()
    assert (
        sum(tier.running for tier in state.figures.tiers) == 16
        and state.open
        and state.paused is False
    )
    assert state.error is None and watched.state is state
    server.paused = True
    state = watched.poll()
    assert state.paused and state.figures.window == 7.0


def test_server_that_stops_and_comes_back(server) -> None:
    watched = watch(server, times=(0.0, 10.0))
    watched.poll()
    page, server.page = server.page, None
    state = watched.poll()
    assert state.figures is None and "500" in state.error and not state.open
    server.page = page
    assert watched.poll().figures.window == 10.0


def test_nobody_answers() -> None:
    with serving(FakeServer()) as gone:
        pass
    state = watch(gone).poll()
    assert state.figures is None and "refused" in state.error and gone.url not in state.error


@pytest.mark.parametrize("url", ["127.0.0.1:1", "nonsense", "http://127.0.0.1:notaport"])
def test_bad_address_is_shown_as_no_answer(url) -> None:
    state = ServerWatch(AdminClient(url)).poll()
    assert state.figures is None and state.error
    with pytest.raises(AdminError):
        AdminClient(url).status()


def test_figures_are_shown_where_the_operator_is_not_let_in(server) -> None:
    server.key = "secret"
    state = watch(server).poll()
    assert (
        sum(tier.running for tier in state.figures.tiers) == 16
        and not state.open
        and "--api-key" in state.locked
    )
    assert watch(server, "secret").poll().open
    server.key, server.locked = None, (404, "Not Found")
    assert "--middleware" in watch(server).poll().locked


def test_server_before_its_first_request(server) -> None:
    server.page = MadeUpPage()
    state = watch(server).poll()
    assert state.figures is not None and "first request" in state.error and state.open


def test_actions_reach_the_server(server) -> None:
    watched = watch(server)
    assert "running" in watched.pause() and server.paused
    assert watched.resume() == "resumed" and not server.paused
    assert watched.reload() == "policy adopted, version 3"
    assert server.calls == ["/pause", "/resume", "/policy/reload"]


def test_resume_ends_a_pause_that_still_waits(server) -> None:
    """vLLM takes a resume only after a pause is complete, so the running requests are frozen."""
    waiting, done = threading.Event(), threading.Event()
    answer = server.answer

    def wait_for_running(method, path, key):
        if path.endswith("/pause") and not waiting.is_set():
            waiting.set()
            assert done.wait(120)
        return answer(method, path, key)

    server.answer = wait_for_running
    watched = watch(server)
    pausing = threading.Thread(target=watched.pause)
    pausing.start()
    assert waiting.wait(120)
    watched.resume()
    assert server.calls == ["/pause", "/resume"]
    done.set()
    pausing.join(120)
    server.calls.clear()
    watched.resume()
    assert server.calls == ["/resume"]


def test_refused_action_raises(server) -> None:
    server.locked = (403, "these endpoints answer on the server's own machine only")
    with pytest.raises(AdminError, match="own machine"):
        watch(server).reload()
