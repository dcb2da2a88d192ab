"""The clock on simulated machines that change their speed."""

import random

import pytest
from steady_clock import SteadyClock


class Machine:
    """Counts CPU seconds; `slower` multiplies those of each piece of work."""

    def __init__(self) -> None:
        self.spent = 100.0
        self.slower = 1.0

    def do(self, seconds: float) -> None:
        self.spent += self.slower * seconds


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def clock(machine) -> SteadyClock:
    return SteadyClock(None, lambda: machine.do(0.004), lambda: machine.spent)


def test_work_takes_the_same_time_when_the_machine_slows_down(machine, clock) -> None:
    begin = clock.now()
    for slower in (1.0, 1.7, 0.6):
        machine.slower = slower
        for _ in range(8):  # more than half of the speeds that the clock remembers
            clock.adjust()
        before = clock.now()
        for _ in range(50):
            machine.do(0.03)
            clock.adjust()
        assert clock.now() - before == pytest.approx(1.5)
    # The first steps after a change still seem longer or shorter.
    assert clock.now() - begin == pytest.approx(4.5, rel=0.05)


def test_clocks_with_the_same_unit_agree() -> None:
    seconds = []
    for slower in (1.0, 1.7):
        machine = Machine()
        machine.slower = slower
        clock = SteadyClock(0.004, lambda m=machine: m.do(0.004), lambda m=machine: m.spent)
        machine.do(1.0)
        seconds.append(clock.now())
    assert seconds == pytest.approx([1.0, 1.0])


def test_measuring_speed_takes_no_time_and_ignores_interruptions(machine, clock) -> None:
    chance = random.Random(0)
    before = clock.now()
    for _ in range(100):
        machine.slower = 20.0 if chance.random() < 0.1 else 1.0
        clock.adjust()
    assert clock.now() == before
    machine.slower = 1.0
    machine.do(1.0)
    assert clock.now() - before == pytest.approx(1.0)


def test_skipping_advances_the_clock(machine, clock) -> None:
    before = clock.now()
    clock.skip(5.0)
    machine.do(1.0)
    clock.adjust()
    assert clock.now() - before == pytest.approx(6.0)
