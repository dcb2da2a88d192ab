"""The second look at long prompts: the parts that a first reading did not see."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.predict.window import DEFAULT_WINDOW, cut_text

MOST_PARTS = 8  # of one prompt
LONGEST = 16_000  # characters of a prompt of which parts are taken
_BYTES = 3.2  # in a wordpiece: few texts have less, so that a part fits into the window
_FRAMING = 20  # wordpieces from each end of the prompt, which say what the part is for
_SPECIAL = 2  # wordpieces of a window
_OVERLAP = 30  # bytes
_LEAST = 40


def parts_of(text: str) -> list[str]:
    """What a first reading of a prompt leaves out, at most `MOST_PARTS`, of a chat the newest turns
    first; empty if it was seen whole. Each part stands between the start and the end of the prompt:
    a scene of a novel alone would be misread as an emergency."""
    data = cut_text(text, LONGEST).encode()
    room = DEFAULT_WINDOW - _SPECIAL
    seen = int(room * _BYTES / 2)
    if len(data) < 2 * seen + _LEAST:
        return []
    edge = int(_FRAMING * _BYTES)
    size = int((room - 2 * _FRAMING) * _BYTES)
    beginning = _text(data[:edge])
    end = _text(data[-edge:])
    starts = range(seen, len(data) - seen, size - _OVERLAP)[:MOST_PARTS]
    return [f"{beginning} {_text(data[start : start + size])} {end}" for start in starts]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "ignore")  # a cut may split a character


@dataclass(eq=False)
class Look:
    """A second look at the prompt of one request."""

    request_id: str
    level: int  # lower after a part has raised it
    text: Callable[[], str]  # gives the prompt
    raised: bool = False  # whether a part has raised the level

    @cached_property
    def unread(self) -> list[str]:
        """The parts that are still to be read, the next one last."""
        return parts_of(self.text())[::-1]


class SecondLooks:
    """Requests that are to be read again, those with the smallest key first."""

    def __init__(self) -> None:
        self._heap: AddressableHeap[Look] = AddressableHeap()
        self._looks: dict[str, Look] = {}
        self.ended = {True: 0, False: 0}  # number of looks, by whether they have raised the level

    def __len__(self) -> int:
        return len(self._looks)

    def __contains__(self, look: object) -> bool:
        return look in self._heap

    def add(self, look: Look, key: tuple[bool, float]) -> None:
        """Add a look, in place of an earlier one at the same request."""
        self.cancel(look.request_id)
        self._heap.push(look, key)
        self._looks[look.request_id] = look

    def peek(self) -> Look | None:
        """The next look; None without any."""
        return self._heap.peek()

    def cancel(self, request_id: str) -> None:
        """Remove the look at a request, if there is one."""
        look = self._looks.pop(request_id, None)
        if look is not None:
            self._heap.discard(look)

    def end(self, look: Look) -> None:
        """Remove and count a look that nobody has removed."""
        if look in self:
            self.cancel(look.request_id)
            self.ended[look.raised] += 1
