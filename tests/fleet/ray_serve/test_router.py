"""The router among fake replicas; on Ray's own base class where Ray is installed."""

import asyncio
import contextlib
from types import SimpleNamespace

import fake_ray
import pytest

POLICY = """
levels: 3
default_level: 1
predictor: {enabled: false}
"""
URGENT_TEXT = "He is not breathing and has no pulse, I am doing CPR right now!"
CHAT_TEXT = "Write a limerick about a cat that likes cheese."


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


def body(urgency=None, priority=0, **fields):
    extra = None if urgency is None else {"urgency": urgency}
    fields = {"prompt": "hello"} | fields
    return SimpleNamespace(vllm_xargs=extra, priority=priority, **fields)


def in_loop(test, policy):
    """Run a test with a router and two replicas."""

    async def run():
        router = fake_ray.make_router(
            fake_ray.load("router", real=True).UrgencyRouter, policy=str(policy)
        )
        router.update_replicas([fake_ray.Replica("a"), fake_ray.Replica("b")])
        await asyncio.wait_for(test(router), 120)

    asyncio.run(run())


async def route(router, name, request, headers=None):
    pending = fake_ray.pending(name, request, headers)
    replica = await router._choose_replica_for_request(pending)
    return replica.replica_id


def counts(router):
    return [fake_ray.in_flight(router._choice, name) for name in "ab"]


def test_requests_go_where_the_fewest_at_least_as_urgent_are(policy):
    async def test(router):
        urgent = await route(router, "1", body(urgency=0))
        other = "b" if urgent == "a" else "a"
        late = [await route(router, f"2{number}", body(urgency=2)) for number in range(4)]
        assert late.count(other) == 3 - late.count(urgent) + 1
        # More requests there, but none as urgent.
        loads = {
            other: {"number": 1, "work": 20, "by_level": [0, 0, 20], "kv_free": None},
            urgent: {"number": 1, "work": 1, "by_level": [1, 0, 0], "kv_free": None},
        }
        router.update_replicas([fake_ray.Replica(name, 0, loads[name]) for name in "ab"])
        assert await route(router, "3", body(urgency=0)) == other

    in_loop(test, policy)


def test_burst_is_spread_before_any_request_is_sent(policy):
    async def test(router):
        names = await asyncio.gather(
            *(route(router, str(number), body(urgency=0)) for number in range(10))
        )
        assert sorted(names) == ["a"] * 5 + ["b"] * 5
        for number, name in enumerate(names):
            router.on_request_completed(name, str(number))
        assert counts(router) == [0, 0]

    in_loop(test, policy)


@pytest.mark.parametrize(
    ("request_body", "headers", "level"),
    [
        (body(urgency=0), None, 0),
        (body(urgency="abc"), None, 1),
        (body(priority=2), {}, 2),
        (body(priority=2), {"X-Vllm-Priority": "1"}, 1),
        (body(priority=2), {"x-vllm-priority": "soon"}, 2),
        (body(), {"accept": "*/*"}, 1),
        (SimpleNamespace(input="an embedding"), None, 1),
    ],
)
def test_level_of_hints(policy, request_body, headers, level):
    async def test(router):
        assert router._level(fake_ray.pending("1", request_body, headers)) == level

    in_loop(test, policy)


@pytest.mark.parametrize(
    ("request_body", "headers", "session"),
    [
        (body(), {"X-Session-ID": "s"}, ("", "s")),
        (SimpleNamespace(vllm_xargs={"session": "s", "tenant": "t"}, user="u"), None, ("t", "s")),
        (body(user="u"), {"x-session-id": "s"}, ("u", "s")),
        (body(), {"x-session-id": "s", "X-Semsched-Tenant": "t"}, ("t", "s")),
        (body(), {}, None),
    ],
)
def test_session_of_headers_and_body(policy, request_body, headers, session):
    async def test(router):
        assert router._session(fake_ray.pending("1", request_body, headers)) is None
        policy.write_text(POLICY + "sessions: {memory: 600}")
        for _ in range(2):  # a file that still changes is not read
            router.update_replicas([fake_ray.Replica("a"), fake_ray.Replica("b")])
        pending = fake_ray.pending("1", request_body, headers)
        assert router._session(pending) == session
        first = await route(router, "1", request_body, headers)
        if session is not None:
            assert await route(router, "2", request_body, headers) == first

    in_loop(test, policy)


def test_level_of_texts():
    async def test(router):
        def level(**fields):
            return router._level(fake_ray.pending("1", body(**fields)))

        urgent = [{"role": "user", "content": URGENT_TEXT}]
        assert level(prompt=URGENT_TEXT) == level(prompt=None, messages=urgent) <= 1
        assert level(prompt=CHAT_TEXT) >= 3
        assert level(prompt=URGENT_TEXT, urgency=4) == 4

    in_loop(test, "ems")


def test_request_cancelled_before_it_is_sent_does_not_count(policy):
    async def test(router):
        # Full replicas: Ray tries again and again.
        full = [fake_ray.Replica(name, queue=fake_ray.LARGE) for name in "ab"]
        router.update_replicas(full)
        task = asyncio.create_task(route(router, "1", body(urgency=0)))
        while not sum(counts(router)):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert sum(counts(router)) == 1
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert counts(router) == [0, 0]

    in_loop(test, policy)


def test_full_replica_is_passed_over(policy):
    async def test(router):
        replicas = [fake_ray.Replica("a", queue=fake_ray.LARGE), fake_ray.Replica("b")]
        router.update_replicas(replicas)
        names = [await route(router, str(number), body(urgency=0)) for number in range(4)]
        assert names == ["b"] * 4
        assert counts(router) == [0, 4]

    in_loop(test, policy)


def test_dead_replica_is_forgotten(policy):
    async def test(router):
        names = [await route(router, str(number), body(urgency=0)) for number in range(4)]
        router.on_replica_actor_died("a")
        assert [await route(router, f"1{number}", body()) for number in range(3)] == ["b"] * 3
        for number, name in enumerate(names):
            router.on_request_completed(name, str(number))
        assert counts(router) == [0, 3]

    in_loop(test, policy)


def test_errors_leave_the_choice_to_ray(policy, caplog):
    async def test(router):
        router._rules = None
        names = [await route(router, str(number), body()) for number in range(4)]
        assert set(names) <= {"a", "b"} and len(names) == 4
        broken = fake_ray.Replica("b", 0, {"number": 1})
        router.update_replicas([fake_ray.Replica("a"), broken])
        assert await route(router, "5", body()) in "ab"
        router.on_request_completed("a", "1")

    in_loop(test, policy)
    logged = [record.message for record in caplog.records if "Semantic" in record.message]
    assert len(logged) == 2


def test_policy_is_reloaded(policy):
    async def test(router):
        replicas = [fake_ray.Replica("a"), fake_ray.Replica("b")]

        def level_after(text):
            policy.write_text(text)
            for _ in range(2):  # a file that still changes is not read
                router.update_replicas(replicas)
            return router._level(fake_ray.pending("1", body()))

        assert level_after(POLICY.replace("default_level: 1", "default_level: 2")) == 2
        assert level_after("levels: {") == 2
        assert level_after(POLICY.replace("levels: 3", "levels: 5")) == 2
        policy.unlink()
        router.update_replicas(replicas)
        assert level_after(POLICY) == 1

    in_loop(test, policy)


def test_router_without_its_policy_reads_hints(policy):
    policy.unlink()

    async def test(router):
        levels = [router._level(fake_ray.pending("1", body(urgency=n))) for n in range(5)]
        assert levels == [0, 1, 2, 3, 4]
        assert sorted([await route(router, str(n), body()) for n in range(2)]) == ["a", "b"]

    in_loop(test, policy)


def test_policy_without_urgency_balances_the_load(policy):
    policy.write_text("base: fcfs\n")

    async def test(router):
        names = [await route(router, str(number), body(urgency=number % 2)) for number in range(6)]
        assert sorted(names) == ["a"] * 3 + ["b"] * 3

    in_loop(test, policy)
