"""What the requests of a session leave for its next one: their last words and an urgency floor."""

from collections import OrderedDict
from dataclasses import dataclass

from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.facts.job import STATED, Floor, Job, LevelSource, SessionTurn

MOST_SESSIONS = 10_000
MOST_WORDS = 300  # characters kept of a session

_Key = tuple[str, str]  # tenant, id of the session


@dataclass(slots=True)
class _Session:
    """A session; times are seconds on the policy's clock."""

    used: float = 0.0  # its last request
    turns: int = 0
    words: tuple[str, ...] = ()  # of its last requests, the newest first
    floor: Floor | None = None


class Sessions:
    """The sessions of the last `sessions.memory` seconds, at most `MOST_SESSIONS`. `begin` may run
    on any thread, beside the others. O(1), amortized."""

    def __init__(self, ref: PolicyRef) -> None:
        self._ref = ref
        self._sessions: OrderedDict[_Key, _Session] = OrderedDict()  # in order of their last use
        self._of_tenant: dict[str, OrderedDict[_Key, None]] = {}  # the same
        self._floors: OrderedDict[_Key, None] = OrderedDict()  # in order of their times

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def _memory(self) -> float:
        """Seconds; none if the policy has no sessions."""
        return self._ref.policy.sessions.memory or 0.0

    def begin(self, tenant: str, session: str, now: float) -> SessionTurn:
        """The next turn of a session. Changes nothing."""
        turn = SessionTurn((tenant, session))
        known = self._sessions.get(turn.key)
        if known is not None and now - known.used <= self._memory:
            turn.earlier = known.words
            floor = known.floor
            if floor is not None and now - floor.time <= self._memory:
                turn.floor = floor
        return turn

    def arrived(self, turn: SessionTurn, now: float) -> None:
        """Count a turn, and keep its words for the next one."""
        self._forget_old(now)
        session = self._sessions.get(turn.key)
        if session is None:
            session = self._add(turn.key)
        self._sessions.move_to_end(turn.key)
        self._of_tenant[turn.key[0]].move_to_end(turn.key)
        session.used = now
        session.turns += 1
        turn.number = session.turns
        if turn.words and turn.words not in session.words[:1]:
            session.words = _within(MOST_WORDS, (turn.words, *session.words))
        turn.words = ""

    def decided(self, job: Job, now: float) -> None:
        """Take note of the level of a session's request. A level that its client states, or that
        its text has been read at, becomes the floor if it is more urgent than the default level;
        else it ends the floor. A provisional or inherited level changes nothing."""
        turn = job.session
        session = None if turn is None else self._sessions.get(turn.key)
        read = job.level_source is LevelSource.PREDICTION
        if turn is None or session is None or not (read or job.level_source in STATED):
            return
        if job.level >= self._ref.policy.default_level:
            # A text does not end a floor that is newer than itself.
            if not read or session.floor is turn.floor:
                session.floor = None
                self._floors.pop(turn.key, None)
            return
        floor = Floor(job.level, job.request_id, job.level_source, now)
        evidence = turn.floor
        if read and evidence is not None and evidence.level <= job.level:
            floor = evidence._replace(time=now)  # the text says that it is not over
        session.floor = floor
        self._floors[turn.key] = None
        self._floors.move_to_end(turn.key)

    def floors(self, now: float) -> int:
        """Number of floors in force."""
        while self._floors:
            oldest = next(iter(self._floors))
            floor = self._sessions[oldest].floor
            if floor is not None and now - floor.time <= self._memory:
                break
            self._sessions[oldest].floor = None
            del self._floors[oldest]
        return len(self._floors)

    def clear(self) -> None:
        """Forget all sessions."""
        for table in (self._sessions, self._of_tenant, self._floors):
            table.clear()

    def _add(self, key: _Key) -> _Session:
        own = self._of_tenant.setdefault(key[0], OrderedDict())
        if len(self._sessions) >= MOST_SESSIONS:
            # Nobody can make the table forget the sessions of all others.
            crowded = len(own) > MOST_SESSIONS // 2
            self._remove(next(iter(own if crowded else self._sessions)))
            own = self._of_tenant.setdefault(key[0], own)
        own[key] = None
        session = self._sessions[key] = _Session()
        return session

    def _forget_old(self, now: float) -> None:
        while self._sessions:
            oldest, session = next(iter(self._sessions.items()))
            if now - session.used <= self._memory:
                return
            self._remove(oldest)

    def _remove(self, key: _Key) -> None:
        del self._sessions[key]
        self._floors.pop(key, None)
        own = self._of_tenant[key[0]]
        del own[key]
        if not own:
            del self._of_tenant[key[0]]


def _within(most: int, words: tuple[str, ...]) -> tuple[str, ...]:
    """As many of the first texts as have at most so many characters, the last one cut."""
    kept = []
    for text in words:
        if most <= 0:
            break
        kept.append(text[:most])
        most -= len(text)
    return tuple(kept)
