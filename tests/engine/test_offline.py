"""SemanticScheduler in an offline `LLM`."""

import json
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.engine

SCRIPT = textwrap.dedent(
    """
    import json, os, sys, time
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm_semantic_sched import refusal_of

    def run(model, policy, mode):
        asynchronous = mode == "asynchronous"
        if asynchronous:
            from async_engine import schedule_asynchronously

            schedule_asynchronously()
        llm = LLM(
            model,
            additional_config={"semantic_sched": {"policy": policy}},
            scheduler_cls="vllm_semantic_sched.SemanticScheduler",
            dtype="float32", enforce_eager=True, max_num_seqs=2, gpu_memory_utilization=0.7,
            kv_cache_memory_bytes=2**28, num_gpu_blocks_override=64, block_size=32,
            async_scheduling=asynchronous,
        )
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        hints = [4, 0, None, {"nested": [1]}, "abc", -1, [0], 99]
        params = [
            SamplingParams(
                temperature=0, max_tokens=20, ignore_eos=True, extra_args={"urgency": hint}
            )
            for hint in hints
        ]
        answers = llm.generate(["tell me about rain"] * len(hints), params, use_tqdm=False)
        # The least urgent one has a seat before the others arrive, and is preempted.
        urgent = SamplingParams(max_tokens=5, ignore_eos=True, extra_args={"urgency": 0})
        chosen, preempted = [], scheduler.counters.total("preemptions")
        either = StructuredOutputsParams(choice=[name * 20 for name in ("yes", "no")])
        choices = SamplingParams(
            temperature=0, max_tokens=60, extra_args={"urgency": 4}, structured_outputs=either
        )
        engine = llm.llm_engine
        for name in ("a", "b"):
            engine.add_request(name, "is it raining", choices)
        # Their grammar compiles on another thread, so count their tokens rather than the steps.
        tokens, arrivals, deadline = {}, [3, 6], time.monotonic() + 120
        while engine.has_unfinished_requests() and time.monotonic() < deadline:
            for output in engine.step():
                tokens[output.request_id] = len(output.outputs[0].token_ids)
                if output.finished and output.request_id in ("a", "b"):
                    chosen.append(output.outputs[0].text)
            if arrivals and min(tokens.get("a", 0), tokens.get("b", 0)) >= arrivals[0]:
                engine.add_request(f"urgent {arrivals.pop(0)}", "help", urgent)
        preempted = scheduler.counters.total("preemptions") - preempted
        same = SamplingParams(max_tokens=5, ignore_eos=True, extra_args={"dedup_key": "k"})
        older, newer = llm.generate(["first", "second"], same, use_tqdm=False)
        refusal = refusal_of(older)
        counters = scheduler.counters
        # The process that reads has the lowest priority: on a busy machine it starts only while
        # this one sleeps, and short answers can end before their prompts are read.
        deadline, unhinted = time.monotonic() + 200, SamplingParams(max_tokens=200, ignore_eos=True)
        while not scheduler.predictions.ready and time.monotonic() < deadline:
            time.sleep(0.1)
        while not counters.total("predictions") and time.monotonic() < deadline:
            llm.generate("tell me about snow", unhinted, use_tqdm=False)
            time.sleep(0.1)
        print(json.dumps({
            "mode": mode,
            "scheduler": type(scheduler).__name__,
            "asynchronous": scheduler.vllm_config.scheduler_config.async_scheduling,
            "chosen": chosen,
            "preempted": preempted,
            "tokens": [answer.outputs[0].token_ids for answer in answers],
            "invalid": counters.total("invalid_hints"),
            "predicted": counters.total("predictions"),
            "errors": counters.total("policy_errors"),
            "left": len(scheduler.jobs),
            "refused": [refusal.code.value, older.outputs[0].finish_reason, older.finished],
            "served": [refusal_of(newer), len(newer.outputs[0].token_ids)],
        }))

    # A process for each engine, forked after the imports, which take longer than its start.
    for mode in sys.argv[3:]:
        child = os.fork()
        if not child:
            run(*sys.argv[1:3], mode)
            sys.exit()
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{mode}: the engine's process failed")
    """
)


@pytest.fixture(scope="module")
def reports(model, tmp_path_factory, offline_environment) -> dict[str, dict]:
    """By mode."""
    policy = tmp_path_factory.mktemp("offline") / "mine.yaml"
    policy.write_text("dedup: {enabled: true}\n")
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(policy), "in turn", "asynchronous"],
        env=offline_environment,
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"mode": ')]
    return {report["mode"]: report for report in map(json.loads, lines)}


@pytest.mark.parametrize("mode", ["in turn", "asynchronous"])
def test_hints_grammars_predictions_and_refusals_work_offline(reports, mode) -> None:
    report = reports[mode]
    assert report["asynchronous"] == (mode == "asynchronous")
    assert len(report["chosen"]) == 2 and set(report["chosen"]) <= {"yes" * 20, "no" * 20}
    assert report["preempted"] > 0
    assert [len(tokens) for tokens in report["tokens"]] == [20] * 8
    assert all(tokens == report["tokens"][0] for tokens in report["tokens"])
    assert report["invalid"] == 6
    assert report["predicted"] > 0
    assert report["errors"] == 0
    assert report["left"] == 0
    assert report["refused"] == ["superseded", "error", True]
    assert report["served"] == [None, 5]
