"""What the scheduler's and the workers' instances of the swap connector tell each other."""

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
    """What the workers say of their copies.

    Attributes:
        save_seconds, load_seconds: that copies took; the maximum over workers.
        unloaded: blocks that a load should have filled and did not, on any worker.
        saved: numbers of saves beside steps that ended, once for each worker.
    """

    save_seconds: float
    load_seconds: float
    unloaded: set[int] = field(default_factory=set)
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
