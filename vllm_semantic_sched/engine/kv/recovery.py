"""What the two sides of the swap connector tell each other, and what they do if a copy fails: it is
reported, and the scheduler computes again what it should have brought. vLLM's own report of failed
blocks would end their requests by default, and cannot tell several block tables apart."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.kv.block_copy import CopyBackend
from vllm_semantic_sched.engine.kv.ledger import Orders, Transfer
from vllm_semantic_sched.engine.vllm_api import KVConnectorMetadata, Request

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

    def aggregate(self, other: Any) -> SwapReport:
        assert isinstance(other, SwapReport)
        return SwapReport(
            max(self.save_seconds, other.save_seconds),
            max(self.load_seconds, other.load_seconds),
            self.unloaded | other.unloaded,
            self.saved + other.saved,
            min(self.slots, other.slots),
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
        report = SwapReport(save_seconds, load_seconds, take(self.blocks), take(self.saves))
        report.slots, self.slots = self.slots, sys.maxsize
        return report if report != SwapReport() else None

    def note(self, output: vllm_api.KVConnectorOutput) -> SwapReport | None:
        """Note the copies beside steps that a worker says are over; its report."""
        self.loaded.update(output.finished_recving or ())
        report = output.kv_connector_worker_meta
        if not isinstance(report, SwapReport):
            return None
        self.saves += take(report.saved)
        return report


def _forget(self: Any, request_id: str, save: int | None = None) -> None:
    """Forget a request's copy, and free the blocks kept for a save. If that fails, too, no copy is
    loaded any more, and this one becomes free when a request ends."""
    try:
        self.ledger.kept.free(save)
        self.ledger.release(request_id)
    except Exception:
        self.ledger.distrust()
        self.failed.ended.add(request_id)


# What the methods of the SemanticSwapConnector, `self`, do instead if they fail. Of a step, what is
# left in its orders was not carried out.


def no_swap(self: Any, *args: Any, **kwargs: Any) -> None:
    error = sys.exception()
    self.refuse_copies(f"{type(error).__name__}: {error}")


def no_copy(self: Any, request: Request, *args: Any, **kwargs: Any) -> tuple[int | None, bool]:
    _forget(self, request.request_id)
    return 0, False


def not_ordered(
    self: Any, request: Request, blocks: vllm_api.KVCacheBlocks, num_external_tokens: int
) -> None:
    _forget(self, request.request_id)
    if num_external_tokens:
        asked, on_device = self.failed.asked
        first = on_device if asked == request.request_id else 0
        for table, size in zip(blocks.get_block_ids(), self.block_sizes, strict=True):
            self.failed.blocks.update(table[first // size :])
        self.failed.requests.add(request.request_id)


def nothing_ordered(self: Any, *args: Any, **kwargs: Any) -> KVConnectorMetadata:
    orders = self.ledger.cancel_orders()
    for load in orders.loads:
        self.failed.give_up(load)
    self.failed.loaded.update(load.request_id for load in orders.loads if load.beside)
    for save in orders.saves:
        _forget(self, save.request_id, save.number)
    return SwapMetadata(Orders())


def noted_later(self: Any, connector_output: vllm_api.KVConnectorOutput) -> None:
    """What finished loads and saves used becomes free with the next call."""
    self.failed.note(connector_output)


def released_later(
    self: Any, request: Request, *args: Any, **kwargs: Any
) -> tuple[bool, dict[str, Any] | None]:
    """The copy of a request becomes free when the next one ends."""
    self.failed.ended.add(request.request_id)
    return False, None


def not_reset(self: Any) -> bool | None:
    """The copies stay where they are, and nobody loads them."""
    self.ledger.distrust()
    return False


def not_saved(self: Any, kv_connector_metadata: Any) -> None:
    saves = kv_connector_metadata.orders.saves
    for save in saves:
        self.failed.give_up_save(save)
    saves.clear()


def not_loaded(self: Any, *args: Any, **kwargs: Any) -> None:
    loads = self.step_metadata.orders.loads
    for load in loads:
        self.failed.give_up(load)
    loads.clear()


def all_finished(self: Any, *args: Any, **kwargs: Any) -> tuple[set[str] | None, set[str] | None]:
    """Wait for the copies beside steps, so that none is waited for in vain."""
    self.failed.drain(self.backend)
    return None, take(self.failed.requests) or None


def only_failures(self: Any) -> Any:
    """No seconds, but the copies that were not made, and all saves."""
    self.failed.drain(self.backend)
    return self.failed.report()


def nothing(self: Any) -> Any:
    pass
