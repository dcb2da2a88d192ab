"""SemanticScheduler in an offline `LLM`."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.engine

SCRIPT = textwrap.dedent(
    """
    import json, sys, time
    from vllm import LLM, SamplingParams
    from vllm_semantic_sched import refusal_of

    llm = LLM(
        sys.argv[1],
        additional_config={"semantic_sched": {"policy": sys.argv[2]}},
        scheduler_cls="vllm_semantic_sched.SemanticScheduler",
        dtype="float32", enforce_eager=True, max_num_seqs=2, gpu_memory_utilization=0.7,
        kv_cache_memory_bytes=2**28, num_gpu_blocks_override=64, block_size=32,
    )
    hints = [4, 0, None, {"nested": [1]}, "abc", -1, [0], 99]
    params = [
        SamplingParams(
            temperature=0, max_tokens=20, ignore_eos=True, extra_args={"urgency": hint}
        )
        for hint in hints
    ]
    answers = llm.generate(["tell me about rain"] * len(hints), params, use_tqdm=False)
    same = SamplingParams(max_tokens=5, ignore_eos=True, extra_args={"dedup_key": "k"})
    older, newer = llm.generate(["first", "second"], same, use_tqdm=False)
    refusal = refusal_of(older)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    counters = scheduler.counters
    # On a busy machine short answers can end before their prompts are read.
    deadline, unhinted = time.monotonic() + 60, SamplingParams(max_tokens=200, ignore_eos=True)
    while not counters.total("predictions") and time.monotonic() < deadline:
        llm.generate("tell me about snow", unhinted, use_tqdm=False)
    print(json.dumps({
        "tokens": [answer.outputs[0].token_ids for answer in answers],
        "invalid": counters.total("invalid_hints"),
        "predicted": counters.total("predictions"),
        "errors": counters.total("policy_errors"),
        "left": len(scheduler.jobs),
        "refused": [refusal.code.value, older.outputs[0].finish_reason, older.finished],
        "served": [refusal_of(newer), len(newer.outputs[0].token_ids)],
    }))
    """
)


def test_hints_predictions_and_refusals_work_offline(model, tmp_path) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text("dedup: {enabled: true}\n")
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in reach of the script
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(policy)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert [len(tokens) for tokens in report["tokens"]] == [20] * 8
    assert all(tokens == report["tokens"][0] for tokens in report["tokens"])
    assert report["invalid"] == 6
    assert report["predicted"] > 0
    assert report["errors"] == 0
    assert report["left"] == 0
    assert report["refused"] == ["superseded", "error", True]
    assert report["served"] == [None, 5]
