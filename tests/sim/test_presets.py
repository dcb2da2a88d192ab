"""The presets span the triangle of throughput, latency and fairness under one overload."""

from functools import cache

from vllm_semantic_sched.sim.runner import cells_of, run_task, tasks_of
from vllm_semantic_sched.sim.scenario import load_scenarios

PRESETS = ("throughput", "latency", "fairness")
Levels = dict[str, dict[str, float]]


@cache
def results() -> dict[str, Levels]:
    shortened = {"repeats": 1, "workload.requests": 2000}
    tasks = [
        task
        for task in tasks_of(load_scenarios("presets", shortened))
        if task.scheduler in (*PRESETS, "fcfs")
    ]
    return {cell.scheduler: cell.levels for cell in cells_of(tasks, [run_task(t) for t in tasks])}


def best(metric: str, *levels: str, most: bool = False) -> str:
    """The preset with the best mean of a metric over levels, weighted by their requests."""

    def mean(name: str) -> float:
        rows = [results()[name][level] for level in levels]
        return sum(row["count"] * row[metric] for row in rows) / sum(row["count"] for row in rows)

    return max(PRESETS, key=lambda name: mean(name) if most else -mean(name))


def test_each_preset_is_best_at_its_corner() -> None:
    speed = {name: levels["all"]["tokens_per_second"] for name, levels in results().items()}
    assert speed["throughput"] >= speed["fcfs"]
    assert speed["latency"] >= (1 - 0.15) * speed["fcfs"]  # its price
    assert best("e2e_mean", "all") == best("tokens_per_second", "all", most=True) == "throughput"
    assert best("ttft_mean", "0", "1") == best("tpot_mean", "0", "1") == "latency"
    assert best("fairness", "all", most=True) == "fairness"
    assert results()["fairness"]["all"]["fairness"] > results()["fcfs"]["all"]["fairness"] + 0.1
