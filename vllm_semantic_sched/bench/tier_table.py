"""What `semsched bench tiers` and `bench flood` tell of a run: a row per tier, totals, tables."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_semantic_sched.bench.client import Record
    from vllm_semantic_sched.policy.config.order import Aging

TIERS = ("premium", "standard", "background")


@dataclass(frozen=True)
class TierRow:
    """One tier under one scheduler; seconds. `kept` is the share of all requests sent whose first
    token came in time, None where nothing is promised. `longest_wait` is that for a first token,
    of requests that still waited at the end as well."""

    scheduler: str
    tier: str
    sent: int
    answered: int
    refused: Mapping[str, int]
    unanswered: int
    ttft_p50: float
    ttft_p99: float
    kept: float | None
    longest_wait: float


def tier_row(
    scheduler: str, level: int, promise: float | None, records: Sequence[Record], horizon: float
) -> TierRow:
    """Evaluate one tier.

    Args:
        promise: seconds to the first token, None if none is promised.
        records: of all tiers.
        horizon: seconds after which requests were given up.
    """
    import numpy as np

    mine = [record for record in records if record.level == level]
    ttfts = [one.first_token - one.arrival for one in mine if one.first_token is not None]
    refused = Counter(code for one in mine if (code := refusal_code(one)) is not None)
    waiting = [
        horizon - one.arrival
        for one in mine
        if one.first_token is None and refusal_code(one) is None
    ]
    p50, p99 = np.percentile(ttfts, [50, 99]) if ttfts else (float("nan"),) * 2
    kept = None
    if promise is not None:
        kept = sum(ttft <= promise for ttft in ttfts) / len(mine) if mine else float("nan")
    return TierRow(
        scheduler,
        TIERS[level],
        sent=len(mine),
        answered=sum(one.ok for one in mine),
        refused=dict(refused),
        unanswered=sum(one.finish is None and refusal_code(one) is None for one in mine),
        ttft_p50=float(p50),
        ttft_p99=float(p99),
        kept=kept,
        longest_wait=max([*ttfts, *waiting], default=float("nan")),
    )


def totals_of(
    scheduler: str,
    records: Sequence[Record],
    before: Mapping[str, float],
    after: Mapping[str, float],
    horizon: float,
) -> dict[str, Any]:
    """What the server did as a whole.

    Args:
        before, after: its counters at both ends of the run.
        horizon: see `tier_row`.
    """
    name = "vllm:num_preemptions_total"
    end = max((one.finish for one in records if one.finish), default=horizon)
    strange = sum(one.status not in (None, 200) and refusal_code(one) is None for one in records)
    return {
        "scheduler": scheduler,
        "output_tokens_per_second": sum(len(one.token_ids) for one in records) / end,
        "preemptions_per_minute": 60 * (after[name] - before[name]) / end,
        "latest_send": max(one.sent - one.arrival for one in records if one.sent is not None),
        "strange": f"{strange} requests failed without a code" if strange else "",
    }


def beyond_bound(
    aging: Aging, level: int, records: Sequence[Record], horizon: float
) -> dict[str, float] | None:
    """Compare the waits of a level with the bound of `policy.order.aging`; None if there is none.

    The bound's q and T are those of the run: older requests that waited on arrival, and the
    longest time between two first tokens.
    """
    if not aging.enabled:
        return None
    begun = sorted(one.first_token for one in records if one.first_token is not None)
    longest_gap = max((later - one for one, later in itertools.pairwise(begun)), default=horizon)
    ends = [(one.arrival, _waited_until(one, horizon)) for one in records]
    waits = []
    for one in records:
        if one.level == level and refusal_code(one) is None:
            older = sum(arrival < one.arrival < end for arrival, end in ends)
            bound = aging.wait_bound(level, older, longest_gap)
            if bound is None:
                return None
            waits.append((_waited_until(one, horizon) - one.arrival, bound))
    if not waits:
        return None
    longest = max(waits)
    beyond = sum(wait > bound for wait, bound in waits)
    return {"requests": len(waits), "beyond": beyond, "wait": longest[0], "bound": longest[1]}


def _waited_until(one: Record, horizon: float) -> float:
    ends = [time for time in (one.first_token, one.finish) if time is not None]
    return min(ends, default=horizon)


def refusal_code(record: Record) -> str | None:
    """The code that a request was refused with, as the middleware gives it; else None."""
    if record.error is None or not record.error.startswith("{"):
        return None
    try:
        body = json.loads(record.error)
    except ValueError:
        return None
    error = body.get("error", body)
    return str(error["code"]) if "retry_after" in error else None


def print_tables(
    console: Any,
    rows: Sequence[TierRow],
    totals: Sequence[Mapping[str, Any]],
    facts: Mapping[str, float],
) -> None:
    """Print what came out, a table per subject."""
    from vllm_semantic_sched.bench.console import make_table

    table = make_table(
        "tiers under overload",
        "scheduler",
        "tier",
        "sent",
        "answered",
        "refused",
        "unanswered",
        "TTFT p50, s",
        "TTFT p99, s",
        "in time",
        "longest wait, s",
        words=2,
    )
    for row in rows:
        refused = ", ".join(f"{count} {code}" for code, count in row.refused.items()) or "0"
        table.add_row(
            *(row.scheduler, row.tier, str(row.sent), str(row.answered), refused),
            *(str(row.unanswered), f"{row.ttft_p50:.3f}", f"{row.ttft_p99:.3f}"),
            *("-" if row.kept is None else f"{row.kept:.1%}", f"{row.longest_wait:.1f}"),
        )
    console.print(table)
    second = make_table(
        "totals", "scheduler", "output tok/s", "vs FCFS", "preemptions/min", "latest send, s"
    )
    first = totals[0]["output_tokens_per_second"]
    for total in totals:
        speed = total["output_tokens_per_second"]
        second.add_row(
            total["scheduler"],
            f"{speed:.0f}",
            f"{speed / first:.3f}",
            f"{total['preemptions_per_minute']:.0f}",
            f"{total['latest_send']:.2f}",
        )
    console.print(second)
    console.print(
        f"idle TTFT {facts['idle_ttft']:.3f} s; in time: share of the requests sent whose first "
        f"token came within {facts['promised_ttft']:.3f} s (premium) or "
        f"{facts['promised_ttft_standard']:.3f} s (standard); capacity "
        f"{facts['capacity_requests_per_second']:.1f} requests/s"
    )
    for total in totals:
        if bound := total.get("bound"):
            console.print(
                f"{total['scheduler']}: {bound['beyond']} of {bound['requests']} requests of the "
                f"last tier waited beyond the bound of aging; the longest wait was "
                f"{bound['wait']:.1f} s, its bound {bound['bound']:.0f} s"
            )
