"""Makes `jobs`, beside this file, importable; sets hypothesis up; adds `--forbid-skips`."""

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import setuptools  # noqa: F401 - replaces distutils, which it cannot do once that is imported
from hypothesis import settings

# A busy machine must not fail a test by its slowness, and the same code gets the same verdict
# each time. scripts/test.sh --hypothesis-profile random looks for new examples.
settings.register_profile("same-examples", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("same-examples")

# Starts of the reasons for which --forbid-skips accepts a skipped test. The data folder is not part
# of the project, and scripts/setup.sh installs what the tests import, but no system programs.
ALLOWED_SKIPS: tuple[str, ...] = (
    *("no data folder", "no Chromium"),
    *("tmux is not installed", "promtool is not installed"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forbid-skips", action="store_true", help="fail the run if a test is skipped"
    )


def unexpected_skips(config: pytest.Config) -> list[str]:
    # Only the process that prints has all reports; a worker of xdist has no such plugin.
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not config.getoption("--forbid-skips"):
        return []
    skips = [(report.nodeid, report.longrepr[2]) for report in reporter.stats.get("skipped", [])]
    return [
        f"{test}: {reason}"
        for test, reason in skips
        if not reason.removeprefix("Skipped: ").startswith(ALLOWED_SKIPS)
    ]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Searching all that the tests import for garbage would take seconds, and none of it is."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # or some libraries would complain of what is left


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"model", "slim_model", "serve"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("model")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and unexpected_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    skips = unexpected_skips(config)
    if skips:
        terminalreporter.section("skipped tests, which --forbid-skips counts as failed", red=True)
    for skip in skips:
        terminalreporter.line(skip)


@pytest.fixture
def unhooked(monkeypatch) -> None:
    """The workarounds are in use even if the installed vLLM has the hooks of patches/."""
    from vllm_semantic_sched.engine.vllm_api import capabilities

    hooks = capabilities.Hooks
    monkeypatch.setattr(capabilities, "HOOKS", hooks(*[False] * len(hooks._fields)))


@pytest.fixture(scope="session")
def nursery():
    """Forks programs that import vLLM from a process that has done so, one for all workers."""
    from nursery import Nursery

    nursery = Nursery(name=os.environ.get("PYTEST_XDIST_TESTRUNUID"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def run_offline(nursery, tmp_path_factory):
    """Runs a program with an offline engine, on one thread, beside other tests, and returns what it
    printed: `run_offline(FILE, ...)` or `run_offline("-m", MODULE, ...)`. Environment variables are
    given by keyword."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }

    def run(*arguments: object, **variables: str) -> str:
        log = tmp_path_factory.mktemp("offline") / "log"
        with log.open("wb") as output:
            # Less than pytest's limit for a test, which would not end the program.
            done = nursery.run(
                [sys.executable, *arguments],
                550,
                stdout=output,
                env=environment | variables,
            )
        text = log.read_text(errors="replace")
        assert done.returncode == 0, text[-4000:]
        return text

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A small random-weight model with a real tokenizer."""
    from vllm_semantic_sched.lab.bench.tiny_model import make_model

    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def slim_model(tmp_path_factory) -> Path:
    """A smaller one, where neither time nor the size of a copy decides anything."""
    from vllm_semantic_sched.lab.bench.tiny_model import TinyModelConfig, make_model

    folder = tmp_path_factory.mktemp("slim")
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    shape = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, **heads}
    make_model(folder, TinyModelConfig(initializer_range=0.07, **shape))
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a model for the emulated device: a shape, with a tokenizer."""
    from vllm_semantic_sched.lab.device.model import make_shape

    folder = tmp_path_factory.mktemp("models")

    def model(shape: str) -> Path:
        make_shape(folder / shape, shape, tokenizer=True)
        return folder / shape

    return model
