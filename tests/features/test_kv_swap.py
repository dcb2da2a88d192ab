"""Our swap connector on the emulated device, at the device's copy speeds."""

from collections import Counter

import pytest
from virtual_runs import SHORT_LOAD

from vllm_semantic_sched.lab.device.copies import EmulatedCopies
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine
from vllm_semantic_sched.policy.profile import cost

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_copies_run_in_line_or_beside_steps(beside, asynchronous, monkeypatch) -> None:
    """Steps wait for copies in line, and not for those beside them, whose blocks are freed when
    they have ended. The device checks all KV and all answers."""
    copies: Counter[tuple[str, bool]] = Counter()
    copy = EmulatedCopies._copy

    def counted(self, what, device, host, beside=False):
        copies[what, beside] += 1
        return copy(self, what, device, host, beside)

    monkeypatch.setattr(EmulatedCopies, "_copy", counted)
    monkeypatch.setattr(cost, "MAX_STALL", 0.0 if beside else 1.0)
    config = EngineConfig(
        policy={"retention": {"mode": "swap"}},
        # A save beside steps keeps its blocks until it has ended: there must be others.
        seats=6 if beside else 16,
        blocks=300 if beside else 110,
        max_model_len=1024,
        asynchronous=asynchronous,
        swap_gib=1.0,
    )
    with VirtualEngine(config) as engine:
        kept, deferred = engine.scheduler.preemptions.connector.ledger.kept, []
        engine.send(SHORT_LOAD)
        while engine.step():
            deferred.append(len(kept._kept))
        waited = sum(step.waited for step in engine.steps)
        assert {one.reason for one in engine.records.values()} == {"stop"}
        assert engine.scheduler.counters.total("policy_errors") == 0
    assert copies["load", beside] > 5 and copies["save", beside] > 5, copies
    if beside:
        assert max(deferred) > 0 == deferred[-1]
    else:
        assert not copies["load", True] and not copies["save", True]
        assert waited > 0.0
