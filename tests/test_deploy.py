"""What lies in deploy/kubernetes: whole by Kubernetes' schemas, of one mind with itself, and a daemon runs with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from lmcache_core.cli import main
from lmcache_core.config import CacheConfig, parse_config
from lmcache_core.units import parse_nbytes

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
FOLDER = DEPLOY / "kubernetes"
VERSIONS = ("1.29", "1.33", kubernetes_validate.latest_version())
SPARE_NBYTES = 512 << 20
"""What a daemon's memory limit has to leave beside the host tier."""


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


MANIFESTS = [(path.name, each) for path in sorted(FOLDER.glob("*.yaml")) for each in documents(path)]
BUILT_IN = [(name, each) for name, each in MANIFESTS if not re.search("coreos|kustomize", each["apiVersion"])]


def of_kind(kind: str) -> Iterator[dict[str, Any]]:
    return (each for _, each in MANIFESTS if each["kind"] == kind)


def one(kind: str) -> dict[str, Any]:
    (found,) = of_kind(kind)
    return found


def daemon() -> dict[str, Any]:
    spec: dict[str, Any] = one("DaemonSet")["spec"]["template"]["spec"]
    return spec


def container(spec: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in spec["containers"] if each["name"] == name]
    return dict(found)


def config() -> CacheConfig:
    return parse_config(one("ConfigMap")["data"]["lmcache.yaml"], "config.yaml", {})


# Schemas


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "manifest"), BUILT_IN, ids=[f"{name}-{each['kind']}" for name, each in BUILT_IN])
def test_a_manifest_is_whole_by_the_schemas_of_kubernetes(name: str, manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schemas_refuse_a_word_that_is_not_theirs() -> None:
    wrong = json.loads(json.dumps(one("DaemonSet")))
    wrong["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def strict(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


TEXT = {"type": "string"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
METADATA = strict(("name",), name=TEXT, labels=TEXTS)
ENDPOINT = strict(
    ("port",),
    port=TEXT,
    path=TEXT,
    scheme={"enum": ["http", "https"]},
    interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
    bearerTokenFile=TEXT,
    tlsConfig=strict((), insecureSkipVerify={"type": "boolean"}),
    relabelings={
        "type": "array",
        "items": strict((), sourceLabels={"type": "array", "items": TEXT}, targetLabel=TEXT),
    },
)
RULE = strict(("alert", "expr"), alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS, **{"for": TEXT})
OPERATOR = {
    "ServiceMonitor": strict(
        ("selector", "endpoints"),
        jobLabel=TEXT,
        selector=strict(("matchLabels",), matchLabels=TEXTS),
        endpoints={"type": "array", "items": ENDPOINT, "minItems": 1},
    ),
    "PrometheusRule": strict(
        ("groups",),
        groups={"type": "array", "items": strict(("name", "rules"), name=TEXT, rules={"type": "array", "items": RULE})},
    ),
}
"""Of the Prometheus operator's resources the part that we use, as its API reference has it."""


@pytest.mark.parametrize("kind", OPERATOR)
def test_what_is_for_the_prometheus_operator_has_its_form(kind: str) -> None:
    spec = OPERATOR[kind]
    whole = strict(("apiVersion", "kind", "metadata", "spec"), apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec)
    found = one(kind)
    assert found["apiVersion"] == "monitoring.coreos.com/v1"
    jsonschema.validate(found, whole)


# Of one mind


def test_kustomize_takes_every_manifest_but_the_example() -> None:
    listed = one("Kustomization")["resources"]
    assert sorted(listed) == sorted({name for name, _ in MANIFESTS} - {"kustomization.yaml", "engine.yaml"})


def test_selectors_find_what_they_are_to_find() -> None:
    template = one("DaemonSet")["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert one("DaemonSet")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    service = one("Service")
    assert service["spec"]["selector"].items() <= labels.items()
    assert one("ServiceMonitor")["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    assert [each["port"] for each in one("ServiceMonitor")["spec"]["endpoints"]] == [port["name"]]
    assert port["targetPort"] in {each["name"] for each in container(daemon(), "metrics")["ports"]}
    assert daemon()["serviceAccountName"] == one("ServiceAccount")["metadata"]["name"]
    binding = one("ClusterRoleBinding")
    assert binding["roleRef"]["name"] in {each["metadata"]["name"] for each in of_kind("ClusterRole")}
    assert (
        binding["subjects"][0]["namespace"] == one("Kustomization")["namespace"] == one("Namespace")["metadata"]["name"]
    )
    engine = one("Deployment")["spec"]["template"]["spec"]
    assert engine["nodeSelector"] == daemon()["nodeSelector"]


def test_the_memory_limit_holds_the_host_tier_and_what_the_daemon_needs_itself() -> None:
    resources = container(daemon(), "lmcache")["resources"]
    limit = parse_nbytes(f"{resources['limits']['memory']}B")
    host = config().host
    assert host is not None
    assert host.capacity_nbytes is not None
    assert limit >= host.capacity_nbytes + SPARE_NBYTES
    assert (
        resources["requests"]["memory"] == resources["limits"]["memory"]
    )  # the slab fills up: nobody else may count on it
    for spec in (daemon(), one("Deployment")["spec"]["template"]["spec"]):
        for each in [*spec["containers"], *spec.get("initContainers", [])]:
            assert each["resources"]["limits"]["memory"], each["name"]


def test_daemon_and_engine_share_the_folder_of_the_socket_and_may_use_it() -> None:
    server, socket = config().server, config().daemon_socket
    engine = one("Deployment")["spec"]["template"]["spec"]
    places = set()
    for spec in (daemon(), engine):
        for each in spec["containers"]:
            for mount in each.get("volumeMounts", []):
                if Path(mount["mountPath"]) == socket.parent:
                    (volume,) = [one["hostPath"] for one in spec["volumes"] if one["name"] == mount["name"]]
                    places.add((volume["path"], volume["type"]))
    assert places == {(str(socket.parent), "DirectoryOrCreate")}
    environment = {each["name"]: each["value"] for each in container(engine, "vllm")["env"]}
    assert environment["LMCACHE__SOCKET"] == str(socket)
    security = container(daemon(), "lmcache")["securityContext"]
    assert server.mode == 0o660
    assert int(server.socket_group) == security["runAsGroup"]
    assert int(server.socket_group) in engine["securityContext"]["supplementalGroups"]
    assert {engine["securityContext"]["runAsUser"], security["runAsUser"]} <= set(server.allowed_uids)
    (folders,) = daemon()["initContainers"]
    assert str(socket.parent) in folders["command"]
    assert folders["command"][folders["command"].index("-o") + 1] == str(security["runAsUser"])
    disk = (
        config().tiers[1].options.into(__import__("lmcache_core.backends.disk", fromlist=["DiskOptions"]).DiskOptions)
    )
    assert str(disk.path) in folders["command"]


def test_nobody_shares_more_than_that_folder_with_the_host_and_nobody_is_privileged() -> None:
    for spec in (daemon(), one("Deployment")["spec"]["template"]["spec"]):
        assert not {"hostIPC", "hostPID", "hostNetwork"} & set(spec)
        for each in spec["containers"]:
            assert not each.get("securityContext", {}).get("privileged")
    for each in daemon()["containers"]:
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert each["securityContext"]["readOnlyRootFilesystem"]
        assert each["securityContext"]["runAsNonRoot"]


def test_there_is_time_to_write_what_is_not_written_before_a_pod_is_killed() -> None:
    from lmcache_core.server.daemon import _DRAIN_TIMEOUT_S

    assert daemon()["terminationGracePeriodSeconds"] >= _DRAIN_TIMEOUT_S + 20


def test_metrics_leave_the_pod_only_through_the_proxy_that_asks_who_asks() -> None:
    http = config().server.http
    arguments = container(daemon(), "metrics")["args"]
    assert f"--upstream=http://{http}/" in arguments
    assert "--allow-paths=/metrics" in arguments
    assert http in json.dumps(container(daemon(), "lmcache")["readinessProbe"])
    reader = [rule for role in of_kind("ClusterRole") for rule in role["rules"] if "nonResourceURLs" in rule]
    assert reader == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]


def test_the_rules_for_the_operator_are_those_for_prometheus() -> None:
    assert one("PrometheusRule")["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())


def test_the_image_has_the_user_and_the_folders_of_the_manifests() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    security = container(daemon(), "lmcache")["securityContext"]
    assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in text
    assert 'ENTRYPOINT ["lmc"]' in text
    for folder in re.findall(r"COPY ([a-z/]+) ", text):
        assert (ROOT / folder).is_dir()
    for mount in container(daemon(), "lmcache")["volumeMounts"][:2]:
        assert mount["mountPath"] in text
    command = container(daemon(), "lmcache")["args"]
    known = {option for each in main.get_command(None, command[0]).params for option in each.opts}  # type: ignore[arg-type, union-attr]
    assert {word for word in command[1:] if word.startswith("-")} <= known


def test_the_documentation_names_every_file() -> None:
    told = (DEPLOY / "README.md").read_text(encoding="utf-8")
    for path in DEPLOY.rglob("*.*"):
        if path.name != "README.md":
            assert path.name in told, path


# It runs


def test_a_daemon_runs_with_this_configuration_and_its_probes_say_so(tmp_path: Path) -> None:
    """As in the pod, but for sizes, folders and ports that may be taken here."""
    socket = tmp_path / "lmcache.sock"
    path = tmp_path / "lmcache.yaml"
    path.write_text(one("ConfigMap")["data"]["lmcache.yaml"])
    changes = {
        "LMCACHE__SOCKET": str(socket),
        "LMCACHE__SERVER__HTTP": "127.0.0.1:0",
        "LMCACHE__SERVER__PAGE": "127.0.0.1:0",
        "LMCACHE__SERVER__SOCKET_GROUP": str(os.getgid()),
        "LMCACHE__SERVER__ALLOWED_UIDS": str(os.getuid()),
        "LMCACHE__TIERS__HOST__CAPACITY": "16MiB",
        "LMCACHE__TIERS__DISK__OPTIONS__PATH": str(tmp_path / "store"),
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE")} | changes
    pod = container(daemon(), "lmcache")
    arguments = [str(path) if word == "/etc/lmcache/lmcache.yaml" else word for word in pod["args"]]
    lmc = [sys.executable, "-m", "lmcache_core.cli"]
    with subprocess.Popen([*lmc, *arguments], stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = Lines(process)
            http = lines.said(r"http ([0-9.:]+)")
            assert socket.stat().st_mode & 0o777 == 0o660
            assert socket.stat().st_gid == os.getgid()
            for name in ("startupProbe", "livenessProbe"):
                word, *rest = pod[name]["exec"]["command"]
                assert word == "lmc"
                asked = [str(socket) if word == "/run/lmcache/lmcache.sock" else word for word in rest]
                subprocess.run([*lmc, *asked], check=True, capture_output=True, timeout=60)
            python, *rest = pod["readinessProbe"]["exec"]["command"]
            assert python == "python"
            asked = [word.replace("127.0.0.1:9464", http).replace("timeout=3", "timeout=30") for word in rest]
            subprocess.run([sys.executable, *asked], check=True, capture_output=True, timeout=60)
            subprocess.run([*lmc, "drain", "--socket", str(socket)], check=True, capture_output=True, timeout=60)
            ready = subprocess.run([sys.executable, *asked], check=False, capture_output=True, timeout=60)
            assert ready.returncode == 1
        finally:
            process.terminate()
            assert process.wait(60) == 0
            lines.close()


class Lines:
    """What a process says on standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []
        self._come = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._come:
                self.lines.append(line)
                self._come.notify_all()

    def said(self, pattern: str, timeout_s: float = 60.0) -> str:
        deadline = time.monotonic() + timeout_s
        with self._come:
            while True:
                for line in self.lines:
                    if found := re.search(pattern, line):
                        return found[1]
                assert self._come.wait(deadline - time.monotonic()), self.lines

    def close(self) -> None:
        self._reader.join()
