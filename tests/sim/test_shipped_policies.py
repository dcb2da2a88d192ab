"""Every key of a shipped policy has an effect: without it, some load or SLO ends otherwise."""

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.files import read_config, shipped_names
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.overload.control import OverloadControl
from vllm_semantic_sched.policy.profile.formula import load_profile
from vllm_semantic_sched.policy.retention import HostRoom
from vllm_semantic_sched.sim.predictor import draw_predictions
from vllm_semantic_sched.sim.scenario import parse_scenarios
from vllm_semantic_sched.sim.simulation import simulate
from vllm_semantic_sched.sim.workload import Workload

Keys = dict[str, Any]

# Loads: everything that differs from this engine.
ENGINE = {"profile": "cpu-2core-tiny", "seats": 6, "kv_blocks": 150, "block_size": 16}
SLOW = {"step": 1.0, "per_sequence": 0.0, "per_context_token": 0.0}  # seconds


def load_of(*columns: Any) -> Workload:
    """Requests of one large and some small tenants: arrivals, levels, prompts, outputs."""
    index = np.arange(len(columns[0]))
    tenants = np.where(index % 4, 1 + index % 19, 0)
    return Workload(*map(np.asarray, columns), tenants=tenants)


def mixed(
    levels: int, count: int, seconds: float, prompt: int, output: int, urgent: float | None = None
) -> Workload:
    """Requests of all levels and lengths; `urgent`: share of level 0."""
    rng = np.random.default_rng(7)
    share = 1 / levels if urgent is None else urgent
    return load_of(
        np.sort(rng.uniform(0, seconds, count)),
        rng.integers(1, levels, count) * (rng.random(count) >= share),
        rng.integers(1, prompt, count),
        rng.integers(1, output, count),
    )


def wave(levels: int) -> Workload:
    """Urgent requests that all come when unimportant ones have all seats."""
    low, high = 20, 16
    return load_of(
        [0.0] * low + [1.0] * high,
        [levels - 1] * low + [0] * high,
        [10] * (low + high),
        [300] * low + [20] * high,
    )


def waves(levels: int) -> Workload:
    """Requests of level 1 that come in waves and take the seats of unimportant ones of all
    lengths."""
    low, high, times = 20, 16, 4
    return load_of(
        [0.0] * low + np.repeat(1.0 + 3 * np.arange(times), high).tolist(),
        [levels - 1] * low + [1] * high * times,
        np.linspace(10, 200, low + high * times).astype(int).tolist(),
        np.linspace(100, 900, low).astype(int).tolist()
        + np.linspace(20, 400, high * times).astype(int).tolist(),
    )


def slow_answers(levels: int) -> Workload:
    """Answers of level 1 that come too slowly, ten and then thirty of them; some time after each,
    an unimportant request."""
    return load_of(
        [0.0] * 10 + [10.0] + [60.0] * 30 + [80.0],
        [1] * 10 + [levels - 1] + [1] * 30 + [levels - 1],
        [10] * 42,
        [20] * 42,
    )


def recovery(levels: int) -> Workload:
    """A crowd of level 1 that waits too long, then one after the other, and unimportant ones."""
    rows = [(0.0, 1, 20)] * 40
    rows += [(5.0 + second, 1, 2) for second in range(100)]
    rows += [(5.5 + second, levels - 1, 2) for second in range(100)]
    arrivals, at, answers = zip(*sorted(rows), strict=True)
    return load_of(arrivals, at, [10] * len(rows), answers)


def one_by_one(levels: int) -> Workload:
    """Urgent requests that come one after the other beside a long unimportant one."""
    urgent = 8
    return load_of(
        [0.0, *(1.0 + np.arange(urgent))],
        [levels - 1] + [0] * urgent,
        [600] + [60] * urgent,
        [100] + [5] * urgent,
    )


def left_behind(levels: int) -> Workload:
    """Unimportant requests, then more urgent ones for a quarter of an hour."""
    early, late = 40, 400
    rng = np.random.default_rng(7)
    return load_of(
        [0.0] * early + np.linspace(1, 900, late).tolist(),
        [levels - 1] * early + rng.integers(0, 2, late).tolist(),
        [10] * (early + late),
        [20] * (early + late),
    )


LOADS: dict[str, tuple[Callable[[int], Workload], Keys, bool]] = {
    "one seat": (one_by_one, {"seats": 1, "batch": SLOW | {"step": 0.1}}, True),
    "little KV": (one_by_one, {"kv_blocks": 45, "batch": SLOW | {"step": 0.1}}, True),
    "slow answers": (
        slow_answers,
        {"seats": 40, "kv_blocks": 2000, "batch": SLOW | {"step": 0.1}},
        True,
    ),
    "recovery": (recovery, {"seats": 4, "batch": SLOW | {"step": 0.01}}, True),
    "wave": (wave, {"seats": 20, "kv_blocks": 600}, True),
    "one tier": (
        lambda levels: load_of([0.0] * 30 + [1.0] * 30, [levels - 1] * 60, [10] * 60, [20] * 60),
        {"batch": SLOW},
        True,
    ),
    "slow": (lambda levels: mixed(levels, 150, 300.0, 300, 60), {"batch": SLOW}, True),
    "mixed": (lambda levels: mixed(levels, 150, 10.0, 400, 80), {}, True),
    "slow, unhinted": (
        lambda levels: mixed(levels, 150, 300.0, 300, 60),
        {"batch": SLOW},
        False,
    ),
    "unhinted": (lambda levels: mixed(levels, 80, 5.0, 200, 80), {}, False),
    "claims": (lambda levels: mixed(levels, 150, 10.0, 200, 80, urgent=0.7), {}, True),
    "unimportant crowd": (
        lambda levels: load_of([0.0] * 600, [levels - 1] * 600, [10] * 600, [2] * 600),
        {"seats": 32},
        True,
    ),
    "waves": (waves, {"seats": 20, "kv_blocks": 2000, "batch": SLOW | {"step": 0.02}}, True),
    "waves and swap": (
        waves,
        {"seats": 20, "kv_blocks": 2000, "swap": True, "batch": SLOW | {"step": 0.02}},
        True,
    ),
    "left behind": (left_behind, {"batch": SLOW}, True),
    "crowd": (lambda levels: mixed(levels, 3200, 0.1, 20, 4, urgent=0.05), {"seats": 64}, True),
}


def simulated(keys: Keys, load: str) -> list[tuple[Any, ...]]:
    """What becomes of each request of a load."""
    make, engine, hints = LOADS[load]
    content = {
        "workload": {"requests": 1, "hints": hints},
        "engine": ENGINE | engine,
        "schedulers": {"it": keys},
    }
    scenario = parse_scenarios(content)[0]
    levels = scenario.policies["it"].levels
    workload, rng = make(levels), np.random.default_rng(1)
    predictions = draw_predictions(scenario.settings.predictor, workload, levels, rng)
    try:
        runs = simulate(scenario, "it", given=(workload, predictions)).runs
    except PolicyError as error:  # an engine that is too small for the reservations
        return [(str(error),)]
    return [(run.refused, run.started, run.first_token, run.finish) for run in runs]


def facts(keys: Keys) -> Any:
    """Names, whether a text is read, and the level of a request without a hint."""
    policy = parse_policy(keys)
    return policy.tier_names, policy.reads(hinted=False), policy.default_level


def engine_parts(keys: Keys) -> tuple[SchedulingCore, OverloadControl]:
    policy = parse_policy(keys)
    core = SchedulingCore(policy, load_profile("default"))
    capacity = EngineCapacity(8, 1000, 16)
    core.set_capacity(capacity)
    assert core.overload is not None
    return core, core.overload


def measured_slos(keys: Keys) -> Any:
    """Compliance and headroom of each tier, as the server reports them."""
    measured = []
    # The longest wait is 39 times as long.
    for wait, per_token, tokens in ((0.5, 0.0, 2), (0.0, 0.01, 2), (0.0, 0.01, 201)):
        core, control = engine_parts(keys)
        now = 0.0
        core.lifecycle.clock = lambda: now  # noqa: B023 - the present value
        for number in range(40 * core.policy.levels):
            level, delay = number % core.policy.levels, number // core.policy.levels
            hint = core.read_hints({"urgency": level}, 0)
            job = core.arrive(core.draft(str(number), 10, 100, hint, False), -wait * delay)
            core.enqueue(job, core.waiting)
            core.take(job, core.waiting)
            core.start(job)
            now = 0.0
            job.generated = 1
            core.first_token(job)
            now = per_token * delay * (tokens - 1)
            job.generated = tokens
            core.finish(job, AnswerEnd.STOPPED)
        slo = control.load.slo
        measured += [(slo.compliance(n), slo.headroom(n)) for n in range(core.policy.levels)]
    return measured


def plans(keys: Keys) -> Any:
    """Plans for victims of several lengths, with room on the host for each."""
    core, _ = engine_parts(keys)
    found = []
    for tokens in (20, 200, 2000):
        hint = core.read_hints({"urgency": core.policy.levels - 1}, 0)
        job = core.arrive(core.draft(str(tokens), tokens, 100, hint, False), 0.0)
        job.computed = tokens
        found.append(core.plan_preemption(job, job.computed, HostRoom(16, 1000)))
    return found


def superseded(keys: Keys) -> Any:
    """Requests, waiting and running, that end when one with the same key arrives."""
    core, control = engine_parts(keys)
    ended = []
    for name in ("older", "newer", "newest"):
        job = core.arrive(core.draft(name, 10, 100, core.read_hints({}, 0), False), 0.0)
        core.enqueue(job, core.waiting)
        key = "page 7" if core.policy.dedup != "none" else None  # as the engine reads it
        ended += control.admit(job, 0.0, lambda: 0, key, name)
        if name == "newer":
            core.take(job, core.waiting)
            core.start(job)
    return [(job.request_id, refusal.code) for job, refusal in ended]


def session(keys: Keys) -> Any:
    """Levels of an urgent request of a session, and of one after it whose client states none."""
    core = SchedulingCore(parse_policy(keys), load_profile("default"))
    levels = []
    for name, hints in (("first", {"urgency": 0}), ("second", {})):
        turn = None
        if core.policy.sessions.memory is not None:  # else the engine reads no sessions
            turn = core.sessions.begin("somebody", "a chat", 0.0)
        hint = core.read_hints(hints, 0)
        job = core.arrive(core.draft(name, 10, 100, hint, False, session=turn), 0.0)
        levels.append(job.level)
    return levels


def turns(keys: Keys) -> Any:
    """Chats of which the prefix cache holds a part, and whose requests state deadlines."""
    levels = parse_policy(keys).levels
    content = {
        "workload": {
            "arrivals": "poisson",
            "requests": 120,
            "rate": 60.0,
            "hints": True,
            "prompt": {"kind": "lognormal", "median": 60, "sigma": 0.8, "most": 400},
            "output": {"kind": "lognormal", "median": 10, "sigma": 0.8, "most": 100},
            "reuse": {"beginnings": 4, "beginning": {"value": 1200}, "turns": 4, "pause": 1.0},
            "deadlines": [[2.0, 20.0]] * levels,
        },
        "engine": ENGINE | {"prefix_caching": True, "kv_blocks": 400},
        "schedulers": {"it": keys},
    }
    runs = simulate(parse_scenarios(content)[0], "it").runs
    return [(run.refused, run.started, run.finish) for run in runs]


PROBES: dict[str, Callable[[Keys], Any]] = {
    "facts": facts,
    "plans": plans,
    "superseded": superseded,
    **{load: partial(simulated, load=load) for load in LOADS},
    "slos": measured_slos,
    "session": session,
    "turns": turns,
}

# What shows the effect of the keys that end so: tried early, because the rest would take long. An
# entry that is no longer right costs only time.
SHOWN_BY: dict[str, tuple[str, ...]] = {
    "slos": ("slo.ttft", "slo.tpot", "slo.e2e", "slo.percentile"),
    "crowd": ("admission.queue.requests", "tenant.requests", "tiers.1.queue.requests"),
    "unimportant crowd": ("tiers.2.queue.requests", "reserve.mode", "tiers.1.reserve.kv"),
    "left behind": ("queue.timeout",),
    "claims": ("top.share", "preemption.after_limit"),
    "superseded": ("dedup",),
    "session": ("sessions.memory",),
    "turns": ("rank_uncached", "deadlines.stated"),
    "mixed": ("pace", "reserved.preemption.victim"),
    "unhinted": ("base", "preemption.victim", "protect.price", "ems.weighted_levels.factor"),
    "slow": (
        *("aging.enabled", "aging.interval", "protect.worth"),
        *("tiers.0.share", "tiers.1.share", "fair_share.enabled"),
        *("admission.over_share", "preemption.min_level_gap"),
        *("preemptible", "takes_seats", "tiers.2.shed_order", "shedding.enabled"),
        *("shedding.waiting", "deadlines.enabled"),
    ),
}


@cache
def outcome(policy: str, probe: str) -> Any:
    return PROBES[probe](shipped(policy))


@cache
def shipped(policy: str) -> Keys:
    keys: Keys = read_config(policy, kind="policy")[0]
    return keys


def leaves(keys: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the values in a policy file."""
    if isinstance(keys, dict) and keys:
        pairs = list(keys.items())
    elif isinstance(keys, list) and keys and isinstance(keys[0], dict):
        pairs = list(enumerate(keys))
    else:
        yield path
        return
    for name, value in pairs:
        yield from leaves(value, (*path, name))


def without(keys: Keys, path: tuple[Any, ...]) -> Keys:
    """The policy with one key at its default; a name, which has none, becomes another one."""
    changed = copy.deepcopy(keys)
    inner: Any = changed
    for part in path[:-1]:
        inner = inner[part]
    if path[-1] == "name":
        inner["name"] = "-"
    else:
        del inner[path[-1]]
    return changed


def has_effect(policy: str, path: tuple[Any, ...]) -> bool:
    try:
        reset = without(shipped(policy), path)
        if parse_policy(reset) == parse_policy(shipped(policy)):
            return False
    except PolicyError:
        return True  # other keys of the file need it
    name = ".".join(map(str, [policy, *path]))
    early = [probe for probe, ends in SHOWN_BY.items() if name.endswith(ends)]
    probes = dict.fromkeys(["facts", *early, *PROBES])
    return any(PROBES[probe](reset) != outcome(policy, probe) for probe in probes)


CASES = [(name, path) for name in shipped_names("policy") for path in leaves(shipped(name))]


@pytest.mark.parametrize(
    ("policy", "path"), CASES, ids=[".".join(map(str, [name, *path])) for name, path in CASES]
)
def test_every_key_has_an_effect(policy: str, path: tuple[Any, ...]) -> None:
    assert has_effect(policy, path), "remove it, or add a load that shows what it does"
