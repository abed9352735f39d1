"""The deployment kits: pinned, wired to files that are there, and set as the README says."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shim.config import SECTION, ExpectRemote, read_settings

if TYPE_CHECKING:
    from types import ModuleType

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "dashboards" / "deploy" / "compose"
KUBERNETES = ROOT / "dashboards" / "deploy" / "kubernetes"
KIT: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
PROBED = {"otel-collector": "http://otel-collector:13133", "tempo": "http://tempo:3200/ready"}


def transfer_config(arguments: list[str]) -> dict[str, Any]:
    """The JSON of `--kv-transfer-config`."""
    (found,) = [a for a in arguments if a.startswith("--kv-transfer-config=")]
    config: dict[str, Any] = json.loads(found.partition("=")[2])
    return config


def documents(path: Path) -> list[dict[str, Any]]:
    """All documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


def test_the_kit_has_what_was_promised() -> None:
    """Servers, router, and everything to watch them with."""
    promised = {
        "prefill",
        "decode",
        "router",
        "prometheus",
        "alertmanager",
        "grafana",
        "otel-collector",
        "tempo",
    }
    assert promised <= set(KIT["services"])


@pytest.mark.parametrize("name", KIT["services"])
def test_a_service_is_pinned_and_watched(name: str) -> None:
    """An exact tag, a health check of its own or by the probe, a restart policy."""
    service = KIT["services"][name]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
    assert service["restart"] == "unless-stopped"
    if name in PROBED:
        assert PROBED[name] in service_check("probe")
    else:
        assert service["healthcheck"]["test"]


def service_check(name: str) -> str:
    """A health check's command."""
    return " ".join(KIT["services"][name]["healthcheck"]["test"])


def test_mounted_files_and_named_things_are_there() -> None:
    """Binds exist, volumes are declared, dependencies are services with a check where health is waited for."""
    services = KIT["services"]
    for name, service in services.items():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert (COMPOSE / source).exists() if source.startswith(".") else source in KIT["volumes"], (
                name,
                mount,
            )
        needs = service.get("depends_on", {})
        for other in needs:
            assert other in services
            if isinstance(needs, dict) and needs[other]["condition"] == "service_healthy":
                assert "healthcheck" in services[other]
        if "build" in service:
            assert (COMPOSE / service["build"]["context"] / "Dockerfile").is_file()
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize(("name", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
@pytest.mark.parametrize("kit", ["compose", "kubernetes"])
def test_servers_run_the_shim_and_expect_what_they_should(kit: str, name: str, role: str) -> None:
    """`always` on decode, `never` on prefill; the settings are ones that the shim takes."""
    if kit == "compose":
        arguments = KIT["services"][name]["command"]
    else:
        pods = {d["metadata"]["name"]: d for d in documents(KUBERNETES / "example" / "servers.yaml")}
        arguments = pods[f"vllm-{name}"]["spec"]["template"]["spec"]["containers"][0]["args"]
    config = transfer_config(arguments)
    assert config["kv_connector"] == SECTION
    assert config["kv_role"] == role
    settings = read_settings(config["kv_connector_extra_config"])
    wanted = ExpectRemote.ALWAYS if name == "decode" else ExpectRemote.NEVER
    assert settings.expect_remote == wanted
    assert settings.expectation("kv_both") is wanted


def test_compose_gives_each_server_its_role() -> None:
    """The relabelling, worked through by hand."""
    config = documents(COMPOSE / "prometheus" / "prometheus.yml")[0]
    (job,) = [job for job in config["scrape_configs"] if job["job_name"] == "vllm"]
    (rule,) = [rule for rule in job["relabel_configs"] if rule["target_label"] == "role"]
    roles = {
        target: re.sub(f"^(?:{rule['regex']})$", rule["replacement"].replace("$", "\\"), target)
        for item in job["static_configs"]
        for target in item["targets"]
    }
    assert roles == {"prefill:8000": "prefill", "decode:8000": "decode"}
    mounted = [m.split(":") for m in KIT["services"]["prometheus"]["volumes"]]
    assert "/etc/prometheus/rules/alerts.yaml" in {m[1] for m in mounted}
    assert config["rule_files"] == ["/etc/prometheus/rules/*.yaml"]


def test_kubernetes_gives_each_server_its_role() -> None:
    """One PodMonitor a role, and each attaches it."""
    found = {}
    for monitor in documents(KUBERNETES / "podmonitors.yaml"):
        assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        (role,) = [r["replacement"] for r in endpoint["relabelings"] if r.get("targetLabel") == "role"]
        found[monitor["spec"]["selector"]["matchLabels"]["llm-d.ai/role"]] = role
    assert found == {"prefill": "prefill", "decode": "decode", "both": "both"}


@pytest.mark.parametrize("folder", [KUBERNETES, KUBERNETES / "example"])
def test_kustomize_finds_its_resources(folder: Path) -> None:
    """Files lie inside the base, folders are bases themselves: what kustomize's load rule wants."""
    for name in documents(folder / "kustomization.yaml")[0]["resources"]:
        path = (folder / name).resolve()
        if path.is_dir():
            assert (path / "kustomization.yaml").is_file()
        else:
            assert path.is_file()
            assert path.is_relative_to(folder)


def test_the_prometheus_rule_is_one() -> None:
    """The operator's shape: kind, groups with names, each rule either records or alerts."""
    (rule,) = documents(ROOT / "dashboards" / "generated" / "alerts.prometheusrule.yaml")
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    for group in rule["spec"]["groups"]:
        assert group["name"]
        for item in group["rules"]:
            assert ("record" in item) != ("alert" in item)
            assert set(item) <= {"record", "alert", "expr", "for", "labels", "annotations"}


def test_alertmanager_routes_every_severity() -> None:
    """Receivers exist; warnings take the default."""
    config = documents(COMPOSE / "alertmanager" / "alertmanager.yml")[0]
    names = {receiver["name"] for receiver in config["receivers"]}
    routes = {m: r["receiver"] for r in config["route"]["routes"] for m in r["matchers"]}
    assert set(routes) == {'severity="critical"', 'severity="ticket"'}
    assert {*routes.values(), config["route"]["receiver"]} == names


def test_grafana_is_given_data_sources_and_dashboards() -> None:
    """The types that the variables ask for, and the folder where the dashboards are mounted."""
    provisioning = COMPOSE / "grafana" / "provisioning"
    sources = documents(provisioning / "datasources" / "datasources.yaml")[0]["datasources"]
    assert {"prometheus", "tempo"} <= {source["type"] for source in sources}
    path = documents(provisioning / "dashboards" / "dashboards.yaml")[0]["providers"][0]["options"]["path"]
    targets = [mount.split(":")[1] for mount in KIT["services"]["grafana"]["volumes"]]
    mounted = {Path(target).name for target in targets if target.startswith(path)}
    assert mounted == {p.name for p in (ROOT / "dashboards" / "generated").glob("*.json")}


@pytest.mark.parametrize("path", ["otel/collector.yaml", "tempo/tempo.yaml"])
def test_traces_go_from_servers_to_tempo(path: str) -> None:
    """Ports fit together: servers → collector → Tempo."""
    config = documents(COMPOSE / path)[0]
    if path.startswith("otel"):
        assert config["exporters"]["otlp/tempo"]["endpoint"] == "tempo:4317"
        pipeline = config["service"]["pipelines"]["traces"]
        assert set(pipeline["receivers"]) <= set(config["receivers"])
        assert set(pipeline["processors"]) <= set(config["processors"])
        assert set(pipeline["exporters"]) <= set(config["exporters"])
        for name in ("prefill", "decode"):
            environment = KIT["services"][name]["environment"]
            assert environment["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "http://otel-collector:4317"
    else:
        assert config["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(":4317")
        assert config["server"]["http_listen_port"] == 3200


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool not found; apt-get install prometheus")
def test_promtool_accepts_the_kits_configuration() -> None:
    """As Prometheus itself would read it."""
    command = ["promtool", "check", "config", "--syntax-only", COMPOSE / "prometheus" / "prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    shutil.which("amtool") is None, reason="amtool not found; apt-get install prometheus-alertmanager"
)
def test_amtool_accepts_the_kits_configuration() -> None:
    """As Alertmanager itself would read it."""
    command = ["amtool", "check-config", COMPOSE / "alertmanager" / "alertmanager.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def router() -> ModuleType:
    """The kit's router as a module."""
    pytest.importorskip("fastapi")
    spec = importlib.util.spec_from_file_location("kit_router", COMPOSE / "router" / "router.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def route(
    router: ModuleType, body: Any, prefill_answers: Any
) -> tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]:
    """One request through the router; its answer, and what prefill and decode were sent."""
    import asyncio

    import httpx

    to_prefill: list[dict[str, Any]] = []
    to_decode: list[dict[str, Any]] = []

    def prefill(request: httpx.Request) -> httpx.Response:
        to_prefill.append(json.loads(request.content))
        if isinstance(prefill_answers, Exception):
            raise prefill_answers
        return httpx.Response(200, json=prefill_answers)

    def decode(request: httpx.Request) -> httpx.Response:
        to_decode.append({**json.loads(request.content), "traceparent": request.headers.get("traceparent")})
        return httpx.Response(200, json={"text": "answer"})

    async def ask() -> httpx.Response:
        clients = [
            httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://server")
            for handler in (prefill, decode)
        ]
        app = router.make_app(*clients)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            return await client.post("/v1/completions", content=body, headers={"traceparent": "00-a-b-01"})

    return asyncio.run(ask()), to_prefill, to_decode


def test_the_router_hands_prefills_params_to_decode(router: ModuleType) -> None:
    """Prefill gets one token to make, unstreamed; decode gets the whole request, the hand-off and the trace."""
    handoff = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
    body = json.dumps({"prompt": "hi", "max_tokens": 9, "stream": True, "n": 2, "stream_options": {}})
    answer, to_prefill, to_decode = route(router, body, {"kv_transfer_params": handoff})
    assert answer.json() == {"text": "answer"}
    (first,) = to_prefill
    assert (first["max_tokens"], first["stream"], first["n"]) == (1, False, 1)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    (second,) = to_decode
    assert (second["max_tokens"], second["stream"], second["n"]) == (9, True, 2)
    assert second["kv_transfer_params"] == handoff
    assert second["traceparent"] == "00-a-b-01"


@pytest.mark.parametrize(
    "answers", [{"kv_transfer_params": None}, {}, OSError("gone")], ids=["null", "none", "down"]
)
def test_the_router_goes_on_without_a_hand_off_and_says_that_it_tried(router: ModuleType, answers: Any) -> None:
    """Decode gets the key with null: its shim can tell that from a request that was never to be split."""
    if isinstance(answers, OSError):
        httpx = pytest.importorskip("httpx")
        answers = httpx.ConnectError("gone")
    answer, _, to_decode = route(router, json.dumps({"prompt": "hi"}), answers)
    assert answer.status_code == 200
    assert to_decode[0]["kv_transfer_params"] is None


@pytest.mark.parametrize("body", ["", "[1]", "{", "null"])
def test_the_router_refuses_what_is_no_request(router: ModuleType, body: str) -> None:
    """With 400, before anybody is asked."""
    answer, to_prefill, to_decode = route(router, body, {})
    assert answer.status_code == 400
    assert to_prefill == to_decode == []
