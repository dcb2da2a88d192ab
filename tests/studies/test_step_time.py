"""Step times on a real server."""

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.study]

from step_time import StepTimePlan, measure_step_times  # noqa: E402

from vllm_semantic_sched.lab.bench.client import Progress  # noqa: E402
from vllm_semantic_sched.lab.bench.server import ServerConfig  # noqa: E402
from vllm_semantic_sched.lab.bench.tiny_model import make_model  # noqa: E402


def test_only_new_prompts_use_the_predictor(tmp_path):
    make_model(tmp_path / "model")
    server = ServerConfig(tmp_path / "model", tmp_path / "server.log", seats=4, num_blocks=None)
    plan = StepTimePlan(server, rate=20, phase_seconds=3.0, cycles=1)
    times = measure_step_times(plan, Progress())
    assert list(times) == ["none", "known", "new"]
    assert all(each.tokens > 50 and 0 < each.p50 <= each.p99 for each in times.values())
    # In the other phases the scheduler remembers the prompts, or there are none.
    assert times["new"].predictor_share > 0.02
    assert times["new"].predictor_share > 5 * times["known"].predictor_share
    assert all(each.served == 0 for each in times.values())
