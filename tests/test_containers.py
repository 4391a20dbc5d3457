"""Dockerfile, compose files and Kubernetes manifests, checked without a container engine. `deploy/check_dockerfile.py` runs the CPU target."""

from __future__ import annotations

import http.server
import itertools
import json
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from backend.config import ParallelConfig
from backend.speculative_config import SpeculativeConfig
from client.gateway.aliases import FAMILIES
from deploy import health
from deploy.check_dockerfile import copy_context, parse_dockerfile, read_dockerignore
from deploy.cli import make_parser
from deploy.options import ServeConfig, read_command
from tests.conftest import ROOT

COMPOSE = sorted((ROOT / "deploy").glob("compose*.yaml"))
OVERLAYS = ("gpu", "tensor-parallel", "two-hosts-gpu", "disaggregated", "inference-gateway")
MANIFESTS = sorted(p for p in (ROOT / "deploy/k8s/base").glob("*.yaml") if p.name != "kustomization.yaml")
OVERLAID = sorted(p for p in (ROOT / "deploy/k8s/disaggregated").glob("*.yaml") if p.name != "kustomization.yaml")
VERSIONS = ("1.28", kubernetes_validate.latest_version())
"""Of Kubernetes: the oldest that docs/operations.md names, and the newest whose schemas are at hand."""
RANKS = sorted(p for p in (ROOT / "deploy/k8s/two-hosts").glob("*.yaml") if p.name != "kustomization.yaml")
STAGES = parse_dockerfile((ROOT / "Dockerfile").read_text())
TOOLS = Path(sys.executable).parent


def run(*command: str) -> str:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def check_command(words: list[str]) -> None:
    """Fails (SystemExit) for options that `foretoken` does not have."""
    make_parser().parse_args(words)


class TestDockerfile:
    def test_hadolint(self):
        run(str(TOOLS / "hadolint"), "--failure-threshold=style", "Dockerfile")

    def test_hadolint_can_fail(self, tmp_path):
        (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && apt-get install x\n")
        with pytest.raises(AssertionError, match="DL3006"):
            run(str(TOOLS / "hadolint"), str(tmp_path / "Dockerfile"))

    @pytest.mark.parametrize("target", ["gpu", "cpu"])
    def test_targets(self, target):
        """Both end as a user of no rights, healthy by the supervisor's word, as `foretoken serve`."""
        stage = STAGES[target]
        assert stage.last("USER") == "10001:10001"
        assert json.loads(stage.last("ENTRYPOINT")) + json.loads(stage.last("CMD")) == ["foretoken", "serve", "--host", "0.0.0.0"]
        words = json.loads(re.sub(r"^(--\S+\s+)*CMD ", "", stage.last("HEALTHCHECK")))
        assert words == ["python", "-m", "deploy.health", "8003", "8080"], "a server's, and the gateway's that --port or the command starts"
        users = [i for i, (keyword, _) in enumerate(stage.instructions) if keyword == "USER"]
        assert not any(keyword in ("RUN", "COPY") for keyword, _ in stage.instructions[users[0] :])

    def test_the_servers_are_nvidias_and_the_wheels(self):
        assert STAGES["cpu"].source == STAGES["cpu-build"].source, "what is compiled in one image runs in the other"
        assert STAGES["gpu"].source.startswith("nvcr.io/nvidia/tritonserver:")
        assert STAGES["cpu"].source.startswith("python:3.11")

    def test_the_context_has_what_is_installed_and_no_more(self, tmp_path):
        names, patterns = read_dockerignore((ROOT / ".dockerignore").read_text())
        packages = re.findall(r'"(\w+)\*"', (ROOT / "pyproject.toml").read_text())
        assert "backend" in packages and {*packages} | {"model_repository", "pyproject.toml", "constraints.txt", "README.md"} <= set(names)
        assert not {"tests", ".venv", ".git", "docs"} & set(names)
        copy_context(tmp_path)
        assert (tmp_path / "deploy/setup.sh").exists() and (tmp_path / "model_repository/standalone/decode/1/model.safetensors").exists()
        assert not any(tmp_path.rglob("__pycache__")) and "__pycache__" in patterns


class TestCompose:
    def test_schema(self):
        run(str(TOOLS / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *map(str, COMPOSE))

    def test_schema_can_fail(self, tmp_path):
        (tmp_path / "compose.yaml").write_text("services: {server: {imagine: x}}")
        with pytest.raises(AssertionError, match="imagine"):
            run(str(TOOLS / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(tmp_path / "compose.yaml"))

    @pytest.fixture(scope="class")
    def services(self):
        return yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]

    def test_references_are_of_things_that_exist(self, services):
        document = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
        for name, service in services.items():
            assert set(service.get("depends_on", [])) <= set(services), name
            for volume in service.get("volumes", []):
                source = volume.partition(":")[0]
                assert (ROOT / "deploy" / source).exists() if source.startswith(".") else source in document["volumes"], volume
            if "build" in service:
                assert service["build"]["target"] in STAGES and (ROOT / "deploy" / service["build"]["context"] / "Dockerfile").exists()
            for other, how in service.get("depends_on", {}).items() if isinstance(service.get("depends_on"), dict) else ():
                assert how["condition"] != "service_healthy" or "healthcheck" in services[other] or services[other]["image"].startswith("foretoken")
        gpu = yaml.safe_load((ROOT / "deploy/compose.gpu.yaml").read_text())["services"]
        assert set(gpu) <= set(services) and gpu["server"]["build"]["target"] in STAGES

    def test_nothing_is_reached_from_outside_or_runs_with_rights(self, services):
        for name, service in services.items():
            assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
            assert service["cap_drop"] == ["ALL"] and service["read_only"] is True, name

    def test_servers_have_shared_memory(self, services):
        assert services["server"]["shm_size"] == services["prefill"]["shm_size"] == "1gb"

    def test_nothing_is_named_that_is_not_there(self, services):
        assert {name for name, service in services.items() if service.get("profiles") == ["disaggregated"]} == {"prefill", "redis"}
        repositories = {p.name for p in (ROOT / "model_repository").iterdir() if p.is_dir()}
        named = set(re.findall(r"model_repository/(\w+)", (ROOT / "deploy/compose.yaml").read_text()))
        assert named <= repositories

    def test_health_is_asked_for_without_a_proxy(self, services, monkeypatch):
        assert services["gateway"]["healthcheck"]["test"] == ["CMD", "python", "-m", "deploy.health", "8080"]

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if self.path == "/health" and is_well else 503)
                self.end_headers()

            def log_message(self, *args):
                pass

        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            for is_well in (True, False):
                command = [sys.executable, "-m", "deploy.health", str(server.server_port)]
                assert subprocess.run(command, cwd=ROOT, timeout=30).returncode == (0 if is_well else 1)
            server.shutdown()
        assert subprocess.run(command, cwd=ROOT, timeout=30).returncode == 1, "nobody is there"

    def test_health_is_that_of_whoever_listens(self, monkeypatch):
        """The image runs a server, a gateway, or both on one port: the ports that nobody has are not held against it."""
        answers: dict[int, int | None] = {}
        monkeypatch.setattr(health, "status_of", answers.get)
        for server, gateway in itertools.product((200, 503, 0, None), repeat=2):
            answers.update({8003: server, 8080: gateway})
            is_well = {server, gateway} in ({200}, {200, None})
            assert health.is_healthy([8003, 8080]) is is_well, answers

    def test_commands_are_the_programs_own(self, services):
        command = services["server"]["command"]
        assert command.count("${ROLE:-mixed}") == 1
        for role in ("mixed", "decode"):
            check_command([role if word == "${ROLE:-mixed}" else word for word in command])
        check_command(services["prefill"]["command"])

    @pytest.mark.parametrize("count", ["1", "4"])
    @pytest.mark.parametrize("name", ["server", "prefill"])
    def test_every_rank_has_a_gpu(self, name, count):
        """As many as GPUS says, one without it, for each of both, and more shared memory than on CPU."""
        text = (ROOT / "deploy/compose.gpu.yaml").read_text()
        assert text.count("${GPUS:-1}") == 4 and len(re.findall(r"\bGPUS\b", text)) == 5
        services = yaml.safe_load(text.replace("${GPUS:-1}", count))["services"]
        own, command = services[name], services[name]["command"]
        (device,) = own["deploy"]["resources"]["reservations"]["devices"]
        found = int(count) if name == "server" else "all"
        assert device == {"driver": "nvidia", "count": found, "capabilities": ["gpu"]} and own["shm_size"] == "4gb"
        assert command[command.index("--tensor-parallel-size") + 1] == count
        if name == "prefill":
            assert command[command.index("--device") + 1] == f"cuda:{count}", "the first ones are the server's"
        check_command(["decode" if word == "${ROLE:-mixed}" else word for word in command])

    def test_the_overlay_keeps_what_the_commands_say(self, services):
        """Compose puts an overlay's command in the place of the other."""
        gpu = yaml.safe_load((ROOT / "deploy/compose.gpu.yaml").read_text())["services"]
        for name in ("server", "prefill"):
            own = services[name]["command"]
            assert gpu[name]["command"][: len(own)] == own

    def test_variables_are_put_in_by_every_compose(self):
        """Older ones ended a default at its first brace: what was given instead had the second one behind it."""
        texts = [path.read_text() for path in COMPOSE]
        assert [d for text in texts for d in re.findall(r"\$\{\w+:?-([^}]*)\}", text) if "{" in d] == []
        (name, value), *others = (line.split("=", 1) for line in (ROOT / "deploy/.env").read_text().splitlines() if not line.startswith("#"))
        assert SpeculativeConfig.from_dict(json.loads(value.strip("'"))).method == "ngram"
        assert not others and any(f"${{{name}:?" in text for text in texts)

    def test_prometheus_scrapes_the_services(self, services):
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        targets = [t for job in config["scrape_configs"] for static in job["static_configs"] for t in static["targets"]]
        assert {t.partition(":")[0] for t in targets} == {"server", "gateway"} <= set(services)
        found = [(name, own["port"]) for job in config["scrape_configs"] for own in job.get("dns_sd_configs", []) for name in own["names"]]
        assert found == [("prefill", 8002), ("prefill", 8003)] and "prefill" in services

    def test_grafana_finds_dashboard_and_data(self, services):
        mounts = dict(volume.split(":")[1::-1] for volume in services["grafana"]["volumes"])
        provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/foretoken.yml").read_text())["providers"][0]
        assert (ROOT / "deploy" / mounts[provider["options"]["path"]] / "foretoken.json").exists()
        source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
        assert source["url"] == "http://prometheus:9090" and "prometheus" in services


NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def strict(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required), "additionalProperties": False}


POOL = strict(
    {
        "selector": strict({"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1}}),
        "targetPorts": {"type": "array", "items": strict({"number": PORT}), "minItems": 1, "maxItems": 8},
        "endpointPickerRef": strict(
            {"name": NAME, "port": strict({"number": PORT})}, group={"type": "string"}, kind=NAME, failureMode={"enum": ["FailOpen", "FailClose"]}
        ),
    },
    appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
)
"""The specification of an InferencePool, v1, as its definition has it; of an HTTPRoute, what is used."""
ROUTE = strict(
    {
        "parentRefs": {"type": "array", "items": strict({"name": NAME})},
        "rules": {
            "type": "array",
            "items": strict(
                {
                    "matches": {"type": "array", "items": strict({"path": strict({"type": {"enum": ["PathPrefix"]}, "value": {"type": "string"}})})},
                    "backendRefs": {"type": "array", "items": strict({"group": {"type": "string"}, "kind": {"type": "string"}, "name": NAME})},
                    "timeouts": strict({"request": {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}}),
                }
            ),
        },
    }
)
CUSTOM = {("inference.networking.k8s.io/v1", "InferencePool"): POOL, ("gateway.networking.k8s.io/v1", "HTTPRoute"): ROUTE}


def read_documents(path: Path) -> list[dict]:
    return list(yaml.safe_load_all(path.read_text()))


def check_document(document: dict) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def build(folder: Path) -> dict[tuple[str, str], dict]:
    """The objects of an overlay, but for images. JSON patches apply to paths that exist, as `kubectl kustomize` demands."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    objects: dict[tuple[str, str], dict] = {}
    for path in ((folder / name).resolve() for name in kustomization["resources"]):
        # Values that a file's anchors share are each object's own.
        own = build(path) if path.is_dir() else {(d["kind"], d["metadata"]["name"]): json.loads(json.dumps(d)) for d in read_documents(path)}
        assert not objects.keys() & own.keys()
        objects |= own
    for patch in kustomization.get("patches", ()):
        document = objects[patch["target"]["kind"], patch["target"]["name"]]
        for operation in yaml.safe_load(patch["patch"]):
            *parents, last = [p.replace("~1", "/") for p in operation["path"].split("/")[1:]]
            place = document
            for part in parents:
                place = place[int(part)] if isinstance(place, list) else place[part]
            assert operation["op"] == "add" or last in place
            if last == "-":
                place.append(operation["value"])
            else:
                place[last] = operation["value"]
    return objects


class TestKubernetes:
    @pytest.fixture(scope="class")
    def objects(self):
        return {(d["kind"], d["metadata"]["name"]): d for path in MANIFESTS for d in read_documents(path)}

    @pytest.mark.parametrize(
        "path", [*MANIFESTS, *OVERLAID, *RANKS, ROOT / "deploy/k8s/inference-gateway/endpoint-picker.yaml"], ids=lambda p: f"{p.parent.name}/{p.name}"
    )
    def test_schema(self, path):
        for document in read_documents(path):
            check_document(document)

    def test_schema_can_fail(self, objects):
        wrong = {**objects["PodDisruptionBudget", "foretoken"], "spec": {"maxAvailable": 1}}
        with pytest.raises(kubernetes_validate.ValidationError, match="maxAvailable"):
            check_document(wrong)
        assert f"Kubernetes {VERSIONS[0]}" in (ROOT / "docs/operations.md").read_text()

    def test_kustomizations_name_every_file(self):
        base = yaml.safe_load((ROOT / "deploy/k8s/base/kustomization.yaml").read_text())
        assert sorted(base["resources"]) == [p.name for p in MANIFESTS]
        for name in OVERLAYS:
            folder = ROOT / "deploy/k8s" / name
            first, *others = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
            assert (folder / first / "kustomization.yaml").exists()
            assert sorted(others) == sorted(p.name for p in folder.glob("*.yaml") if p.name != "kustomization.yaml")

    def test_everything_selects_the_pods(self, objects):
        pods = objects["Deployment", "foretoken"]["spec"]["template"]["metadata"]["labels"]
        assert objects["Deployment", "foretoken"]["spec"]["selector"]["matchLabels"] == pods
        assert objects["PodDisruptionBudget", "foretoken"]["spec"]["selector"]["matchLabels"] == pods
        assert all(d["spec"]["selector"] == pods for (kind, _), d in objects.items() if kind == "Service")
        scaled = objects["HorizontalPodAutoscaler", "foretoken"]["spec"]["scaleTargetRef"]
        assert (scaled["kind"], scaled["name"]) in objects

    def test_ports_and_probes_fit(self, objects):
        containers = {c["name"]: c for c in objects["Deployment", "foretoken"]["spec"]["template"]["spec"]["containers"]}
        ports = {p["name"]: p["containerPort"] for c in containers.values() for p in c["ports"]}
        assert ports == {"http": 8000, "grpc": 8001, "metrics": 8002, "status": 8003, "openai": 8080}
        for kind, document in objects.items():
            if kind[0] == "Service":
                assert all(p["targetPort"] in ports for p in document["spec"]["ports"])
        for container in containers.values():
            own = {p["name"] for p in container["ports"]}
            probes = [container[p] for p in ("startupProbe", "livenessProbe", "readinessProbe") if p in container]
            assert len(probes) >= 2 and all((p.get("httpGet") or p["tcpSocket"])["port"] in own for p in probes)

    def test_pods_have_no_rights_and_shared_memory(self, objects):
        spec = objects["Deployment", "foretoken"]["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and str(spec["securityContext"]["runAsUser"]) in STAGES["cpu"].last("USER")
        volumes = {v["name"]: v for v in spec["volumes"]}
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] and not container["securityContext"]["allowPrivilegeEscalation"]
            assert {m["name"] for m in container["volumeMounts"]} <= set(volumes)
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
        check_command(spec["containers"][0]["args"])

    def test_what_an_inference_gateway_needs(self, objects):
        """The pool is of these pods and their gateways' port; the picker is there, may read what it watches, and finds its metrics."""
        folder = ROOT / "deploy/k8s/inference-gateway"
        own = {
            (d["kind"], d["metadata"]["name"]): d for name in ("inference-pool", "endpoint-picker") for d in read_documents(folder / f"{name}.yaml")
        }
        for document in own.values():
            if (schema := CUSTOM.get((document["apiVersion"], document["kind"]))) is not None:
                jsonschema.validate(document["spec"], schema)
                assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
        pool, template = own["InferencePool", "foretoken"]["spec"], objects["Deployment", "foretoken"]["spec"]["template"]
        assert pool["selector"]["matchLabels"] == template["metadata"]["labels"]
        gateway = template["spec"]["containers"][1]
        assert pool["targetPorts"] == [{"number": p["containerPort"]} for p in gateway["ports"] if p["name"] == "openai"]
        name = pool["endpointPickerRef"]["name"]
        (port,) = own["Service", name]["spec"]["ports"]
        assert port["port"] == pool["endpointPickerRef"]["port"]["number"]
        (backend,) = own["HTTPRoute", "foretoken"]["spec"]["rules"][0]["backendRefs"]
        assert (backend["kind"], backend["name"]) in own
        picker = own["Deployment", name]["spec"]["template"]
        assert own["Service", name]["spec"]["selector"] == picker["metadata"]["labels"] != pool["selector"]["matchLabels"]
        (container,) = picker["spec"]["containers"]
        assert port["targetPort"] in {p["name"] for p in container["ports"]} and picker["spec"]["serviceAccountName"] == name
        told = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
        assert told["pool-name"] == own["InferencePool", "foretoken"]["metadata"]["name"]
        config = yaml.safe_load(own["ConfigMap", name]["data"][told["config-file"].removeprefix("/config/")])
        kinds = {plugin["type"] for plugin in config["plugins"]}
        assert config["kind"] == "EndpointPickerConfig" and {p["pluginRef"] for p in config["schedulingProfiles"][0]["plugins"]} == kinds
        assert {"num_requests_waiting", "num_requests_running"} <= set(FAMILIES.values()), "the model server protocol's names, in vLLM's words"

    def test_autoscalers_and_their_adapter_name_the_same_metrics(self, objects):
        scalers = [d for d in (*objects.values(), *(d for path in OVERLAID for d in read_documents(path))) if d["kind"] == "HorizontalPodAutoscaler"]
        metrics = {d["metadata"]["name"]: d["spec"]["metrics"][0]["pods"]["metric"]["name"] for d in scalers}
        assert metrics == {"foretoken": "foretoken_requests_waiting", "foretoken-prefill": "foretoken_pd_prefill_tokens"}
        assert all(d["spec"]["scaleTargetRef"]["name"] == d["metadata"]["name"] for d in scalers)
        rules = yaml.safe_load((ROOT / "deploy/k8s/prometheus-adapter.yaml").read_text())["rules"]["custom"]
        assert [rule["name"]["as"] for rule in rules] == list(metrics.values())
        assert all(rule["seriesQuery"].startswith(rule["name"]["as"] + "{") for rule in rules)
        explained = (ROOT / "docs/metrics.md").read_text()
        assert all(f"`{metric}`" in explained for metric in metrics.values())

    def test_two_hosts_find_each_other(self, objects):
        """By the headless service's names, before they are ready; clients come to the first one."""
        assert sorted(yaml.safe_load((RANKS[0].parent / "kustomization.yaml").read_text())["resources"]) == [p.name for p in RANKS]
        own = {(d["kind"], d["metadata"]["name"]): d["spec"] for path in RANKS for d in read_documents(path)}
        pods, headless, clients = own["StatefulSet", "foretoken-ranks"], own["Service", "foretoken-ranks"], own["Service", "foretoken-ranks-grpc"]
        spec, base = pods["template"]["spec"], objects["Deployment", "foretoken"]["spec"]["template"]["spec"]
        (container,), decode = spec["containers"], base["containers"][0]
        for rank in range(pods["replicas"]):
            args = read_command(make_parser().parse_args([a.replace("$(NODE_RANK)", str(rank)) for a in container["args"]]))
            config = ParallelConfig.from_dict(args.values["parallel_config"])
            assert (config.nnodes, config.node_rank) == (pods["replicas"], rank)
        host, port = config.meeting_place
        assert host == f"foretoken-ranks-0.{pods['serviceName']}" and pods["serviceName"] == "foretoken-ranks"
        assert {"name": "master", "containerPort": port} in container["ports"] and headless["ports"][0]["port"] == port
        assert headless["clusterIP"] == "None" and headless["publishNotReadyAddresses"] and pods["podManagementPolicy"] == "Parallel"
        assert pods["updateStrategy"] == {"type": "OnDelete"}, "one by one, a new pod would wait for ever for an old one to compute with it"
        assert headless["selector"] == pods["selector"]["matchLabels"] == pods["template"]["metadata"]["labels"]
        assert clients["selector"] == {"statefulset.kubernetes.io/pod-name": "foretoken-ranks-0"}
        for key in ("startupProbe", "livenessProbe", "readinessProbe", "securityContext", "resources", "volumeMounts"):
            assert container[key] == decode[key], key
        assert spec["volumes"] == base["volumes"] and spec["securityContext"] == base["securityContext"]
        *shell, sleep = container["lifecycle"]["preStop"]["exec"]["command"]
        first, second = (int(run("env", f"NODE_RANK={rank}", *shell, sleep.replace("sleep", "echo"))) for rank in (0, 1))
        drain = ServeConfig().drain_seconds
        assert first + drain < second < second + drain < spec["terminationGracePeriodSeconds"], "the second computes until the first has drained"

    def test_prefill_nodes_are_as_decode_nodes(self, objects):
        """But for their role, and for the gateway and what is published."""
        own = {(d["kind"], d["metadata"]["name"]): d for path in OVERLAID for d in read_documents(path)}
        spec, base = (d["spec"]["template"]["spec"] for d in (own["Deployment", "foretoken-prefill"], objects["Deployment", "foretoken"]))
        (container,), decode = spec["containers"], base["containers"][0]
        check_command(container["args"])
        for key in ("ports", "startupProbe", "livenessProbe", "readinessProbe", "securityContext", "resources", "volumeMounts"):
            assert container[key] == decode[key], key
        assert spec["volumes"] == base["volumes"] and spec["securityContext"] == base["securityContext"]
        (service,) = (d for (kind, _), d in own.items() if kind == "Service")
        redis = own["Deployment", "foretoken-redis"]["spec"]["template"]
        assert service["spec"]["selector"] == redis["metadata"]["labels"]
        assert container["args"][container["args"].index("--scheduler-host") + 1] == service["metadata"]["name"]
        policies = {name: d["spec"] for (kind, name), d in own.items() if kind == "NetworkPolicy"}
        assert set(policies) == {"foretoken-redis", "foretoken-prefill"}
        assert [own["Deployment", name]["spec"]["selector"] for name in policies] == [p["podSelector"] for p in policies.values()]

    @pytest.mark.parametrize("overlay", OVERLAYS)
    def test_built_objects(self, overlay):
        """They are what Kubernetes knows, and their commands what `foretoken` knows."""
        for document in build(ROOT / "deploy/k8s" / overlay).values():
            if (document["apiVersion"], document["kind"]) in CUSTOM:
                continue
            check_document(document)
            pods = document["spec"].get("template", {}).get("spec", {}) if "spec" in document else {}
            for container in pods.get("containers", ()):
                if container["image"] == "foretoken":
                    check_command([a.replace("$(NODE_RANK)", "0") for a in container["args"]])
                assert {mount["name"] for mount in container.get("volumeMounts", ())} <= {volume["name"] for volume in pods.get("volumes", ())}

    @pytest.mark.parametrize(("overlay", "kind"), [("tensor-parallel", "Deployment"), ("two-hosts-gpu", "StatefulSet")])
    def test_every_rank_has_a_gpu(self, overlay, kind):
        """And the pods more shared memory than where there is one rank."""
        (workload,) = (d["spec"] for (own, _), d in build(ROOT / "deploy/k8s" / overlay).items() if own == kind)
        pod, num_pods = workload["template"]["spec"], workload.get("replicas", 1) if kind == "StatefulSet" else 1
        container = pod["containers"][0]
        num_gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        words = [a.replace("$(NODE_RANK)", "0") for a in container["args"]]
        config = ParallelConfig.from_dict(read_command(make_parser().parse_args(words)).values["parallel_config"])
        assert (config.tensor_parallel_size, config.nnodes) == (num_gpus * num_pods, num_pods) and num_gpus > 1
        assert pod["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}}
        assert "--model" in words and {"name": "model", "mountPath": "/model", "readOnly": True} in container["volumeMounts"]

    def test_overlays_are_named(self):
        """Where operations are described."""
        explained = (ROOT / "docs/operations.md").read_text()
        assert all(f"kubectl apply -k deploy/k8s/{p.parent.name}\n" in explained for p in (ROOT / "deploy/k8s").glob("*/kustomization.yaml"))


def test_a_dockerfile_is_read_as_docker_reads_it():
    stages = parse_dockerfile("ARG X=1\nFROM a AS one\n# no\nRUN x && \\\n  y\nFROM b AS two\nCOPY --from=one /p /q\nUSER 1\nUSER 2\n")
    assert stages["one"].instructions == [("RUN", "x && y")] and stages["two"].source == "b"
    assert stages["two"].last("USER") == "2" and shlex.split(stages["two"].instructions[0][1]) == ["--from=one", "/p", "/q"]
