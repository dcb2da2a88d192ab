"""Routing of requests to several engines."""

from hypothesis import given, settings
from hypothesis import strategies as st
from small_scenario import SMALL

from vllm_semantic_sched.sim.scenario import parse_scenarios
from vllm_semantic_sched.sim.simulation import Router, simulate


def test_each_routing_chooses_the_expected_engine() -> None:
    def engines(router: Router, *levels: int) -> list[int]:
        return [router.choose(level).engine for level in levels]

    assert engines(Router("round_robin", 2, 3), 0, 0, 0, 0) == [0, 1, 0, 1]

    least = Router("least_loaded", 2, 3)
    placed = [least.choose(2) for _ in range(3)]
    assert [one.engine for one in placed] == [0, 1, 0]
    assert engines(least, 0) == [1]
    least.leave(placed[0])
    least.leave(placed[2])
    assert engines(least, 0, 0) == [0, 0]

    urgent = Router("urgency_aware", 2, 3)
    assert engines(urgent, 2, 2, 2) == [0, 1, 0]
    # No urgent request at either engine: the one with fewer others.
    assert engines(urgent, 0) == [1]
    # Less urgent requests at engine 0 do not delay an urgent one; the one at engine 1 does.
    assert engines(urgent, 0) == [0]


@settings(max_examples=15)
@given(
    replicas=st.integers(1, 4),
    routing=st.sampled_from(["round_robin", "least_loaded", "urgency_aware"]),
)
def test_every_request_finishes_and_every_engine_is_used(replicas: int, routing: str) -> None:
    changes = {"engine.replicas": replicas, "engine.routing": routing, "workload.rate": 40.0}
    scenario = parse_scenarios(SMALL, "test", changes)[0]
    runs = simulate(scenario, "semantic").runs
    assert [run.request.index for run in runs] == list(range(60))
    assert {run.engine for run in runs} == set(range(replicas))


def test_more_engines_are_faster(scenario) -> None:
    def last(replicas: int) -> float:
        one = scenario(engine__replicas=replicas, workload__rate=40.0)
        return max(run.finish or 0.0 for run in simulate(one, "semantic").runs)

    assert last(1) > 1.5 * last(2)
