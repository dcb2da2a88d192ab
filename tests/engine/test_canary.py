"""A canary on a scheduler without a model, whose clock the test sets."""

import json

import pytest

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.http import commands
from vllm_semantic_sched.engine.http.dispatch import pool_of
from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step
from vllm_semantic_sched.policy.canary import compare

pytestmark = pytest.mark.engine

CURRENT = {
    "observe": True,
    "predictor": {"enabled": False},
    "correct_profile": False,
    "tiers": [{"name": name} for name in "abcde"],
}
CURRENT["tiers"][4]["slo"] = {"ttft": 7.0, "percentile": 95}
GOOD = {"predictor": {"enabled": False}, "correct_profile": False}
# In the order of arrival the request of level 4 waits for two others, by urgency for six.
BURST = (0, 0, 4, 0, 0, 0, 0)
MIXED = (0, 4)


class Server:
    """A scheduler with two seats, and a clock that moves a second per step."""

    def __init__(self, folder) -> None:
        file = folder / "policy.yaml"
        file.write_text(json.dumps(CURRENT))
        self.scheduler = build_scheduler(
            SemanticScheduler, semantic_sched={"policy": str(file)}, max_num_seqs=2
        )
        self.now, self.number = 1000.0, 0
        self.scheduler.clock.seconds = lambda: self.now

    def command(self, name: str, **argument) -> dict:
        return commands.run(self.scheduler, f"{name} {json.dumps(argument)}")

    def start(self, policy: dict, engines: int = 1, lease: float = 4000.0) -> dict:
        plan = {"share": 0.25, "period": 320.0, "lease": lease, "watch": ["ttft"]}
        return self.command("canary_start", policy=policy, plan=plan, engines=engines, canaries=1)

    def serve(self, steps: int, burst: tuple[int, ...] = MIXED) -> list[str]:
        """Step with bursts of traffic; the policy in force after each step."""
        arms = []
        for step in range(steps):
            for level in burst if step % 16 == 0 else ():
                self.number += 1
                request = make_request(f"r{self.number}", 8, 4, urgency=level)
                self.scheduler.add_request(request)
            run_step(self.scheduler)
            self.now += 1.0
            arms.append(self.scheduler.canary.arm)
        return arms


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    yield server
    assert server.scheduler.counters.total("policy_errors") == 0
    server.scheduler.shutdown()


def test_good_policy_takes_turns_and_is_kept_on_demand(server) -> None:
    assert server.start(GOOD)["running"]
    arms = server.serve(960)
    assert arms.count("new") == pytest.approx(240, abs=6)
    assert server.scheduler.observing == (server.scheduler.canary.arm == "current")
    report = server.command("canary_status")
    assert report["running"] and not report["end"] and report["tiers"] == list("abcde")
    found = {(one.level, one.measure): one for one in compare([report["tallies"]])}
    assert min(found[4, "ttft"].counts) >= 12 and found[4, "ttft"].interval is not None
    assert server.command("canary_stop", keep=True)["end"] == "kept"
    assert not server.scheduler.observing


def test_policy_missing_an_slo_rolls_back_in_first_turn(server) -> None:
    server.start(GOOD)
    arms = server.serve(640, BURST)
    report = server.command("canary_status")
    assert not report["running"] and report["end"].startswith("rolled back: ttft of e")
    assert server.scheduler.observing and arms[-1] == "current"
    began = arms.index("new")
    assert arms.index("current", began) - began < 80 and "new" not in arms[began + 80 :]


def test_lease_ends_it_without_anybody_outside(server) -> None:
    server.start(GOOD, lease=100.0)
    server.serve(120)
    report = server.command("canary_status")
    assert (report["running"], report["end"]) == (False, "over")
    assert server.scheduler.observing


def test_reload_ends_it(server) -> None:
    server.start(GOOD)
    server.serve(300)
    assert server.scheduler.canary.arm == "new"
    file = server.scheduler.vllm_config.additional_config["semantic_sched"]["policy"]
    with open(file, "w") as out:
        json.dump(CURRENT | {"default_level": 3}, out)
    commands.run(server.scheduler, "load_policy").result(timeout=120)
    assert commands.run(server.scheduler, "adopt_policy")["result"] == "adopted"
    assert server.command("canary_status")["end"] == "the policy was reloaded"
    assert server.scheduler.observing and server.scheduler.core.policy.default_level == 3


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (GOOD | {"base": "sjf"}, "base"),
        ({"predictor": {"enabled": True}}, "predictor"),
        (GOOD | {"protct": {}}, "protct"),
    ],
)
def test_unusable_policy_is_refused(server, policy, words) -> None:
    assert words in server.start(policy)["refused"]
    assert server.command("canary_status") == {}
    server.start(GOOD)
    assert "stop it first" in server.start(GOOD)["refused"]


def test_first_of_two_engines_always_has_the_new_policy(server) -> None:
    server.start(GOOD, engines=2)
    assert set(server.serve(90)) == {"new"}
    assert server.command("canary_status")["role"] == "new"


def test_session_stays_with_its_policy() -> None:
    pools = [pool_of(f"caller {number}", 1, 4) for number in range(2000)]
    assert pools[:50] == [pool_of(f"caller {number}", 1, 4) for number in range(50)]
    assert set(map(tuple, pools)) == {(0,), (1, 2, 3)}
    assert sum(pool == range(1) for pool in pools) / 2000 == pytest.approx(0.25, abs=0.04)
