"""Runs engines through preemptions of all kinds, one after another; started by test_connector.py,
with the scheduler and the worker in reach.

    python swap_engine.py MODEL POLICY FOLDER ENGINES

ENGINES is JSON: by name, an engine's options and its scenarios. FOLDER gets a report per name. The
option `answers_of` names an earlier engine with the same prompts, whose answers without preemption
are taken instead of made again.

Every scenario answers the same prompts. Blocks that nobody holds, and those just saved, are filled
with a large number before each forward pass, unless the prefix cache may still read them.
"""

import json
import multiprocessing
import random
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from async_engine import schedule_asynchronously
from failures import COPIES_MAY_FAIL, MAY_FAIL, method_of
from orders import preempt

POISON = 1.0e4
TOKENS = 40
WORDS = [f"{a}{b}" for a in ("river", "stone", "green", "door") for b in ("a", "b", "way", "less")]


class SwapEngine:
    """An offline engine that preempts random requests."""

    def __init__(self, model: str, policy: str, options: dict) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = {
            "kv_connector": "SemanticSwapConnector",
            "kv_connector_module_path": "vllm_semantic_sched.engine.kv_swap",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"host_gib": 0.0125},
        }
        if options.pop("inside_multi_connector", False):
            connector = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"connectors": [connector]},
            }
        asynchronous = options.pop("asynchronous", False)
        if asynchronous:
            schedule_asynchronously()
        options = {
            "async_scheduling": asynchronous,
            "scheduler_cls": "vllm_semantic_sched.SemanticScheduler",
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": 8,
            "max_model_len": 320,
            "block_size": 32,
            "num_gpu_blocks_override": 26,
            "kv_cache_memory_bytes": 2**28,
            "gpu_memory_utilization": 0.7,
            "disable_log_stats": True,
            "kv_transfer_config": connector,
            "additional_config": {"semantic_sched": {"policy": policy}},
        } | options
        self.llm = LLM(model, **options)
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.swap = self.scheduler.preemptions.connector
        self.ledger = self.swap.ledger
        group = get_kv_transfer_group()
        self.worker = getattr(group, "sub_connectors", [group])[0]
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.caching = self.scheduler.kv_cache_manager.enable_caching
        self.block_total = self.pool.get_num_free_blocks()
        self.injected = 0.0  # errors that the engine counted because of `broken`
        chance = random.Random(7)
        shared = " ".join(chance.choice(WORDS) for _ in range(40)) if self.caching else ""
        self.prompts = [
            f"{shared} {' '.join(chance.choice(WORDS) for _ in range(chance.randint(8, 60)))}"
            for _ in range(14)
        ]

    def answer_alone(self) -> list[list[int]]:
        """The answers without any preemption: one request at a time."""
        return [
            list(self.llm.generate([prompt], self.params(), use_tqdm=False)[0].outputs[0].token_ids)
            for prompt in self.prompts
        ]

    def params(self, tokens: int = TOKENS, **more):
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)

    def set(self, mode: str, max_stall: float = 1e9, host_blocks: int | None = None) -> None:
        """Put another retention policy in force, and another size of the host pool. Where loads
        run beside steps, saves do as well if some blocks are free."""
        from vllm_semantic_sched.engine import vllm_api
        from vllm_semantic_sched.engine.kv.ledger import HostPool
        from vllm_semantic_sched.policy.profile import cost

        vllm_api.most_blocks_of_a_step = lambda scheduler: 1000 if max_stall else 2

        core = self.scheduler.core
        cost.MAX_STALL = max_stall
        retention = core.policy.retention.model_copy(update={"mode": mode})
        core.policy_ref.switch(core.policy.model_copy(update={"retention": retention}))
        slots = host_blocks or self.swap.slots
        if self.ledger.pool.slots != slots:  # else a slot that is not given back stays visible
            assert self.ledger.pool.used == 0
            self.ledger.pool = HostPool(slots)

    def chaos(
        self,
        every: int = 3,
        seed: int = 0,
        also=lambda step, names: None,
        prompts: int = 0,
        tokens: int = TOKENS,
    ) -> dict:
        """Answer the prompts at once, and preempt a random running request every few steps.

        Args:
            prompts: only the first so many, of which the last is urgent and late; 0: all at once.
            tokens: of each answer.
        """
        from vllm_semantic_sched.engine.vllm_api import freeable_blocks

        chance = random.Random(seed)
        scheduler, counters = self.scheduler, self.scheduler.counters
        scheduler.preemptions.gauges()  # takes over what the workers measured
        before = dict(counters.totals)
        names = [f"{seed}-{index}" for index in range(prompts or len(self.prompts))]
        together = names[:-1] if prompts else names
        for name, prompt in zip(together, self.prompts, strict=False):
            self.engine.add_request(name, prompt, self.params(tokens))
        answers: dict[str, list[int]] = {}
        step = forced = 0
        while self.engine.has_unfinished_requests():
            step += 1
            assert step < 5000, "the engine makes no progress"
            if prompts and step == 4:
                urgent = self.params(tokens, extra_args={"urgency": 0})
                self.engine.add_request(names[-1], self.prompts[prompts - 1], urgent)
            if step % every == 0:
                with scheduler.guard("preemption"):
                    running = [
                        request
                        for request in scheduler.running
                        if freeable_blocks(scheduler, request) is not None
                    ]
                    if running:
                        forced += 1
                        preempt(scheduler, chance.choice(running))
            also(step, names)
            for output in self.engine.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
        self.engine.step()
        scheduler.preemptions.gauges()
        totals = {
            "_".join((name, *labels)): total - before.get((name, labels), 0)
            for (name, labels), total in counters.totals.items()
        }
        return {
            "forced": forced,
            "answers": [answers.get(name) for name in names],
            "counters": totals,
            "host_blocks_left": self.ledger.pool.used,
            "device_blocks_left": self.block_total - self.pool.get_num_free_blocks(),
            "jobs_left": len(scheduler.jobs),
        }

    def poison(self, blocks: list[int]) -> None:
        import torch

        for region in self.worker.backend.device:
            region.view(torch.float32)[blocks] = POISON

    @contextmanager
    def poisoning(self):
        """Poison free blocks after the saves of each step and before its loads."""
        handle = self.worker.handle_preemptions

        def handle_and_poison(metadata) -> None:
            saves = [save for save in metadata.orders.saves if not save.beside]
            saved = [block for save in saves for block in save.device]
            handle(metadata)
            free = [block.block_id for block in self.pool.blocks if block.ref_cnt == 0]
            self.poison(sorted({*saved, *free}))

        if self.caching:
            yield
        else:
            with patch.object(self.worker, "handle_preemptions", handle_and_poison):
                yield

    # Scenarios

    def alone(self) -> dict:
        answers = self.right
        return {"answers": answers, "distinct": len({t for answer in answers for t in answer})}

    def recompute(self) -> dict:
        self.set("recompute")
        return self.chaos(seed=1)

    def sync(self) -> dict:
        self.set("swap")
        return self.chaos(seed=2)

    def beside(self) -> dict:
        self.set("swap", max_stall=0.0)
        return self.chaos(seed=3)

    def partial(self) -> dict:
        self.set("swap", host_blocks=4)
        return self.chaos(seed=4)

    def partial_beside(self) -> dict:
        self.set("swap", max_stall=0.0, host_blocks=3)
        return self.chaos(seed=5)

    def optimal(self) -> dict:
        self.set("optimal", max_stall=0.02, host_blocks=12)
        return self.chaos(seed=6)

    def aborts(self) -> dict:
        """Every tenth step one request is cancelled that is away, or is being loaded."""
        self.set("swap", max_stall=0.0)
        cancelled: list[str] = []

        def abort(step: int, names: list[str]) -> None:
            away = list(self.ledger.saved if step % 20 else self.ledger.loading)
            if step % 10 == 0 and away and len(cancelled) < 6:
                self.engine.abort_request([away[0]], internal=True)
                cancelled.append(away[0])

        report = self.chaos(seed=7, also=abort)
        return report | {"cancelled": len(cancelled)}

    def resets(self) -> dict:
        """The prefix cache is reset with requests running, or the connector's alone."""
        self.set("swap")
        lost: list[int] = []

        def reset(step: int, names: list[str]) -> None:
            if step % 20 == 0:
                lost.append(len(self.ledger))
                assert self.scheduler.reset_prefix_cache(
                    reset_running_requests=True, reset_connector=True
                )
                assert len(self.ledger) == 0
            elif step % 20 == 10:
                assert self.scheduler.reset_connector_cache()
                assert len(self.ledger) == 0

        return self.chaos(seed=8, also=reset) | {"lost": sum(lost)}

    def broken(self, prompts: int = 10, rounds: int = 1, tokens: int = TOKENS // 2) -> dict:
        """Each method that may fail does, first at once and then now and then, one by one."""
        chance, count = random.Random(9), self.scheduler.counters.total
        errors = count("policy_errors")
        wrong, unharmed, requests = {}, [], 0
        right = [answer[:tokens] for answer in self.right[:prompts]]
        paths = list(COPIES_MAY_FAIL)
        if self.scheduler.vllm_config.scheduler_config.async_scheduling or rounds > 1:
            # In turn they fail in test_scheduler.py and test_preemption.py, too.
            paths = [*(f"scheduler.{path}" for path in MAY_FAIL), *paths]
        for number, path in enumerate(paths * rounds):
            beside = path.endswith((" beside", "finished", "saved")) or (
                number % 2 == 1 and not path.endswith((".load", ".save"))
            )
            self.set("swap", max_stall=0.0 if beside else 1e9)
            owner, name = method_of(self, path.removesuffix(" beside"))
            method, failures = getattr(owner, name), []

            def failing(*args, method=method, failures=failures, **kwargs):
                if not failures or chance.random() < 0.3:
                    failures.append(1)
                    raise RuntimeError("injected")
                return method(*args, **kwargs)

            with patch.object(owner, name, failing):
                report = self.chaos(seed=1000 + number, prompts=prompts, tokens=tokens)
            requests += len(report["answers"])
            wrong |= {path: report["answers"]} if report["answers"] != right else {}
            unharmed += [] if failures else [path]
        self.scheduler.preemptions.gauges()
        errors, before = count("policy_errors") - errors, errors
        self.injected += errors
        after = self.chaos(seed=99)
        return after | {
            "requests": requests,
            "wrong": wrong,
            "unharmed": unharmed,
            "errors": errors,
            "later_errors": count("policy_errors") - before - errors,
            "first": self.first_of_late_urgent(),
        }

    def thousand_broken(self) -> dict:
        return self.broken(prompts=14, rounds=3, tokens=TOKENS)

    def first_of_late_urgent(self) -> bool:
        """Whether an urgent request that comes to full seats ends before those that waited."""
        for number in range(12):
            self.engine.add_request(f"filler {number}", self.prompts[0], self.params())
        self.engine.step()
        urgent = self.params(extra_args={"urgency": 0})
        self.engine.add_request("urgent", self.prompts[1], urgent)
        ended: list[str] = []
        while self.engine.has_unfinished_requests():
            ended += [output.request_id for output in self.engine.step() if output.finished]
        return ended.index("urgent") < 8  # seats

    def without_loading(self) -> dict:
        """Negative control."""
        self.set("swap")
        with patch.object(self.worker.backend, "load", lambda device, host, key: None):
            return self.chaos(seed=2)

    def saving_too_late(self) -> dict:
        """Negative control: saves after the forward pass that reuses the blocks."""
        self.set("swap")
        worker, held_back = self.worker, []

        def hold_back(metadata) -> None:
            held_back.extend(metadata.orders.saves)
            metadata.orders.saves.clear()

        def save_now() -> None:
            while held_back:
                save = held_back.pop()
                worker.backend.save(save.device, save.host)

        with (
            patch.object(worker, "handle_preemptions", hold_back),
            patch.object(worker, "wait_for_save", save_now),
        ):
            return self.chaos(seed=2)

    def logprobs(self) -> dict:
        """One request alone, never preempted, swapped ten times, recomputed ten times: top
        log-probabilities as exact numbers."""

        def run(mode: str | None) -> list:
            if mode is not None:
                self.set(mode)
            name, found, step = f"logprobs {mode}", [], 0
            self.engine.add_request(name, self.prompts[0], self.params(logprobs=3))
            while self.engine.has_unfinished_requests():
                step += 1
                if mode is not None and step % 6 == 0 and self.scheduler.running:
                    preempt(self.scheduler, self.scheduler.running[0])
                for output in self.engine.step():
                    found = output.outputs[0].logprobs
            return [
                sorted((token, entry.logprob.hex()) for token, entry in position.items())
                for position in found
            ]

        never = run(None)

        def equal(mode: str) -> int:
            return sum(a == b for a, b in zip(run(mode), never, strict=True))

        return {"positions": len(never), "swap": equal("swap"), "recompute": equal("recompute")}


def main() -> None:
    model, policy, folder, engines = sys.argv[1:]
    import vllm  # noqa: F401  (once: it takes longer than the start of an engine)

    context = multiprocessing.get_context("fork")
    for name, (options, scenarios) in json.loads(engines).items():
        report = Path(folder, f"{name}.json")
        process = context.Process(target=run, args=(model, policy, options, report, scenarios))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


def run(model: str, policy: str, options: dict, report: Path, scenarios: list[str]) -> None:
    earlier = options.pop("answers_of", None)
    engine = SwapEngine(model, policy, options)
    results = {}
    if earlier is None:
        engine.right = engine.answer_alone()
    else:
        engine.right = json.loads(report.with_stem(earlier).read_text())["alone"]["answers"]
    with engine.poisoning():
        for scenario in scenarios:
            results[scenario] = getattr(engine, scenario)()
            engine.scheduler.reset_prefix_cache()
    results["engine"] = {
        "scheduler": type(engine.scheduler).__name__,
        "caching": engine.caching,
        "asynchronous": engine.scheduler.vllm_config.scheduler_config.async_scheduling,
        "groups": len(engine.scheduler.kv_cache_config.kv_cache_groups),
        "connector": type(engine.scheduler.connector).__name__,
        "policy_errors": engine.scheduler.counters.total("policy_errors") - engine.injected,
    }
    report.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
