"""Workers of one engine on machines with different amounts of memory for the KV of victims."""

import pytest
from fake_device import swap_config

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.kv.ledger import HostPool
from vllm_semantic_sched.engine.kv.recovery import SwapReport
from vllm_semantic_sched.engine.vllm_api import KVConnectorOutput
from vllm_semantic_sched.lab.bench.standalone import build_scheduler

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("slots", "used"), [((50, 30), 30), ((50, 70), 50), ((0, 50), 0)])
def test_no_worker_is_asked_for_more_slots_than_it_has(slots, used) -> None:
    scheduler = build_scheduler(SemanticScheduler, kv_transfer_config=swap_config())
    connector = scheduler.preemptions.connector
    connector.ledger.pool = HostPool(50)
    first, second = (SwapReport(slots=count) for count in slots)
    output = KVConnectorOutput(kv_connector_worker_meta=first.aggregate(second))
    connector.update_connector_output(output)
    assert connector.ledger.pool.slots == used
    assert (connector.unsupported is not None) == (used == 0)
