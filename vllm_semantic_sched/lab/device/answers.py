"""The answers of the emulated device. Each token is a hash of the prompt and its place in the
answer, so that a request that was preempted, held or swapped must give the same tokens."""

import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist
from typing import Any

from vllm_semantic_sched.lab.bench.workload import ANSWER_FIELD

REASONING_FIELD = "reasoning"
"""Extra argument of a request that reasons first: so many tokens, and the id of the last one."""
_MASK = (1 << 64) - 1
_RESERVED = 16  # token ids that no answer has: special tokens of most vocabularies
# Of the lengths of answers for which none is given, lognormal.
_MEDIAN = 250  # tokens
_SIGMA = 0.7


def mix(value: int) -> int:
    """A hash of 64 bits (the finalizer of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Answer:
    """What a request gets. `length`: tokens, the end token included; `forbidden`: token ids that
    would end it earlier; `reasoning`: tokens before the part that a grammar shapes, the last of
    which is `reasoning_end`."""

    seed: int
    length: int
    end_token: int
    vocabulary: int
    forbidden: Collection[int] = ()
    reasoning: int = 0
    reasoning_end: int | None = None

    def token(self, place: int, allowed: Sequence[int] | None = None) -> int:
        """The token at this place of the answer, from 0; `allowed`: those of a grammar."""
        if place < self.reasoning:
            thought = self.reasoning_end if place + 1 == self.reasoning else self._free(place)
            if thought is not None and (allowed is None or thought in allowed):
                return thought
        if allowed is not None:
            if place + 1 >= self.length and self.end_token in allowed:
                return self.end_token
            return allowed[mix(self.seed + place) % len(allowed)]
        if place + 1 == self.length:
            return self.end_token
        return self._free(place)

    def _free(self, place: int) -> int:
        """A token that no grammar shapes."""
        choices = self.vocabulary - _RESERVED
        number = mix(self.seed + place)
        token = _RESERVED + number % choices
        while token in self.forbidden or token == self.end_token:
            number += 1
            token = _RESERVED + number % choices
        return token

    def draft(self, place: int, acceptance: float) -> int:
        """What a drafter guesses for this place: the token itself in that share of places."""
        token = self.token(place)
        if mix(self.seed ^ ~place & _MASK) < acceptance * 2**64:
            return token
        return token + 1 if token + 1 < self.vocabulary else token - 1

    def drafts(self, first: int, most: int, acceptance: float, vary: bool) -> list[int]:
        """What a drafter guesses from this place on: so many tokens, or up to so many."""
        count = mix(self.seed + first) % (most + 1) if vary else most
        return [self.draft(place, acceptance) for place in range(first, first + count)]

    def tokens(self, count: int | None = None) -> list[int]:
        """The first `count` tokens, or all."""
        if count is None:
            count = self.length
        return [self.token(place) for place in range(count)]


def make_answer(
    prompt: Sequence[int],
    vocabulary: int,
    end_token: int,
    extra_args: dict[str, Any] | None = None,
    stop_tokens: Collection[int] = (),
    min_tokens: int = 0,
) -> Answer:
    """The answer to a prompt of token ids. Its length is that of the benchmark's field in
    `extra_args`, which no scheduler reads; else it is drawn from the prompt."""
    seed = int.from_bytes(blake2b(array("q", prompt).tobytes(), digest_size=8).digest(), "little")
    given = (extra_args or {}).get(ANSWER_FIELD)
    reasoning, reasoning_end = (extra_args or {}).get(REASONING_FIELD, (0, None))
    if isinstance(given, list) and len(given) == 2:
        length, end_token = given
    else:
        drawn = NormalDist(math.log(_MEDIAN), _SIGMA).inv_cdf((mix(seed) % 9998 + 1) / 10_000)
        length = round(math.exp(drawn))
    return Answer(
        seed=seed,
        length=max(length, min_tokens + 1, reasoning + 1),
        end_token=end_token,
        vocabulary=vocabulary,
        forbidden=frozenset(stop_tokens),
        reasoning=reasoning,
        reasoning_end=reasoning_end,
    )
