"""The Helm chart, with each file of values in its examples: what Kubernetes, its operators and our flags say of it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import redis
import yaml
from support.helm import template
from support.redis_servers import Servers, running_server
from support.servers import ROOT

from ops.serve.config import parse_command
from ops.serve.nodes import with_nodes
from pipeline.log.address import connect, parse_address
from pipeline.names import Names
from stages.generate.setup.config import GenerateConfig

pytestmark = pytest.mark.xdist_group("helm")

CHART = ROOT / "ops" / "kubernetes"
EXAMPLES = sorted(CHART.glob("examples/*.yaml"))
SCHEMAS: Mapping[str, Any] = yaml.safe_load((Path(__file__).parent / "custom_resources.yaml").read_text())
VERSIONS = ("1.30", "1.37")
"""Of Kubernetes: the oldest that the chart takes, and the newest that is known here."""
PROGRAM = "minisgl"
USERS = re.findall(r"^user (\w+) reset on", (ROOT / "ops" / "redis" / "users.acl").read_text(), re.MULTILINE)
IN_THE_CLUSTER = {"metadata.labels['leaderworkerset.sigs.k8s.io/group-index']": "3", "status.podIP": "127.0.0.1"}
"""What Kubernetes knows of a pod; all else that it fills in is a number here."""


@dataclass(frozen=True)
class Rendered:
    """What Helm makes of a file of values."""

    values: Mapping[str, Any]
    resources: list[dict[str, Any]]

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [each for each in self.resources if each["kind"] in kinds]

    def templates(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name of each workload, and the template of its pods."""
        for each in self.of_kind("Deployment", "StatefulSet"):
            yield each["metadata"]["name"], each["spec"]["template"]
        for each in self.of_kind("LeaderWorkerSet"):
            yield each["metadata"]["name"], each["spec"]["leaderWorkerTemplate"]["workerTemplate"]

    def pod(self, name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = dict(self.templates())[f"minisgl-{name}"]["spec"]
        return found

    def ours(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield each container that runs our image, and its pod."""
        for _, each in self.templates():
            for container in each["spec"]["containers"]:
                if "args" in container:
                    yield container, each["spec"]


def rendered_with(*arguments: str | Path) -> list[dict[str, Any]]:
    ended = template(*arguments)
    assert ended.returncode == 0, ended.stderr
    return [each for each in yaml.safe_load_all(ended.stdout) if each]


@pytest.fixture(scope="module", params=EXAMPLES, ids=lambda path: path.stem)
def chart(request: pytest.FixtureRequest) -> Rendered:
    path = request.param
    defaults, values = (yaml.safe_load(file.read_text()) for file in (CHART / "values.yaml", path))
    return Rendered(_merged(defaults, values), rendered_with("--values", path))


def _merged(defaults: Any, values: Any) -> Any:
    if not isinstance(defaults, dict) or not isinstance(values, dict):
        return values
    return defaults | {name: _merged(defaults.get(name), value) for name, value in values.items()}


def environment_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that a container starts with. Each may use those before it, as `$(NAME)`."""
    found: dict[str, str] = {}
    for each in container["env"]:
        if source := each.get("valueFrom"):
            path = source.get("fieldRef", {}).get("fieldPath", "")
            found[each["name"]] = IN_THE_CLUSTER.get(path, "1") if path else "secret"
        else:
            found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], each["value"])
    return found


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    plain = all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
    among = (labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ()))
    return plain and all(among)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_resource(chart: Rendered, version: str) -> None:
    for resource in chart.resources:
        name = f"{resource['apiVersion']} {resource['kind']}"
        if name in SCHEMAS:
            jsonschema.validate(resource["spec"], SCHEMAS[name])
        else:
            kubernetes_validate.validate(resource, version, strict=True)
    for name, each in chart.templates():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**each["metadata"], "name": name}, "spec": each["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_every_container_starts_a_stage_that_finds_redis_as_its_own_user(chart: Rendered, tmp_path: Path) -> None:
    stages = set()
    for container, pod in chart.ours():
        environment = environment_of(container)
        (passwords,) = (volume["secret"]["items"] for volume in pod["volumes"] if volume["name"] == "passwords")
        mounted = tmp_path / container["name"]
        mounted.mkdir()
        for item in passwords:
            (mounted / item["path"]).write_text(item["key"])
            assert item["key"] not in ("sentinel", "replica", "admin")
        environment["MINISGL_REDIS_URL"] = environment["MINISGL_REDIS_URL"].replace("/passwords", str(mounted))
        config: Any = parse_command(container["args"], environment)
        stage = container["args"][1]
        stages.add(stage)
        address = parse_address(config.log.redis_url)
        assert (address.secret.user, address.secret.read()) == (stage, stage)
        assert stage in USERS
        assert pod["enableServiceLinks"] is False  # MINISGL_PORT of a Service would be read as our flag
        assert config.log.namespace == chart.values["namespace"]
        if stage in ("tokenize", "generate", "detokenize"):
            assert config.model.model == chart.values["model"]
        if isinstance(config, GenerateConfig):
            nodes = with_nodes(config).nodes
            assert (config.engine.tp, nodes.nnodes) == (chart.values["engine"]["tp"], chart.values["engine"]["nodes"])
            if nodes.nnodes > 1:
                assert (nodes.node_rank, nodes.group, nodes.rank_address) == (1, "minisgl-3", "127.0.0.1")
    assert stages == {"web", "tokenize", "generate", "detokenize"} | ({"archive"} & _enabled(chart))


def _enabled(chart: Rendered) -> set[str]:
    return {name for name in ("archive", "autoscaling") if chart.values[name]["enabled"]}


def test_what_is_selected_and_mounted_and_named_is_there(chart: Rendered) -> None:
    labels = [each["metadata"]["labels"] for _, each in chart.templates()]
    for each in chart.of_kind("StatefulSet"):  # what Kubernetes adds
        name, pod = each["metadata"]["name"], each["spec"]["template"]["metadata"]["labels"]
        numbers = range(each["spec"]["replicas"])
        labels += [pod | {"statefulset.kubernetes.io/pod-name": f"{name}-{number}"} for number in numbers]
    selectors: list[Mapping[str, Any]] = []
    for each in chart.of_kind("Deployment", "StatefulSet", "PodDisruptionBudget"):
        selectors.append(each["spec"]["selector"])
    for each in chart.of_kind("Service"):
        selectors.append({"matchLabels": each["spec"]["selector"]})
    for each in chart.of_kind("NetworkPolicy"):
        selectors.append(each["spec"]["podSelector"])
        for rule in each["spec"].get("ingress", ()):
            selectors += [source["podSelector"] for source in rule.get("from", ()) if "podSelector" in source]
    assert [each for each in selectors if not any(matches(each, found) for found in labels)] == []
    services = [each["metadata"]["labels"] for each in chart.of_kind("Service")]
    for each in chart.of_kind("ServiceMonitor"):
        assert sum(matches(each["spec"]["selector"], found) for found in services) == 1
    for each in chart.of_kind("ScaledObject"):
        target = each["spec"]["scaleTargetRef"]
        (found,) = (item for item in chart.of_kind(target["kind"]) if item["metadata"]["name"] == target["name"])
        assert found["apiVersion"] == target["apiVersion"] and "replicas" not in found["spec"]

    made = {each["metadata"]["name"] for each in chart.of_kind("Secret", "ConfigMap")}
    given = {
        chart.values["redis"]["secret"],
        chart.values["web"]["keys"]["secret"],
        chart.values["hub"]["secret"],
    }
    for name, each in chart.templates():
        pod = each["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]} | ({"data"} if name.endswith("-redis") else set())
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        named = re.findall(r'"(?:secretName|secretKeyRef": \{"name|configMap": \{"name)": "([^"]+)"', json.dumps(pod))
        assert set(named) <= made | given, name


def test_no_container_is_root_or_writes_to_its_image(chart: Rendered) -> None:
    for _, each in chart.templates():
        pod = each["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]


def test_engines_get_their_gpus_and_none_where_there_are_none(chart: Rendered) -> None:
    (engine,) = chart.pod("generate")["containers"]
    gpus = chart.values["engine"]["gpus"]
    assert engine["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
    assert engine["args"][engine["args"].index("--device") + 1] == ("cuda" if gpus else "cpu")


def test_what_starts_engines_sees_the_requests_that_wait_and_web_serves_without_one(chart: Rendered) -> None:
    (web,) = chart.pod("web")["containers"]
    to_zero = bool({"autoscaling"} & _enabled(chart)) and chart.values["autoscaling"]["min"] == 0
    assert ("--engines-on-demand" in web["args"]) is to_zero
    assert len(chart.of_kind("ScaledObject")) == len({"autoscaling"} & _enabled(chart))
    for scaled in chart.of_kind("ScaledObject"):
        names, asked = Names(chart.values["namespace"]), [each["metadata"] for each in scaled["spec"]["triggers"]]
        if chart.values["redis"]["url"]:
            assert ["minisgl:num_requests_live{" in each["query"] for each in asked] == [True]
        else:
            assert [each["stream"] for each in asked] == [names.submitted, names.tokenized]
            assert {each["username"] for each in asked} == {"scaler"} <= set(USERS)


def test_a_redis_of_the_chart_has_a_password_for_every_user() -> None:
    resources = rendered_with()
    (secret,) = (each for each in resources if each["kind"] == "Secret")
    assert set(secret["data"]) == {*USERS, "replica", "sentinel", "lookup", "admin"}
    assert len(set(secret["data"].values())) == len(secret["data"])


def test_another_namespace_of_keys_does_not_restart_redis_and_is_that_of_the_scaler() -> None:
    auto = ("--set", "autoscaling.enabled=true,redis.secret=passwords")
    before, resources = rendered_with(*auto), rendered_with(*auto, "--set", "namespace=blue")
    for kind in ("ConfigMap", "StatefulSet"):
        assert [each for each in before if each["kind"] == kind] == [each for each in resources if each["kind"] == kind]
    (scaled,) = (each for each in resources if each["kind"] == "ScaledObject")
    assert scaled["spec"]["triggers"][1]["metadata"]["stream"] == Names("blue").tokenized


def test_redis_users_have_the_keys_of_every_namespace_and_no_others(redis_servers: Servers, tmp_path: Path) -> None:
    (config,) = (each for each in rendered_with() if each["kind"] == "ConfigMap")
    lines = config["data"]["users.acl"].splitlines()
    (tmp_path / "users.acl").write_text("\n".join(f"{line} >a" if " on " in line else line for line in lines) + "\n")
    binary, file = redis_servers.binary("embedded"), tmp_path / "users.acl"
    with (
        running_server(binary, tmp_path, "--aclfile", file) as server,
        connect(server.url.replace("unix://", "unix://web:a@")) as client,
    ):
        assert [client.get(Names(name).status("web-0")) for name in ("minisgl", "blue")] == [None, None]
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.get("blue")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("redis.replica=3", "'replica' not allowed"),
        ("redis.replicas=2", "one of 1, 3, 5"),
        ("web.args=--pages", "want array"),
        ("engine.gpus=-1", "/engine/gpus"),
        ("archive.enabled=true", "archive.claim: name the PersistentVolumeClaim"),
        ("redis.url=redis://host:6379/0", "redis.secret: it is empty"),
        ("redis.url=redis://h:6379/0,redis.secret=s,autoscaling.enabled=true", "autoscaling.prometheus: it is empty"),
        ("autoscaling.min=5", "autoscaling.min 5: more than autoscaling.max 4"),
    ],
    ids=lambda text: text.split("=")[0],
)
def test_a_value_that_cannot_work_is_refused_with_its_name(value: str, said: str) -> None:
    ended = template("--set", value)
    assert ended.returncode != 0 and said in ended.stderr, ended.stderr


def test_the_script_of_redis_is_one_that_every_shell_reads() -> None:
    subprocess.run(["dash", "-n", CHART / "files" / "redis.sh"], check=True)
