"""The path of docs/getting-started.md ("Try it without risk") on a real server."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from metrics_page import wait_until

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.operate.client import AdminClient

pytestmark = pytest.mark.engine

TEXTS = ("my father is not breathing", "write a poem about the sea", "my knee has hurt for weeks")


def test_observe_top_whatif_and_then_order(serve, tmp_path, capsys) -> None:
    log, policy = tmp_path / "events.jsonl", tmp_path / "policy.yaml"
    policy.write_text("observe: true\n")
    settings = {"policy": str(policy), "events": str(log)}
    server = serve(
        "--scheduler-cls=vllm_semantic_sched.SemanticScheduler",
        "--middleware=vllm_semantic_sched.Middleware",
        f"--additional-config={json.dumps({'semantic_sched': settings})}",
        seats=2,
    )

    def complete(number: int) -> None:
        body = {"model": "bench", "max_tokens": 8 + number % 20, "ignore_eos": True}
        body |= {"prompt": TEXTS[number % 3], "temperature": 0}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            json.load(reply)

    client = AdminClient(server.url)
    wait_until(lambda: client.status()[0]["ready"])
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(complete, range(60)))
    wait_until(lambda: '"log": "engine"' in log.read_text())
    wait_until(lambda: log.read_text().count('"state": "completed"') == 60)
    assert main(["top", "--once", "--server", server.url]) == 0
    assert "observes" in capsys.readouterr().out
    assert main(["whatif", str(log), "--policy", "ems", "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "engine 0: 60 requests" in out and "ems: level 0 p99 TTFT would be" in out
    assert "Check: " in out or "too few timed steps" in out  # by the machine's speed
    assert (tmp_path / "out" / "report.html").is_file()
    ended = [json.loads(line) for line in log.read_text().splitlines()]
    ended = [line for line in ended if line.get("state") == "completed"]
    assert len(ended) == 60 and all(line["came"] for line in ended)
    assert sum("urgency" in line for line in ended) > 40
    assert not any(line.get("reason") == "urgent" for line in ended)
    policy.write_text("observe: false\n")
    assert main(["policy", "reload", "--server", server.url]) == 0
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(complete, range(12)))
    assert main(["top", "--once", "--server", server.url]) == 0
    assert "answers" in capsys.readouterr().out
