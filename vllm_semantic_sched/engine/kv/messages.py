"""Messages between the scheduler's and the workers' instances of the swap connector."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_semantic_sched.engine.kv.ledger import Orders
from vllm_semantic_sched.engine.vllm_api import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class SwapMetadata(KVConnectorMetadata):
    """What the workers have to copy in a step."""

    orders: Orders


@dataclass
class SwapReport(KVConnectorWorkerMetadata):
    """What the workers say of their copies."""

    save_seconds: float = 0.0  # the maximum over workers
    load_seconds: float = 0.0
    # Blocks that a load should have filled and did not, on any worker.
    unloaded: set[int] = field(default_factory=set)
    # Numbers of saves beside steps that ended, once for each worker.
    saved: list[int] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, SwapReport)
        return SwapReport(
            max(self.save_seconds, other.save_seconds),
            max(self.load_seconds, other.load_seconds),
            self.unloaded | other.unloaded,
            self.saved + other.saved,
        )


@dataclass
class FailedProof(KVConnectorHandshakeMetadata):
    """What a worker says at the start if its copies are wrong."""

    reason: str
