"""Lines of the event log: one JSON object per transition of a request, hold and decision."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.record.lifecycle import Transition

LONGEST_ID = 128  # characters of a request id in the log
_MOST_BLOCKS = 256  # hashes of KV blocks of a request
_SALT = os.urandom(16)  # of these: without it, a hash would show what a prompt begins with
_SUFFIX = re.compile(r"(?:(?:-\d+)?-[0-9a-f]{8})?$")  # what vLLM adds to a client's id
_IDS = ("request", "tenant", "for", "floor_by")
_MARK = ', "chain": "'


class Chain:
    """Ends each line with a hash of it and of the hash before, so that a line cannot be changed,
    removed or moved unnoticed; without a key, whoever can write the log can hash it anew."""

    def __init__(self, key: bytes = b"") -> None:
        self.key = key
        self.last = ""  # the hash of the line before; empty for the first one

    def seal(self, line: Mapping[str, Any]) -> str:
        """The text of a line, with its hash as the last field."""
        body = json.dumps(line)[:-1]
        self.last = keyed_hash(self.key, self.last + body)
        return f'{body}{_MARK}{self.last}"}}'

    def follow(self, text: str) -> bool:
        """Go on to a line of a log; whether it follows the line before, unchanged."""
        body, _, end = text.rpartition(_MARK)
        wanted = keyed_hash(self.key, self.last + body)
        self.last = end.removesuffix('"}')
        return end == f'{wanted}"}}'


def keyed_hash(key: bytes, text: str) -> str:
    """128 bits in hexadecimal digits."""
    data = text.encode()
    digest = hmac.new(key, data, hashlib.sha256) if key else hashlib.sha256(data)
    return digest.hexdigest()[:32]


def hashed_id(key: bytes, name: str) -> str:
    """A keyed hash in place of an id; what vLLM has added to the client's id stays."""
    end = _SUFFIX.search(name)
    kept = "" if end is None else end[0]
    return keyed_hash(key, name.removesuffix(kept))[:16] + kept


def hash_ids(line: dict[str, Any], key: bytes) -> None:
    """Replace ids and tenant in a line."""
    for name in _IDS:
        if name in line:
            line[name] = hashed_id(key, line[name])


class Event(NamedTuple):
    """A line of the log, copied from a job because that changes later."""

    time: float  # Unix time
    level: int
    fields: Mapping[str, Any]  # the others, in order; empty ones are left out

    @classmethod
    def of(cls, transition: Transition, now: float, policy: str = "") -> Event:
        """Copy a transition that happened at Unix time `now`. Unlike the policy's clock, Unix time
        does not stop while the engine is paused."""
        job = transition.job
        fields = _fields(
            job,
            before=None if transition.before is None else transition.before.value,
            state=transition.state.value,
            reason=transition.reason,
            plan=transition.plan,
        )
        if job.first_token is not None:
            fields["first_token"] = round(now - (transition.time - job.first_token), 6)
        fields |= transition.decision
        if transition.state.is_end:
            fields |= _replayed(job)
        if transition.waited:
            fields["waited"] = [
                (part.cause.value, part.level, round(part.seconds, 6)) for part in transition.waited
            ]
        if transition.beneficiary is not None:
            fields |= _for(transition.beneficiary)
        fields["policy"] = policy
        return cls(now, job.level, fields)

    @classmethod
    def of_hold(cls, job: Job, seconds: float, now: float, policy: str = "") -> Event:
        """A running job was held for this long, until Unix time `now`."""
        held = {"held": round(seconds, 6)}
        if job.seat is not None and job.seat.held_for is not None:
            held |= _for(job.seat.held_for)
        return cls.of_note(job, "held", held, now=now, policy=policy)

    @classmethod
    def of_note(
        cls, job: Job, what: str, details: Mapping[str, Any], now: float, policy: str = ""
    ) -> Event:
        """Something that is no change of state, at Unix time `now`; see `Listener.noted`."""
        state = job.state.value
        fields = _fields(job, before=state, state=state, reason=what)
        fields |= details
        fields["policy"] = policy
        return cls(now, job.level, fields)

    @classmethod
    def of_engine(cls, facts: Mapping[str, Any], now: float) -> Event:
        """The shape of the engine, its policy and the times of some steps."""
        return cls(now, 0, {"log": "engine", **facts})

    def line(self, engine: int, tier: str) -> dict[str, Any]:
        """The JSON object."""
        fields = {name: value for name, value in self.fields.items() if value != ""}
        if "tier" in fields:
            fields["tier"] = tier
        if "blocks" in fields:
            fields["blocks"] = short_hashes(fields["blocks"])
        return {"time": round(self.time, 6), "engine": engine, **fields}


def _fields(
    job: Job, before: str | None, state: str, reason: str, plan: str = ""
) -> dict[str, Any]:
    return {
        "request": job.request_id[:LONGEST_ID],
        "tier": None,  # see `Event.line`
        "level": job.level,
        "level_from": job.level_source.value,
        "from": before,
        "state": state,
        "tenant": job.tenant,
        "reason": reason,
        "plan": plan,
        "prompt_tokens": job.prompt_tokens,
        "output_tokens": job.generated,
    }


def _for(job: Job) -> dict[str, Any]:
    return {"for": job.request_id[:LONGEST_ID], "for_level": job.level}


def _replayed(job: Job) -> dict[str, Any]:
    """What a replay needs to know of a request that ended (`lab.whatif`)."""
    more: dict[str, Any] = {"max_tokens": job.max_output_tokens}
    if job.stated.shortest:
        more["min_tokens"] = job.stated.shortest
    if job.source is not None:
        more["came"] = round(job.source.came, 6)
    if job.read_at is not None:
        more["read_after"] = round(job.read_at - job.arrival, 6)
    prediction = job.prediction  # the instant reader's, if the request ended before the other
    if prediction is not None:
        more["urgency"] = [round(share, 4) for share in prediction.urgency]
        if prediction.length is not None:
            more["length"] = [round(share, 4) for share in prediction.length]
    if job.source is not None and job.source.block_hashes:
        more["blocks"] = tuple(job.source.block_hashes[:_MOST_BLOCKS])
    return more


def short_hashes(hashes: Sequence[bytes]) -> str:
    """Three bytes of each hash, in base64; they are comparable within this process only."""
    short = [hashlib.blake2b(block, digest_size=3, key=_SALT).digest() for block in hashes]
    return base64.b64encode(b"".join(short)).decode()
