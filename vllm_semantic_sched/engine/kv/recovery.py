"""What the two sides of the swap connector tell each other. A copy that fails is reported, and the
scheduler computes again what it should have brought. vLLM's own report of failed blocks would end
their requests by default, and cannot tell several block tables apart."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.kv.block_copy import CopyBackend
from vllm_semantic_sched.engine.kv.ledger import Orders, Transfer
from vllm_semantic_sched.engine.vllm_api import KVConnectorMetadata

_Items = TypeVar("_Items", set[int], set[str], list[int])


def take(items: _Items) -> _Items:
    """Empty a collection, and return what was in it."""
    taken = items.copy()
    items.clear()
    return taken


@dataclass
class SwapMetadata(KVConnectorMetadata):
    """What the workers have to copy in a step."""

    orders: Orders


@dataclass
class SwapReport(vllm_api.KVConnectorWorkerMetadata):
    """What the workers say of their copies."""

    save_seconds: float = 0.0  # the maximum over workers
    load_seconds: float = 0.0
    unloaded: set[int] = field(default_factory=set)  # blocks that a load of any worker did not fill
    saved: list[int] = field(default_factory=list)  # ended beside steps: numbers, for each worker
    slots: int = sys.maxsize  # of the smallest host pool, said once: nodes may have different ones

    def aggregate(self, report: vllm_api.KVConnectorWorkerMetadata) -> SwapReport:
        """Combine with the report of another worker, as vLLM asks for."""
        assert isinstance(report, SwapReport)
        return SwapReport(
            save_seconds=max(self.save_seconds, report.save_seconds),
            load_seconds=max(self.load_seconds, report.load_seconds),
            unloaded=self.unloaded | report.unloaded,
            saved=self.saved + report.saved,
            slots=min(self.slots, report.slots),
        )


@dataclass
class FailedProof(vllm_api.KVConnectorHandshakeMetadata):
    """What a worker says at the start if its copies are wrong."""

    reason: str


@dataclass(slots=True)
class FailedCopies:
    """Copies that were not made, on one side of the connector."""

    blocks: set[int] = field(default_factory=set)  # on the device, which a load should have filled
    # Their load beside steps is over, and no copy reports it.
    requests: set[str] = field(default_factory=set)
    unsaved: set[int] = field(default_factory=set)  # on a worker: slots that lack what was to come
    # Numbers of saves beside steps that are over, made or not, and still to be reported. In the
    # scheduler, the ledger has still to be told of these, and of requests loaded and ended.
    saves: list[int] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    slots: int = sys.maxsize  # of this worker's host pool, still to be said
    # The last request whose copy vLLM asked for, and its tokens on the device.
    asked: tuple[str, int] = ("", 0)

    def give_up(self, load: Transfer) -> None:
        """Note a load that was not made."""
        self.blocks.update(load.device)
        if load.beside:
            self.requests.add(load.request_id)

    def give_up_save(self, save: Transfer) -> None:
        """Note a save that was not made."""
        self.unsaved.update(save.slots)
        if save.beside:
            assert save.number is not None
            self.saves.append(save.number)

    def drain(self, backend: CopyBackend) -> None:
        """Wait for the copies beside steps, which are over then."""
        loads, saves = backend.drain()
        self.requests |= loads
        self.saves += saves

    def report(self, save_seconds: float = 0.0, load_seconds: float = 0.0) -> SwapReport | None:
        """A worker's report, with the time of the copies made; None if it is empty."""
        report = SwapReport(
            save_seconds=save_seconds,
            load_seconds=load_seconds,
            unloaded=take(self.blocks),
            saved=take(self.saves),
            slots=self.slots,
        )
        self.slots = sys.maxsize
        return report if report != SwapReport() else None

    def note(self, output: vllm_api.KVConnectorOutput) -> SwapReport | None:
        """Note the copies beside steps that a worker says are over; its report."""
        self.loaded.update(output.finished_recving or ())
        report = output.kv_connector_worker_meta
        if not isinstance(report, SwapReport):
            return None
        self.saves += take(report.saved)
        return report
