"""Metrics pages without an engine, and an HTTP server that shows one."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_semantic_sched.engine.metrics.table import COUNTERS, GAUGES, HISTOGRAMS


class MadeUpPage:
    """A server's metrics page with this package's own tables of metrics, as `SemanticStatLogger`
    publishes them, and vLLM's KV use."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics = {}
        for table, kind in ((COUNTERS, Counter), (GAUGES, Gauge), (HISTOGRAMS, Histogram)):
            for name, metric in table.items():
                more = {"buckets": metric.buckets} if metric.buckets else {}
                self._metrics[name] = kind(
                    f"semsched:{name}",
                    metric.help,
                    ["engine", *metric.labels],
                    registry=self._registry,
                    **more,
                )
        name = "vllm:kv_cache_usage_perc"
        self._kv_use = Gauge(name, "KV", ["engine"], registry=self._registry)

    def tiers(self, *names: str, engine: int = 0) -> None:
        for level, name in enumerate(names):
            self.set("tier_info", 1, name, str(level), engine=engine)

    def set(self, name: str, value: float, *labels: str, engine: int = 0) -> None:
        self._metrics[name].labels(str(engine), *labels).set(value)

    def add(self, name: str, value: float, *labels: str, engine: int = 0) -> None:
        self._metrics[name].labels(str(engine), *labels).inc(value)

    def observe(self, name: str, values: list[float], *labels: str, engine: int = 0) -> None:
        for value in values:
            self._metrics[name].labels(str(engine), *labels).observe(value)

    def kv_use(self, share: float, engine: int = 0) -> None:
        self._kv_use.labels(str(engine)).set(share)

    def text(self) -> str:
        return generate_latest(self._registry).decode()


def busy_page() -> MadeUpPage:
    """A server with three tiers under load."""
    page = MadeUpPage()
    page.tiers("immediate", "urgent", "non-urgent")
    page.set("waiting_requests", 2, "urgent")
    page.set("waiting_requests", 31, "non-urgent")
    page.set("running_requests", 5, "immediate")
    page.set("running_requests", 11, "urgent")
    page.set("longest_wait_seconds", 92.4, "non-urgent")
    page.add("held_seconds", 12.0, "urgent")
    page.add("preemptions", 3, "recompute", "urgent")
    page.add("preemptions", 1, "recompute", "kv_shortage")
    page.add("preemptions", 2, "swap", "urgent")
    page.observe("time_to_first_token_seconds", [0.2] * 99 + [4.0], "immediate")
    page.kv_use(0.875)
    page.set("host_pool_usage", 0.25)
    page.set("predictor_up", 1)
    page.set("predictor_queue", 7)
    page.set("policy_version", 2)
    return page


class FakeServer:
    """Answers like a vLLM server with the middleware, which pauses at once.

    Attributes:
        page: the metrics page; None: status 500.
        calls: paths of the operator's actions that were carried out.
        attempts: number of actions asked for.
        key: the API key that the operator's endpoints want.
        locked: status and message with which they refuse; None if they answer.
        fingerprint: of the policy; None: the policy is `fcfs`.
    """

    version = "0.32.0"

    def __init__(self, page: MadeUpPage | None = None) -> None:
        self.page = page
        self.calls: list[str] = []
        self.attempts = 0
        self.key: str | None = None
        self.locked: tuple[int, str] | None = None
        self.paused = False
        self.ready = True
        self.fingerprint: str | None = "0123456789ab"
        self.url = ""

    def answer(self, method: str, path: str, key: str | None) -> tuple[int, str]:
        if path == "/metrics":
            return (500, "broken") if self.page is None else (200, self.page.text())
        if path == "/version":
            return 200, json.dumps({"version": self.version})
        if not path.startswith("/v1/semsched"):
            return 404, json.dumps({"error": {"message": "Not Found"}})
        self.attempts += method == "POST"
        if self.key is not None and key != f"Bearer {self.key}":
            return 401, json.dumps({"error": "Unauthorized"})
        if self.locked is not None:
            return self.locked[0], json.dumps({"error": {"message": self.locked[1]}})
        if method == "POST":
            self.calls.append(path.removeprefix("/v1/semsched"))
            self.paused = {"/pause": True, "/resume": False}.get(self.calls[-1], self.paused)
        policy = {"name": "mine.yaml", "base": "semantic", "levels": 3}
        policy |= {"result": "adopted", "version": 3}
        if self.fingerprint is not None:
            policy["fingerprint"] = self.fingerprint
        if self.calls and self.calls[-1] == "/policy/reload" and method == "POST":
            return 200, json.dumps({"engines": [policy]})
        engine = {
            "engine": 0,
            "paused": self.paused,
            "scheduler": "vllm_semantic_sched.engine.scheduler.SemanticScheduler",
            "ready": self.ready,
            "running": 1,
            "waiting": 2,
            "kv_connector": "SemanticSwapConnector",
            "host_pool": 640,
            "policy": policy,
        }
        return 200, json.dumps({"engines": [engine]})


@contextlib.contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Run a fake server on a free port, and set its address."""

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, text = fake.answer(self.command, self.path, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = respond

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    # Seconds between two looks at whether it should end.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
