"""The ledger of causes: each second of a wait has one."""

import pytest

from vllm_semantic_sched.policy.facts.wait import Cause
from vllm_semantic_sched.policy.record.waits import WaitLedger


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Ledger(WaitLedger):
    """A ledger over three levels whose time passes by hand."""

    def __init__(self, has_limits: bool = True) -> None:
        self.time = Clock()
        super().__init__(self.time, 3, lambda: has_limits)

    def sleep(self, seconds: float) -> None:
        self.time.now += seconds


def parts(ledger: Ledger, wait) -> dict[tuple[Cause, int | None], float]:
    return {(part.cause, part.level): pytest.approx(part.seconds) for part in ledger.end(wait)}


def test_shared_causes_are_apart_by_the_latest_seat() -> None:
    ledger = Ledger()
    ledger.sleep(5)
    wait = ledger.begin(2, "")
    ledger.sleep(1)
    ledger.because(Cause.SEAT)
    ledger.sleep(2)
    ledger.seated(0)
    ledger.sleep(3)
    ledger.because(Cause.KV)
    ledger.sleep(4)
    ledger.because(Cause.PAUSED)
    ledger.sleep(6)
    assert parts(ledger, wait) == {
        (Cause.STEP, None): 1,
        (Cause.SEAT, None): 2,
        (Cause.SEAT, 0): 3,
        (Cause.KV, 0): 4,
        (Cause.PAUSED, None): 6,
    }


def test_limits_replace_shared_causes_for_their_queue_only() -> None:
    ledger = Ledger()
    ledger.because(Cause.SEAT)
    waits = [ledger.begin(1, "big"), ledger.begin(1, "small"), ledger.begin(2, "big")]
    ledger.sleep(1)
    ledger.limit([(1, "big")])
    ledger.sleep(2)
    late = ledger.begin(1, "big")
    ledger.sleep(1)
    ledger.limit([(2, None)])
    ledger.sleep(4)
    ledger.limit([])
    ledger.sleep(5)
    big, small, other = (parts(ledger, wait) for wait in waits)
    assert big == {(Cause.TENANT, None): 3, (Cause.SEAT, None): 10}
    assert small == {(Cause.SEAT, None): 13}
    assert other == {(Cause.RESERVATION, None): 4, (Cause.SEAT, None): 9}
    assert parts(ledger, late) == {(Cause.TENANT, None): 1, (Cause.SEAT, None): 9}


def test_pause_counts_as_a_pause_whatever_else_applies() -> None:
    ledger = Ledger()
    wait = ledger.begin(1, "big")
    ledger.limit([(1, "big")])
    ledger.because(Cause.PAUSED)
    ledger.sleep(2)
    ledger.because(Cause.SEAT)
    ledger.sleep(3)
    assert parts(ledger, wait) == {(Cause.PAUSED, None): 2, (Cause.TENANT, None): 3}


def test_wait_before_a_raising_prediction_is_unread() -> None:
    ledger = Ledger(has_limits=False)
    ledger.because(Cause.SEAT)
    wait = ledger.begin(2, "")
    ledger.sleep(2)
    wait.level = 0
    ledger.split(wait, Cause.UNREAD)
    ledger.sleep(1)
    assert parts(ledger, wait) == {(Cause.UNREAD, None): 2, (Cause.SEAT, None): 1}


def test_not_ready_counts_only_while_skipped() -> None:
    ledger = Ledger()
    ledger.because(Cause.SEAT)
    wait, lasting = ledger.begin(2, ""), ledger.begin(2, "")
    ledger.sleep(1)
    ledger.skip(lasting, lasting=True)
    for _ in range(3):
        ledger.skip(wait)
        ledger.end_step()
        ledger.sleep(1)
    ledger.end_step()  # not skipped any more
    ledger.sleep(5)
    assert not ledger.has_skipped or not ledger.end_step()
    assert parts(ledger, wait) == {(Cause.SEAT, None): 6, (Cause.NOT_READY, None): 3}
    ledger.split(lasting)
    ledger.sleep(1)
    assert parts(ledger, lasting) == {(Cause.SEAT, None): 1, (Cause.NOT_READY, None): 9}


def test_request_that_was_not_ready_waits_for_a_seat_once_it_is() -> None:
    ledger = Ledger()
    ledger.because(Cause.SEAT)
    wait = ledger.begin(2, "")
    ledger.skip(wait, lasting=True)
    ledger.sleep(3)
    ledger.ready(wait)
    ledger.sleep(2)
    assert parts(ledger, wait) == {(Cause.SEAT, None): 2, (Cause.NOT_READY, None): 3}


def test_limits_of_queues_that_are_gone_are_forgotten() -> None:
    ledger = Ledger()
    for number in range(1000):
        ledger.limit([(1, f"tenant {number}")])
        ledger.end(ledger.begin(1, f"tenant {number}"))
    assert len(ledger._limits) <= 3
