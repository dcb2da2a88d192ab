"""Sessions: what one request leaves for the next, for how long, and for whom."""

import pytest
from jobs import policy_of

from vllm_semantic_sched.policy import sessions
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Floor, Job, LevelSource
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.profile.formula import load_profile

MEMORY = 600.0


def reading(level: int) -> Prediction:
    """A sure one."""
    return Prediction(tuple(float(each == level) for each in range(5)))


class Clients:
    """Send requests to a core, at times that they choose."""

    def __init__(self, **policy) -> None:
        self.now = 0.0
        policy = {"sessions": {"memory": MEMORY}} | policy
        self.core = SchedulingCore(
            policy_of(**policy), load_profile("default"), clock=lambda: self.now
        )
        self.count = 0

    def ask(
        self,
        session: str = "s",
        tenant: str = "t",
        reads: int | None = None,
        glance: int | None = None,
        words: str = "",
        **hints: int,
    ) -> Job:
        """A request; `reads`: the level that the predictor reads in its text, None: it is not read.
        `glance`: the instant reader's."""
        self.now += 1.0
        self.count += 1
        job = self.send(session, tenant, reads is not None, glance, words, **hints)
        if reads is not None:
            self.core.predicted(job, reading(reads))
        return job

    def send(self, session, tenant="t", awaits=True, glance=None, words="", **hints) -> Job:
        turn = self.core.sessions.begin(tenant, session, self.now)
        turn.words = words
        job = self.core.draft(
            f"r{self.count}",
            50,
            500,
            self.core.read_hints(hints, 0),
            awaits_prediction=awaits,
            tenant=tenant,
            provisional=None if glance is None else reading(glance),
            session=turn,
        )
        self.core.arrive(job, self.now)
        self.core.enqueue(job, self.core.waiting)
        return job

    @property
    def floors(self) -> int:
        return self.core.sessions.floors(self.now)


def source_of(job: Job) -> tuple[int, str]:
    return job.level, job.level_source.value


def test_request_that_is_not_read_inherits_the_level_that_the_client_stated() -> None:
    clients = Clients()
    assert source_of(clients.ask(urgency=0)) == (0, "hint")
    assert source_of(clients.ask()) == (0, "session")
    assert source_of(clients.ask(session="other")) == (2, "default")
    assert clients.floors == 1


def test_hint_overrides_the_floor_and_ends_it() -> None:
    clients = Clients()
    clients.ask(urgency=0)
    assert source_of(clients.ask(urgency=3)) == (3, "hint")
    assert source_of(clients.ask()) == (2, "default")
    assert clients.floors == 0


def test_text_does_not_end_a_floor_that_the_client_stated() -> None:
    clients = Clients()
    clients.ask(urgency=1)
    assert source_of(clients.ask(reads=4)) == (1, "session")
    assert source_of(clients.ask(reads=0)) == (0, "prediction")
    assert source_of(clients.ask(reads=4)) == (4, "prediction"), "this one came from a text"


def test_floor_of_a_text_holds_until_the_next_text_has_been_read() -> None:
    clients = Clients()
    assert source_of(clients.ask(reads=0)) == (0, "prediction")
    waiting = clients.send("s", glance=4)
    assert source_of(waiting) == (0, "session") and waiting.level_unread
    assert waiting.sure_level == 4, "a provisional level gives the rights of the reading alone"
    unread = clients.send("s")
    assert source_of(unread) == (0, "session") and unread.sure_level is None
    clients.core.predicted(waiting, reading(3))
    assert source_of(waiting) == (3, "prediction") and waiting.sure_level == 0
    assert clients.floors == 0
    assert source_of(clients.ask()) == (2, "default")


@pytest.mark.parametrize("failure", [None, Prediction((1.0, 0, 0, 0, 0), unreadable="empty")])
def test_text_that_cannot_be_read_keeps_the_floor(failure) -> None:
    clients = Clients()
    clients.ask(reads=0)
    job = clients.send("s")
    clients.core.predicted(job, failure)
    assert source_of(job) == (0, "session")


def test_more_urgent_reading_at_once_is_not_held_back_by_the_floor() -> None:
    clients = Clients()
    clients.ask(reads=1)
    assert source_of(clients.send("s", glance=0)) == (0, "instant")


def test_text_does_not_end_a_newer_floor() -> None:
    clients = Clients()
    slow = clients.send("s")
    clients.ask(urgency=0)
    clients.core.predicted(slow, reading(4))
    assert clients.floors == 1
    assert source_of(clients.ask()) == (0, "session")


def test_evidence_is_the_most_urgent_request_and_the_time_the_last_that_confirms_it() -> None:
    clients = Clients()
    clients.ask(reads=0)
    clients.ask(reads=1)
    turn = clients.core.sessions.begin("t", "s", clients.now)
    assert turn.floor == Floor(0, "r1", LevelSource.PREDICTION, 2.0)
    clients.ask(urgency=1)
    turn = clients.core.sessions.begin("t", "s", clients.now)
    assert turn.floor == Floor(1, "r3", LevelSource.HINT, 3.0)


def test_floor_ends_in_time_however_much_the_session_is_used() -> None:
    clients = Clients()
    clients.ask(urgency=0)
    for _ in range(4):
        clients.now += MEMORY / 4
        job = clients.ask()
    assert source_of(job) == (2, "default")
    assert clients.floors == 0 and len(clients.core.sessions) == 1


def test_words_are_kept_newest_first_and_bounded() -> None:
    clients = Clients()
    for said in ("a" * 200, "b" * 150, "b" * 150, "", "c"):
        clients.ask(words=said)
    turn = clients.core.sessions.begin("t", "s", clients.now)
    assert turn.earlier == ("c", "b" * 150, "a" * (sessions.MOST_WORDS - 151))
    clients.now += MEMORY + 1
    assert clients.core.sessions.begin("t", "s", clients.now).earlier == ()


def test_no_tenant_can_raise_or_read_another_tenants_session() -> None:
    clients = Clients()
    clients.ask(tenant="a", urgency=0, words="secret")
    other = clients.ask(tenant="b")
    assert source_of(other) == (2, "default") and other.session.earlier == ()
    clients.ask(tenant="b", urgency=4)
    assert source_of(clients.ask(tenant="a")) == (0, "session")


def test_cap_on_top_levels_counts_inherited_ones() -> None:
    clients = Clients(tenants={"top": {"share": 0.1}})
    clients.ask(urgency=0)
    levels = [clients.ask().level for _ in range(9)]
    assert levels == [0] * 4 + [1] * 5


@pytest.mark.parametrize("reads", [None, 4])
def test_without_urgent_requests_a_session_changes_no_level(reads) -> None:
    clients = Clients()
    expected = clients.ask(session="alone", reads=reads).level
    assert [clients.ask(reads=reads).level for _ in range(3)] == [expected] * 3
    assert clients.floors == 0


def test_table_is_bounded_and_a_flood_leaves_half_of_it_to_others(monkeypatch) -> None:
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 20)
    clients = Clients()
    for number in range(10):
        clients.ask(session=f"s{number}", tenant="quiet", urgency=0)
    for number in range(100):
        clients.ask(session=f"s{number}", tenant="loud", urgency=0)
    assert len(clients.core.sessions) == 20 and clients.floors == 20
    kept = [clients.ask(session=f"s{number}", tenant="quiet").level for number in range(1, 10)]
    assert kept == [0] * 9


def test_old_sessions_are_forgotten() -> None:
    clients = Clients()
    for number in range(10):
        clients.ask(session=f"s{number}", urgency=0)
    clients.now += MEMORY + 1
    clients.ask(session="new")
    assert len(clients.core.sessions) == 1 and clients.floors == 0
    assert not clients.core.sessions._floors and len(clients.core.sessions._of_tenant) == 1


def test_policy_without_sessions_forgets_them() -> None:
    clients = Clients()
    clients.ask(urgency=0)
    clients.core.switch(policy_of(), clients.core.profile)
    assert len(clients.core.sessions) == 0 and clients.floors == 0


class Moment:
    """A clock that stands still."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_home_is_forgotten_in_time_and_known_to_its_tenant_only() -> None:
    clock = Moment()
    homes = sessions.Homes(lambda: MEMORY, clock)
    homes.move(("a", "s"), 3)
    assert (homes.of(("a", "s")), homes.of(("b", "s"))) == (3, None)
    clock.now = MEMORY - 1
    homes.move(("a", "s"), 1)
    clock.now = 2 * MEMORY - 2
    assert homes.of(("a", "s")) == 1
    clock.now = 2 * MEMORY
    assert homes.of(("a", "s")) is None
    homes.move(("a", "new"), 0)
    assert len(homes) == 1


def test_homes_are_bounded_and_a_flood_leaves_half_of_them_to_others(monkeypatch) -> None:
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 20)
    homes = sessions.Homes(lambda: MEMORY, Moment())
    for number in range(10):
        homes.move(("quiet", str(number)), number)
    for number in range(100):
        homes.move(("loud", str(number)), 0)
    assert len(homes) == 20
    assert [homes.of(("quiet", str(number))) for number in range(1, 10)] == list(range(1, 10))
