"""A real Prometheus, fed by pages that expose the whole catalogue and the stock series that are read."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

pytest.importorskip("yaml")

from dashboards import check, fake, local  # the repository's folder has to be on the path first  # noqa: E402  # the repository's folder has to be on the path first

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORT = {**check.VARIABLES, "__rate_interval": "20s", "__range": "60s"}
INFO = {
    "decode": ("0.1.0", "0.32.0", "NixlConnector", "kv_consumer", "recompute", "always", "active"),
    "prefill": ("0.1.0", "0.32.0", "NixlConnector", "kv_producer", "recompute", "never", "active"),
}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Scrapes a decode and a prefill server on which everything that is counted grows."""
    if shutil.which("prometheus") is None:
        if os.environ.get("CI"):
            pytest.fail("prometheus not found; apt-get install prometheus")
        pytest.skip("prometheus not found; apt-get install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    now = time.time()
    servers = {role: fake.Exporter(INFO[role], engines=("0", "1"), started=now - 3600) for role in INFO}
    for server in servers.values():
        server.gauges |= {
            ("oldest_load_start_timestamp_seconds", ()): now - 300,
            ("oldest_handoff_start_timestamp_seconds", ()): now - 300,
            ("peers", ("open",)): 1.0,
        }
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.5):
            for server in servers.values():
                server.advance(0.5, fake.everything())

    clock = threading.Thread(target=run)
    clock.start()
    pages = fake.serve(servers)
    address = f"127.0.0.1:{pages.server_address[1]}"
    scrapes = [
        {
            "job_name": f"vllm-{role}",
            "metrics_path": f"/{role}",
            "static_configs": [
                {"targets": [address], "labels": {"role": role, "cluster": "here", "namespace": "test"}}
            ],
        }
        for role in servers
    ]
    try:
        with local.prometheus(folder, scrapes=scrapes, rules=check.GENERATED / "alerts.yaml") as url:
            _wait_for(url, 'kv_shim:fault_ratio{window="5m"}', 60)
            yield url
    finally:
        over.set()
        clock.join()
        pages.shutdown()
        pages.server_close()


def _wait_for(url: str, query: str, patience: float) -> None:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if check.ask(url, "query", query=query)["result"]:
            return
        time.sleep(0.5)
    pytest.fail(f"nothing answers {query}")


def test_every_expression_is_accepted_and_has_data(prometheus: str) -> None:
    """All panels, variables, annotations and rules, on a fleet where everything happens."""
    found = check.everything()
    assert len(found) > 100
    assert [str(problem) for problem in check.check(prometheus, found, variables=SHORT)] == []


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("sum(rate(vllm:kv_shim_requests_total[)", "refused by Prometheus"),
        ("sum(rate(vllm:kv_shim_request_total[5m]))", "nothing exports vllm:kv_shim_request_total"),
        ('sum(vllm:kv_shim_requests_total{outcome="gone"})', "no data"),
        ("sum by (pear) (vllm:kv_shim_requests_total)", "no series has the label pear"),
        ('sum(vllm:kv_shim_requests_total{reson=~"none|"})', "no series has the label reson"),
    ],
)
def test_the_checker_sees_what_is_wrong(prometheus: str, expr: str, complaint: str) -> None:
    """A mistake of each kind is reported."""
    problems = check.check(prometheus, [check.Expression("here", expr, must_answer=True)], variables=SHORT)
    assert any(complaint in problem.what for problem in problems), problems


def test_series_of_others_may_be_absent(prometheus: str) -> None:
    """llm-d's counter is no problem where there is no llm-d."""
    router = check.Expression("router", "sum(rate(llm_d_epp_disagg_decision_total[5m]))", must_answer=True)
    assert check.check(prometheus, [router]) == []


def test_annotations_of_alerts_are_filled_in(prometheus: str) -> None:
    """Templates of the alerts that are active here render without an error or a hole."""
    end = time.monotonic() + 30
    active: list[dict[str, Any]] = []
    while len({item["labels"]["alertname"] for item in active}) < 8 and time.monotonic() < end:
        active = check.ask(prometheus, "alerts")["alerts"]
        time.sleep(0.5)
    assert len({item["labels"]["alertname"] for item in active}) >= 8, active
    for item in active:
        for text in item["annotations"].values():
            assert "{{" not in text
            assert "<error" not in text
            assert "no value" not in text
            assert not re.search(r"\(\)|  ", text), text


def test_the_fake_pages_hold_every_stock_series_that_is_read() -> None:
    """Otherwise the checks above would prove less than they seem to."""
    page = fake.page(fake.Exporter(INFO["decode"]))
    exposed = {line.split("{")[0] for line in page.splitlines()}
    read = {name for e in check.everything() for name, _ in check.selectors(check.filled(e.text))}
    assert {name for name in read if name.startswith("vllm:")} <= exposed


def test_stock_series_are_vllms_own() -> None:
    """Names and labels as vLLM's source declares them; of the two versions in CI, 0.28.0 lacks one series."""
    metrics = pytest.importorskip("vllm.v1.metrics.loggers")
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import stats

    source = Path(metrics.__file__).read_text() + Path(stats.__file__).read_text()
    missing = {family.name for family in fake.STOCK if f'"{family.name}"' not in source}
    assert missing <= {"vllm:nixl_num_notifications_after_expiry"}
    for label in ("source", "finished_reason"):
        assert json.dumps(label) in source
