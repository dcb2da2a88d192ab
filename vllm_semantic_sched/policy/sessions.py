"""What the requests of a session leave for its next one: their last words, an urgency floor, and
the engine that has their KV in its prefix cache."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.facts.job import STATED, Floor, LevelSource, SessionTurn

MOST_SESSIONS = 10_000
MOST_WORDS = 300  # characters kept of a session

SessionKey = tuple[str, str]  # tenant, id of the session

_Value = TypeVar("_Value")
_Engine = TypeVar("_Engine")


@dataclass(slots=True)
class _Entry(Generic[_Value]):
    used: float  # seconds on the caller's clock, when the session was used last
    value: _Value


class _Table(Generic[_Value]):
    """A value of each session used in the last `memory()` seconds (None: no sessions), of at most
    `MOST_SESSIONS`. A session is one tenant's. O(1), amortized."""

    def __init__(self, memory: Callable[[], float | None]) -> None:
        self._memory = memory
        self._sessions: OrderedDict[SessionKey, _Entry[_Value]] = OrderedDict()  # by last use
        self._of_tenant: dict[str, OrderedDict[SessionKey, None]] = {}  # the same

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: SessionKey, now: float) -> _Value | None:
        """The value of a session; None if it is unknown. Changes nothing."""
        entry = self._sessions.get(key)
        return entry.value if entry is not None and self.remembers(entry.used, now) else None

    def put(self, key: SessionKey, value: _Value, now: float) -> None:
        """Set the value of a session, which is used now."""
        self._forget_old(now)
        entry = self._sessions.get(key)
        if entry is None:
            self._make_room(key[0])
            entry = self._sessions[key] = _Entry(now, value)
            self._of_tenant.setdefault(key[0], OrderedDict())[key] = None
        entry.used, entry.value = now, value
        self._sessions.move_to_end(key)
        self._of_tenant[key[0]].move_to_end(key)

    def clear(self) -> None:
        """Forget all sessions."""
        self._sessions.clear()
        self._of_tenant.clear()

    def remembers(self, then: float, now: float) -> bool:
        """Whether what was at a time is remembered now."""
        return now - then <= (self._memory() or 0.0)

    def _make_room(self, tenant: str) -> None:
        if len(self._sessions) >= MOST_SESSIONS:
            # Nobody can make the table forget the sessions of all others.
            own = self._of_tenant.get(tenant, ())
            self._remove(next(iter(own if len(own) > MOST_SESSIONS // 2 else self._sessions)))

    def _forget_old(self, now: float) -> None:
        while self._sessions:
            oldest, entry = next(iter(self._sessions.items()))
            if self.remembers(entry.used, now):
                return
            self._remove(oldest)

    def _remove(self, key: SessionKey) -> None:
        del self._sessions[key]
        own = self._of_tenant[key[0]]
        del own[key]
        if not own:
            del self._of_tenant[key[0]]


@dataclass(slots=True)
class _Session:
    turns: int = 0
    words: tuple[str, ...] = ()  # of its last requests, the newest first
    floor: Floor | None = None


class Sessions(_Table[_Session]):
    """Words and floors of the sessions of the last `sessions.memory` seconds. `begin` may run on
    any thread, beside the others."""

    def __init__(self, ref: PolicyRef) -> None:
        super().__init__(lambda: ref.policy.sessions.memory)
        self._ref = ref
        self._floors: OrderedDict[SessionKey, None] = OrderedDict()  # in order of their times

    def begin(self, tenant: str, session: str, now: float) -> SessionTurn:
        """The next turn of a session. Changes nothing."""
        turn = SessionTurn((tenant, session))
        known = self.get(turn.key, now)
        if known is not None:
            turn.earlier = known.words
            floor = known.floor
            if floor is not None and self.remembers(floor.time, now):
                turn.floor = floor
        return turn

    def arrived(self, turn: SessionTurn, now: float) -> None:
        """Count a turn, and keep its words for the next one."""
        session = self.get(turn.key, now) or _Session()
        self.put(turn.key, session, now)
        session.turns += 1
        turn.number = session.turns
        if turn.words and turn.words not in session.words[:1]:
            session.words = _within(MOST_WORDS, (turn.words, *session.words))
        turn.words = ""

    def decided(self, turn: SessionTurn, latest: Floor) -> None:
        """Take note of the level of a session's request. A level that its client states, or that
        its text has been read at, becomes the floor if it is more urgent than the default level;
        else it ends the floor. A provisional or inherited level changes nothing."""
        session = self.get(turn.key, latest.time)
        read = latest.source is LevelSource.PREDICTION
        if session is None or not (read or latest.source in STATED):
            return
        if latest.level >= self._ref.policy.default_level:
            # A text does not end a floor that is newer than itself.
            if not read or session.floor is turn.floor:
                session.floor = None
                self._floors.pop(turn.key, None)
            return
        session.floor = latest
        evidence = turn.floor
        if read and evidence is not None and evidence.level <= latest.level:
            # The text says that it is not over.
            session.floor = evidence._replace(time=latest.time)
        self._floors[turn.key] = None
        self._floors.move_to_end(turn.key)

    def floors(self, now: float) -> int:
        """Number of floors in force."""
        while self._floors:
            oldest = next(iter(self._floors))
            session = self._sessions[oldest].value
            if session.floor is not None and self.remembers(session.floor.time, now):
                break
            session.floor = None
            del self._floors[oldest]
        return len(self._floors)

    def clear(self) -> None:
        """Forget all sessions."""
        super().clear()
        self._floors.clear()

    def _remove(self, key: SessionKey) -> None:
        super()._remove(key)
        self._floors.pop(key, None)


class Homes(_Table[_Engine]):
    """The engine, by any name, that got the last request of each session and has its KV cached.
    `memory`: as `sessions.memory`; `clock`: seconds."""

    def __init__(self, memory: Callable[[], float | None], clock: Callable[[], float]) -> None:
        super().__init__(memory)
        self._clock = clock

    def of(self, key: SessionKey) -> _Engine | None:
        """The home of a session; None if it is unknown."""
        return self.get(key, self._clock())

    def move(self, key: SessionKey, engine: _Engine) -> None:
        """A request of a session goes to an engine."""
        self.put(key, engine, self._clock())


def _within(most: int, words: tuple[str, ...]) -> tuple[str, ...]:
    """As many of the first texts as have at most so many characters, the last one cut."""
    kept = []
    for text in words:
        if most <= 0:
            break
        kept.append(text[:most])
        most -= len(text)
    return tuple(kept)
