"""One predictor process for several services."""

import asyncio
import itertools
import logging
import os
import signal
import sys
import textwrap
from functools import partial

import psutil
import pytest
from metrics_page import wait_until as poll

from vllm_semantic_sched.policy.config.estimates import Predictor
from vllm_semantic_sched.predict import service as service_module
from vllm_semantic_sched.predict import shared
from vllm_semantic_sched.predict.service import PredictionService, PredictorError

# Counts its start in a file, and answers with the length of the text.
WORKER = textwrap.dedent(
    """
    import json, os, signal, sys
    from pathlib import Path
    with Path(sys.argv[1]).open("a") as starts:
        starts.write(f"{os.getpid()}\\n")
    print(json.dumps({"ready": {"length_buckets": {"edges": [10], "means": [5.0, 50.0]}}}))
    sys.stdout.flush()
    for line in sys.stdin:
        message = json.loads(line)
        texts = message["texts"]
        if "hang" in texts:
            os.kill(os.getpid(), signal.SIGSTOP)
        shares = [1.0 / len(text) for text in texts]
        urgency = [[share, 1.0 - share] for share in shares]
        answer = {"id": message["id"], "urgency": urgency, **dict.fromkeys(
            ("length", "unreadable"), [None] * len(texts))}
        print(json.dumps(answer))
        sys.stdout.flush()
    """
)

wait_until = partial(poll, pause=0.005)

NUMBERS = itertools.count()  # a service remembers what it has read


@pytest.fixture
def starts(tmp_path):
    return tmp_path / "starts"


@pytest.fixture
def start(monkeypatch, tmp_path, starts):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    services = []

    def build(worker: str = WORKER, group: str = "g") -> PredictionService:
        service = PredictionService(
            Predictor(),
            logging.getLogger("test"),
            command=(sys.executable, "-c", worker, str(starts)),
            first_backoff=0.05,
            group=group,
        )
        services.append(service)
        service.start()
        return service

    yield build
    for service in services:
        service.close()
    for process_id in started(starts):
        wait_until(lambda gone=process_id: not runs(gone))


def runs(process_id: int) -> bool:
    """Whether a process still runs; a zombie has ended."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def started(starts) -> list[int]:
    return [int(line) for line in starts.read_text().split()] if starts.exists() else []


def read(service: PredictionService, texts: list[str]) -> dict[str, float | None]:
    """What a service says about texts: the share of level 0."""
    for text in texts:
        assert service.submit(text, text)
    answers: dict[str, float | None] = {}

    def all_there() -> bool:
        for request_id, prediction in service.drain():
            answers[request_id] = None if prediction is None else prediction.urgency[0]
        return len(answers) == len(texts)

    wait_until(all_there)
    return answers


def test_services_of_a_group_share_a_worker(start, starts) -> None:
    one, other, apart = start(), start(), start(group="h")
    assert len(started(starts)) == 2
    for number in range(20):
        texts = [["a" * (1 + number), "b" * (30 + number)], ["c" * (60 + number)]]
        for service, mine in zip((one, other), texts, strict=True):
            assert read(service, mine) == {text: pytest.approx(1 / len(text)) for text in mine}
    assert read(apart, ["xx"]) == {"xx": 0.5}


def one_running(starts) -> int:
    """The only worker that runs."""
    (running,) = filter(runs, started(starts))
    return running


def recover(service: PredictionService) -> None:
    """Wait until a service answers again."""
    wait_until(lambda: None not in read(service, [f"again {next(NUMBERS)}"]).values())


def test_death_of_the_first_one_or_of_the_worker_is_repaired(start, starts) -> None:
    one, other = start(), start()
    os.kill(one._process.pid, signal.SIGKILL)
    (worker,) = started(starts)
    wait_until(lambda: not runs(worker))  # it does not outlive those it works for
    recover(other)
    recover(one)
    os.kill(one_running(starts), signal.SIGKILL)
    recover(one)
    recover(other)
    one_running(starts)


def test_worker_that_hangs_is_replaced_for_all(start, starts, monkeypatch) -> None:
    monkeypatch.setattr(service_module, "PASS_TIMEOUT", 3.0)
    one, other = start(), start()
    assert read(other, ["hang"]) == {"hang": None}
    recover(other)
    recover(one)
    assert len(started(starts)) == 2


def test_reason_why_a_worker_does_not_start_reaches_the_service(start) -> None:
    failing = "import json; print(json.dumps({'failed': 'ValueError: no such model'}))"
    with pytest.raises(PredictorError, match="no such model"):
        start(worker=failing)
    with pytest.raises(PredictorError, match="status"):
        start(worker="import sys; sys.exit(7)")


class Writer:
    def __init__(self, write) -> None:
        self.write = write

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_reason_arrives_if_worker_ends_before_host_speaks(tmp_path, monkeypatch) -> None:
    said: list[bytes] = []

    async def own_stdin() -> asyncio.StreamReader:
        gone = tmp_path / "gone"
        while not gone.exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the loop learns of the worker's end
        return asyncio.StreamReader()

    async def own_stdout() -> Writer:
        return Writer(said.append)

    monkeypatch.setattr(shared, "_stdin", own_stdin)
    monkeypatch.setattr(shared, "_stdout", own_stdout)
    failing = "import atexit, pathlib, sys; print('why', flush=True); " + (
        "atexit.register(pathlib.Path(sys.argv[1]).touch)"
    )
    command = (sys.executable, "-c", failing, str(tmp_path / "gone"))
    assert asyncio.run(shared._host(tmp_path / "socket", 5.0, command)) == 0
    assert said == [b"why\n"]


@pytest.mark.parametrize("turns", range(4))
def test_host_ends_although_its_worker_died_during_an_answer(tmp_path, monkeypatch, turns) -> None:
    path = tmp_path / "socket"

    class Worker:
        """Dies of a request; the end of its output is seen so many turns of the loop later."""

        def __init__(self) -> None:
            self.stdin, self.stdout = Writer(self.die), asyncio.StreamReader()
            self.stdout.feed_data(b"ready\n")
            self.exit = asyncio.Event()

        def die(self, line: bytes) -> None:
            self.exit.set()
            self.dying = asyncio.create_task(self.end_output())

        async def end_output(self) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            self.stdout.feed_eof()

        async def wait(self) -> int:
            await self.exit.wait()
            return -9

        def kill(self) -> None:
            raise ProcessLookupError

    async def made(result):
        return result

    async def ask() -> bytes:
        while not path.exists():
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"a question\n")
        return await reader.read()

    async def host() -> None:
        asked = asyncio.create_task(ask())
        assert await shared._host(path, 30.0, ()) == -9
        serving = asyncio.all_tasks() - {asked, asyncio.current_task()}
        for task in serving:  # as `asyncio.run` does
            task.cancel()
        assert await asyncio.wait_for(asked, 120.0) == b"ready\n"

    monkeypatch.setattr(asyncio, "create_subprocess_exec", lambda *_, **__: made(Worker()))
    monkeypatch.setattr(shared, "_stdin", lambda: made(asyncio.StreamReader()))
    monkeypatch.setattr(shared, "_stdout", lambda: made(Writer(bytes)))
    asyncio.run(host())
