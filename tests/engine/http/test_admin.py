"""The operator's endpoints and commands against a real server."""

import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from chaos import BASE_POLICY, disturb, server_arguments
from metrics_page import page_value, wait_until
from safetensors.torch import save_file

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.operate.client import AdminClient, AdminError

pytestmark = pytest.mark.engine

KEY = "open-sesame"
CROWD = 8
STORY_TOKENS = 250
SHORT_STORY_TOKENS = 150
# One that may wait however long a slow machine takes: in BASE_POLICY the lesser ones are refused.
LEVEL = 2


@pytest.fixture(scope="module")
def weights(slim_model, tmp_path_factory):
    """The weights of a copy of the model, which a test changes."""
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(slim_model, folder)
    return folder / "model.safetensors"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "mine.yaml"
    path.write_text(BASE_POLICY)
    return path


@pytest.fixture(scope="module")
def server(serve, weights, policy):
    arguments = (*server_arguments(policy), "--api-key", KEY)
    return serve(*arguments, seats=3, num_blocks=40, model=weights.parent)


def complete(server, prompt="hello", max_tokens=8, model="bench", urgency=LEVEL) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body["vllm_xargs"] = {"urgency": urgency}
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = json.load(reply)
    assert answer["usage"]["completion_tokens"] == max_tokens
    return answer["choices"][0]["text"]


def admin(server) -> AdminClient:
    return AdminClient(server.url, KEY)


def command(server, *words: str) -> int:
    return main([*words, "--server", server.url, "--api-key", KEY])


def test_reload_applies_a_valid_file_and_rejects_a_bad_one(server, policy, capsys) -> None:
    text = policy.read_text()
    policy.write_text(text + "preemption: {max_per_request: 1}\n")
    assert command(server, "policy", "reload") == 0
    assert "adopted, version 2" in capsys.readouterr().out
    policy.write_text(text + "preemption: {max_per_reqest: 1}\n")
    assert command(server, "policy", "reload") == 1
    assert "did you mean 'max_per_request'" in capsys.readouterr().err
    policy.write_text(text + "base: sjf\n")
    assert command(server, "policy", "reload") == 1
    assert "base: 'semantic' -> 'sjf' needs a restart" in capsys.readouterr().err
    policy.write_text(text)
    figures = (
        'semsched:policy_version{engine="0"} 2.0',
        'semsched:policy_reloads_total{engine="0",result="refused"} 2.0',
    )
    # An idle engine reports every few seconds.
    wait_until(lambda: all(figure in server.get_text("/metrics") for figure in figures))
    assert command(server, "policy", "reload") == 0


def test_canary_runs_beside_the_policy_and_is_kept_if_told_so(
    server, policy, tmp_path, capsys
) -> None:
    def canary() -> dict:
        complete(server)  # an idle engine waits for the next request
        return admin(server).call("/canary")["engines"][0]

    text = policy.read_text()
    kept_by_nobody = "share: 0.3, slo: {ttft: 1.0e-6}"
    policy.write_text(text.replace("share: 0.3", kept_by_nobody))
    reloads = "semsched:policy_reloads_total"
    before = page_value(server, reloads, result="adopted")
    assert command(server, "policy", "reload") == 0
    # Without a request in between.
    assert page_value(server, reloads, result="adopted") == before + 1
    new = tmp_path / "new.yaml"
    new.write_text(policy.read_text() + "preemption: {max_per_request: 1}\n")
    start = ("canary", "start", "--policy", str(new), "--share", "0.9", "--period", "10")
    assert command(server, *start, "--until-broken", "e2e") == 0
    wait_until(lambda: canary()["tallies"]["new"][LEVEL]["e2e"][0] >= 3)
    assert 'semsched:canary{engine="0"} 1.0' in server.get_text("/metrics")
    capsys.readouterr()
    assert command(server, "canary", "status") == 0
    out = capsys.readouterr().out
    assert "engine 0: both in turn, now the " in out and "urgent" in out and "ttft" in out
    assert max(map(len, out.splitlines())) <= 100
    assert command(server, *start) == 1
    assert "stop it first" in capsys.readouterr().err
    assert command(server, "canary", "stop", "--keep") == 0
    assert "engine 0: kept" in capsys.readouterr().out
    new.write_text(policy.read_text() + "base: sjf\n")
    assert command(server, *start) == 1
    assert "base: 'semantic' -> 'sjf' needs a restart" in capsys.readouterr().err
    policy.write_text(text)
    assert command(server, "policy", "reload") == 0


@pytest.mark.parametrize(
    ("key", "header", "status"),
    [(None, {}, 401), (KEY, {"X-Forwarded-For": "1.2.3.4"}, 403), (KEY, {"Origin": "null"}, 403)],
)
def test_requests_without_key_or_from_remote_are_rejected(server, key, header, status) -> None:
    headers = header | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(server.url + "/v1/semsched/pause", b"{}", headers)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=120)
    assert refusal.value.code == status
    assert not admin(server).status()[0]["paused"]


class ManyRequests:
    """More clients than seats. Each asks for its story again and again until the end of the block,
    so that requests run and wait however fast the machine is."""

    def __init__(self, server, tokens: int = STORY_TOKENS) -> None:
        self.server = server
        self.tokens = tokens
        self.texts: dict[int, set[str]] = {number: set() for number in range(CROWD)}
        self._clients = ThreadPoolExecutor(CROWD)
        self._left = threading.Event()

    def _ask(self, number: int) -> None:
        while not self._left.is_set():
            text = complete(self.server, f"story number {number}", self.tokens)
            self.texts[number].add(text)

    def __enter__(self):
        self._asking = [self._clients.submit(self._ask, number) for number in self.texts]
        wait_until(lambda: admin(self.server).status()[0]["waiting"] > 0, pause=0.01)
        return self

    def __exit__(self, error, *_) -> None:
        self._left.set()
        if error is not None:  # the server may be paused
            admin(self.server).post("/resume")
        for client in self._asking:
            client.result(timeout=240)


@pytest.fixture(scope="module")
def calm(server) -> dict[int, set[str]]:
    """The answers to the same requests without maintenance."""
    with ThreadPoolExecutor(server.config.seats) as clients:
        prompts = [f"story number {number}" for number in range(CROWD)]
        answers = clients.map(lambda prompt: complete(server, prompt, STORY_TOKENS), prompts)
        return {number: {answer} for number, answer in enumerate(answers)}


@pytest.mark.parametrize("running", ["finish", "keep"])
def test_requests_survive_a_pause(server, calm, running, capsys) -> None:
    def state() -> dict:
        return admin(server).status()[0]

    def paused() -> bool:
        """Pause; if no request ran at that moment, all clients being slow, resume."""
        assert command(server, "maintenance", "pause", "--running", running) == 0
        if running == "finish" or state()["running"]:
            return True
        assert command(server, "maintenance", "resume") == 0
        return False

    with ManyRequests(server) as requests:
        wait_until(paused)
        wait_until(lambda: state()["jobs"] == CROWD)  # those who were answered have asked again
        found = state()
        assert found["paused"] and found["waiting"] > 0
        assert sum(found["levels"]) == CROWD
        assert (found["kv_free"] < 1.0) == (running == "keep")
        assert (found["running"] > 0) == (running == "keep")
        time.sleep(1)
        assert state() == found
        assert command(server, "maintenance", "resume") == 0
    assert requests.texts == calm
    assert "paused: " in capsys.readouterr().out


@pytest.mark.parametrize("running", ["finish", "keep"])
def test_weights_can_change_while_requests_wait(server, weights, running) -> None:
    from safetensors.torch import load_file, save_file

    before = complete(server, "what is rain", 30)
    kept = weights.with_suffix(".kept")
    shutil.copy(weights, kept)
    tensors = load_file(weights)
    save_file({name: tensor.flip(0) for name, tensor in tensors.items()}, weights)
    action = ("maintenance", "reload-weights", "--running", running)
    with ManyRequests(server, SHORT_STORY_TOKENS):
        assert command(server, *action) == 0
    other = complete(server, "what is rain", 30)
    assert other != before
    shutil.move(kept, weights)
    assert command(server, *action) == 0
    assert complete(server, "what is rain", 30) == before


def test_operator_raises_a_waiting_request_by_its_clients_id(server, capsys) -> None:
    """While the server is paused, so that the request still waits when the command comes."""
    body = {"model": "bench", "prompt": "hello", "max_tokens": 60, "ignore_eos": True}
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body | {"vllm_xargs": {"urgency": LEVEL}}).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {KEY}",
            "X-Request-Id": "ward-7",
        },
    )
    raised = "semsched:operator_levels_total"
    with ManyRequests(server), ThreadPoolExecutor(1) as clients:
        assert command(server, "maintenance", "pause", "--running", "keep") == 0
        answer = clients.submit(lambda: json.load(urllib.request.urlopen(request, timeout=120)))
        wait_until(lambda: command(server, "level", "ward-7") == 0, pause=0.01)
        assert f"level {LEVEL} (hint), waits with " in capsys.readouterr().out
        assert command(server, "level", "ward-7", "9") == 1
        assert "level 9 does not exist; valid: 0, 1, 2, 3, 4" in capsys.readouterr().err
        assert command(server, "level", "ward-7", "0", "--by", "ann", "--why", "pain") == 0
        changed = f"level {LEVEL} became 0, waits with 0 ahead, the server is paused"
        assert changed in capsys.readouterr().out
        assert command(server, "maintenance", "resume") == 0
        assert answer.result()["id"] == "cmpl-ward-7"
        assert command(server, "level", "cmpl-ward-7") == 1
        assert "'cmpl-ward-7' waits or runs: it has ended" in capsys.readouterr().err
    wait_until(lambda: page_value(server, raised, change="raised") == 1)


def test_sleep_and_wake_keep_the_queue(server, capsys) -> None:
    """The CPU platform frees no memory, but the sequence of actions is the same."""
    with ManyRequests(server, SHORT_STORY_TOKENS):
        assert command(server, "maintenance", "sleep") == 0
        assert "no sleep mode on this platform" in capsys.readouterr().out
        assert admin(server).status()[0]["paused"]
        assert command(server, "maintenance", "wake") == 0


def test_server_continues_after_a_failed_action(server, capsys) -> None:
    action = ("maintenance", "unload-lora", "--lora-name", "none")
    assert command(server, *action) == 1
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in capsys.readouterr().err
    assert not admin(server).status()[0]["paused"]
    assert complete(server)


def test_tiers_are_shed_while_an_slo_is_missed(server, policy) -> None:
    kept = policy.read_text()
    policy.write_text(kept.replace("slo: {ttft: 5}", "slo: {ttft: 0.00001}"))
    assert command(server, "policy", "reload") == 0

    def refusal() -> str | None:
        complete(server, urgency=0)
        try:
            complete(server, urgency=4)
        except urllib.error.HTTPError as error:
            assert error.code == 429 and int(error.headers["retry-after"]) >= 1
            return json.load(error)["error"]["code"]
        return None

    # An engine that keeps up sheds nothing.
    with ManyRequests(server, SHORT_STORY_TOKENS):
        wait_until(lambda: refusal() == "shed")
    policy.write_text(kept)
    assert command(server, "policy", "reload") == 0
    wait_until(lambda: refusal() is None)


def write_adapter(folder, model) -> None:
    """A LoRA adapter of rank 8 with random weights on the query projections."""
    shape = json.loads((model / "config.json").read_text())
    width = shape["hidden_size"]
    torch.manual_seed(0)
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, width)
        weights[f"{name}.lora_B.weight"] = torch.randn(width, 8)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 64}
    settings |= {"target_modules": ["q_proj"], "bias": "none", "base_model_name_or_path": "bench"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def test_adapter_is_loaded_and_unloaded_while_requests_run(serve, slim_model, tmp_path) -> None:
    write_adapter(tmp_path / "tone", slim_model)
    options = ("--api-key", KEY, "--enable-lora", "--max-lora-rank", "8")
    changing = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    unread = tmp_path / "policy.yaml"
    unread.write_text(BASE_POLICY + "predictor: {enabled: false}\n")
    arguments = (*server_arguments(unread), *options)
    server = serve(*arguments, model=slim_model, seats=3, environment=changing)
    before = complete(server, "what is rain", 30)
    adapter = ("--lora-name", "tone", "--lora-path", str(tmp_path / "tone"))
    with ManyRequests(server, SHORT_STORY_TOKENS):
        assert command(server, "maintenance", "load-lora", *adapter) == 0
        assert complete(server, "what is rain", 30, model="tone") != before
    assert complete(server, "what is rain", 30) == before
    unload = ("maintenance", "unload-lora", "--lora-name", "tone")
    with ManyRequests(server, SHORT_STORY_TOKENS):
        assert command(server, *unload) == 0
    with pytest.raises(urllib.error.HTTPError, match="404"):
        complete(server, model="tone")
    assert complete(server, "what is rain", 30) == before


def test_changing_weights_in_use_is_rejected(server) -> None:
    with pytest.raises(AdminError, match="pause first"):
        admin(server).post("/weights/reload")


def test_all_operator_actions_can_run_concurrently(server, policy) -> None:
    report = disturb(
        server,
        policy,
        requests=100,
        cases=15,
        at_a_time=14,
        pace=0.4,
        api_key=KEY,
        until=("policies adopted", "policies refused", "predictor kills"),
    )
    assert report.problems == []
    assert report.outcomes["completed"] > 35 and report.outcomes["left"] > 5
    assert report.hold_costs
