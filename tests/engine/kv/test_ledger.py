"""The ledger of host copies against a device and a host that are plain lists."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_semantic_sched.engine.kv.ledger import HostPool, KeptBlocks, SwapLedger, Transfer

BLOCK = 4


def same() -> bool:
    return True


class SwappingEngine:
    """An engine that computes by writing (request, position) into blocks. Freed blocks are handed
    out again at once, the last freed first, host slots change hands, and copies beside steps take
    their time: whatever the ledger gets wrong shows up as somebody else's data."""

    WORKERS = 2

    def __init__(self, random: Random) -> None:
        self.random = random
        self.ledger = SwapLedger(HostPool(7), [BLOCK])
        self.ledger.loads_beside = lambda tokens: tokens > 2 * BLOCK
        self.device: list = [None] * 12
        self.host: list = [None] * 7
        self.free = list(range(1, 12))  # block 0 stands for none
        self.ledger.kept = KeptBlocks(self.free.extend, self.WORKERS)
        self.saving: list[Transfer] = []
        self.reports: list[int] = []  # numbers of saves, once for each worker
        self.running: dict[str, tuple[list[int], int]] = {}  # block table, tokens with KV
        self.admitted: dict[str, tuple[list[int], int, int]] = {}  # and tokens loaded
        self.away: dict[str, int] = {}  # tokens
        self.loading: dict[str, tuple[list[int], int, int]] = {}
        self.ordered: dict[str, Transfer] = {}
        self.number = 0

    def pick(self, names: dict) -> str | None:
        return self.random.choice(sorted(names)) if names else None

    def allocate(self, tokens: int) -> list[int] | None:
        needed = -(-tokens // BLOCK)
        if needed > len(self.free):
            return None
        return [self.free.pop() for _ in range(needed)]

    def compute(self, name: str, table: list[int], start: int, end: int) -> None:
        for position in range(start // BLOCK, -(-end // BLOCK)):
            self.device[table[position]] = (name, position)

    def save(self, order: Transfer) -> None:
        for block, slot in zip(order.device, order.slots, strict=True):
            self.host[slot] = self.device[block]

    def end_saves(self) -> None:
        """Copies are made in the order in which they are ordered."""
        for order in self.saving:
            self.save(order)
            self.reports += [order.number] * self.WORKERS
        self.saving = []

    def finish_save(self) -> None:
        self.end_saves()
        self.random.shuffle(self.reports)
        if self.reports:
            self.ledger.kept.saved([self.reports.pop()])

    def load(self, order: Transfer) -> None:
        self.end_saves()
        slots = [slot for run in order.host for slot in run]
        for block, slot in zip(order.device, slots, strict=True):
            self.device[block] = self.host[slot]

    def check(self, name: str, table: list[int], tokens: int) -> None:
        for position in range(-(-tokens // BLOCK)):
            assert self.device[table[position]] == (name, position)

    def step(self) -> None:
        """What was scheduled is carried out, in the order in which vLLM does."""
        orders = self.ledger.take_orders()
        for save in orders.saves:
            if not save.beside:
                self.end_saves()
                self.save(save)
        self.saving += [save for save in orders.saves if save.beside]
        loading = [block for order in self.ordered.values() for block in order.device]
        held = [block for table, _ in self.running.values() for block in table]
        for block in set(range(len(self.device))) - {*loading, *held, *self.kept_blocks()}:
            self.device[block] = "overwritten"
        for load in orders.loads:
            if load.beside:
                self.ordered[load.request_id] = load
            else:
                self.load(load)
        for name, (table, tokens, loaded) in self.admitted.items():
            self.check(name, table, loaded)
            self.compute(name, table, loaded // BLOCK * BLOCK, tokens)
            self.running[name] = table, tokens
        self.admitted = {}

    def kept_blocks(self) -> list[int]:
        taken = {*self.free, *(b for t, *_ in self.running.values() for b in t)}
        taken.update(b for t, *_ in (self.admitted | self.loading).values() for b in t)
        return [block for block in range(1, len(self.device)) if block not in taken]

    def start(self) -> None:
        tokens = self.random.randint(1, 4 * BLOCK)
        table = self.allocate(tokens)
        if table is not None:
            self.number += 1
            self.admitted[f"r{self.number}"] = table, tokens, 0

    def preempt(self) -> None:
        name = self.pick(self.running)
        if name is None:
            return
        table, tokens = self.running.pop(name)
        self.check(name, table, tokens)
        part = self.random.randint(0, tokens // BLOCK) * BLOCK
        end = self.random.choice((tokens, tokens, part))
        fits = self.ledger.pool.free >= -(-end // BLOCK)
        keep = list if self.random.random() < 0.5 else None
        if end:
            assert self.ledger.save(name, [table], 0, end, same, keep) == fits
        kept = table[: -(-end // BLOCK)] if fits and keep else []
        self.free += [block for block in table if block not in kept]
        self.away[name] = tokens

    def resume(self) -> None:
        name = self.pick(self.away)
        if name is None:
            return
        tokens = self.away[name]
        count, beside = self.ledger.loadable(name, 0, tokens + 1)
        if count is None:  # preempted in this very step
            return
        table = self.allocate(tokens)
        if table is None:
            return
        del self.away[name]
        self.ledger.admitted(name, [table], count, tokens + 1)
        if beside:
            self.loading[name] = table, tokens, count
        else:
            self.admitted[name] = table, tokens, count

    def finish_load(self) -> None:
        aborted = self.random.random() < 0.3
        name = self.pick(self.ordered)
        if name is None:
            return
        self.load(self.ordered.pop(name))
        table, tokens, loaded = self.loading.pop(name)
        if aborted:
            self.ledger.release(name)
        self.ledger.load_finished([name, "somebody else's"])
        self.check(name, table, loaded)
        if aborted:
            self.free += table
        else:
            self.compute(name, table, loaded // BLOCK * BLOCK, tokens)
            self.running[name] = table, tokens

    def abort(self) -> None:
        name = self.pick(self.away)
        if name is None:
            return
        del self.away[name]
        self.ledger.release(name)

    def reset(self) -> None:
        self.ledger.release_all()
        assert len(self.ledger) == 0

    def slots_are_accounted_for(self) -> None:
        ledger = self.ledger
        copies = [*ledger.saved.values(), *ledger.loading.values(), *ledger._spent]
        taken = [slot for copy in copies for run in copy.taken for slot in run]
        assert len(set(taken)) == len(taken) == self.ledger.pool.used

    def finish(self) -> None:
        self.reset()
        self.step()
        self.ledger.load_finished(list(self.loading))
        self.step()
        self.reset()
        assert self.ledger.pool.used == 0 == len(self.ledger.kept._kept) and not self.kept_blocks()


@settings(max_examples=100)
@given(st.randoms(use_true_random=True))
def test_copies_hold_the_saved_data_under_random_traffic(random) -> None:
    engine = SwappingEngine(random)
    weights = {"start": 3, "preempt": 4, "resume": 6, "step": 3, "finish_load": 2, "abort": 1}
    weights |= {"finish_save": 4}
    for _ in range(200):
        getattr(engine, random.choices(list(weights), list(weights.values()))[0])()
        engine.slots_are_accounted_for()
    engine.finish()


def save(ledger: SwapLedger, name: str, tokens: int, start: int = 0, valid=same) -> None:
    assert ledger.save(name, [list(range(1, 9))], start, tokens, valid)


def test_loadable_tokens() -> None:
    ledger = SwapLedger(HostPool(8), [BLOCK])
    save(ledger, "a", 10)
    assert ledger.loadable("a", 0, 11) == (None, False)  # its save is not under way
    ledger.take_orders()
    assert ledger.loadable("a", 0, 11) == (10, False)
    assert ledger.loadable("a", 8, 11) == (2, False)  # the rest survived on the device
    assert ledger.loadable("a", 8, 9) == (0, False)
    assert ledger.loadable("a", 0, 10) == (9, False)  # the last token is always computed
    assert ledger.loadable("b", 0, 11) == (0, False)
    ledger.loads_beside = lambda tokens: tokens >= 10
    assert ledger.loadable("a", 0, 11) == (10, True)
    assert ledger.loadable("a", 4, 11) == (6, False)
    save(ledger, "shared prefix", 10, start=4)
    ledger.take_orders()
    assert ledger.loadable("shared prefix", 4, 11) == (6, False)
    assert ledger.loadable("shared prefix", 0, 11) == (0, False)  # the prefix did not survive
    valid = True
    save(ledger, "session", 10, valid=lambda: valid)
    ledger.take_orders()
    assert ledger.loadable("session", 0, 11)[0] == 10
    valid = False
    assert ledger.loadable("session", 0, 11) == (0, False)


def test_unused_copy_is_freed() -> None:
    ledger = SwapLedger(HostPool(8), [BLOCK])
    save(ledger, "a", 10)
    ledger.take_orders()
    ledger.admitted("a", [[1, 2, 3]], 0, 11)
    assert (ledger.pool.used, "a" in ledger.saved, "a" in ledger.loaded) == (0, False, False)


def test_save_of_overwritten_blocks_is_abandoned() -> None:
    ledger = SwapLedger(HostPool(8), [BLOCK])
    save(ledger, "a", 10)  # blocks 1 to 3
    save(ledger, "b", 10, start=4)  # blocks 2 and 3
    orders = ledger.take_orders(overwritten=[1])
    assert [transfer.request_id for transfer in orders.saves] == ["b"]
    assert ("a" in ledger.saved, ledger.pool.used) == (False, 2)


def test_each_group_has_its_own_table_and_windows_leave_gaps() -> None:
    ledger = SwapLedger(HostPool(8), [4, 8])
    full, window = [1, 2, 3, 4], [0, 5]
    assert ledger.save("a", [full, window], 0, 15, same)
    (transfer,) = ledger.take_orders().saves
    assert (transfer.device, ledger.pool.used) == ([1, 2, 3, 4, 5], 5)
    ledger.admitted("a", [[11, 12, 13, 14, 15], [0, 16]], 15, 16)
    (load,) = ledger.take_orders().loads
    assert (load.device, load.host) == ([11, 12, 13, 14, 16], transfer.host)
