"""Dashboards and alerts on a live pair: a real Prometheus asks, a real Alertmanager is told."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
from alerting import alertmanager, hastened
from chaos import AT_ONCE, kill
from scenarios import SCENARIOS, elsewhere
from servers import LOGS, REQUESTS, ROOT
from traffic import OUTPUT, Traffic, consumer, producer, silent_peer

from dashboards import check, local
from shim.cli.router import KEY, body
from shim.telemetry import catalog
from shim.verdict import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("prometheus", "prometheus-alertmanager"))),
    reason="needs Debian's prometheus and prometheus-alertmanager",
)
SCRAPE = 2
"""Seconds from one scrape to the next."""
TRIES = 4
FACTOR = 60
"""How much faster time runs for the rules: ten minutes are ten seconds."""
KILLED = ("KVShimNothingPulled", "KVShimFaultRatioCritical")
"""What must be told when decode's prefill servers are gone."""
NEVER = {"KVShimErrors", "KVShimStatsDropped", "KVShimSilent", "KVShimMissing", "KVShimUnexplainedLocalPrefill"}
WITHIN = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For Prometheus and Alertmanager."""
    return tmp_path_factory.mktemp("screen")


@pytest.fixture(scope="module")
def pair(bench):
    """A pair, and a second prefill server that the router can turn to."""
    if bench.has_bug:
        pytest.skip("one version's servers fill the screen")
    return bench.pair(producer(bench), consumer(bench), producer(bench, "prefill-2"))


@pytest.fixture(scope="module")
def traffic(pair):
    """Traffic for every reason."""
    return Traffic(pair, plain=pair.prefill.url)


@pytest.fixture(scope="module")
def pager(folder):
    """Whom an Alertmanager tells."""
    with alertmanager(folder) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(pair, folder, pager):
    """A Prometheus that scrapes the servers every two seconds, with the rules in fast motion."""
    servers = {"prefill": (pair.prefill, *pair.others), "decode": (pair.decode,)}
    scrapes = [
        {
            "job_name": f"vllm-{role}",
            "static_configs": [
                {
                    "targets": [server.url.removeprefix("http://") for server in members],
                    "labels": {"role": role, "cluster": "here", "namespace": "tests"},
                }
            ],
        }
        for role, members in servers.items()
    ]
    rules = hastened(check.GENERATED / "alerts.yaml", folder, FACTOR)
    with local.prometheus(
        folder, scrapes=scrapes, rules=rules, alertmanager=pager.address, interval=f"{SCRAPE}s"
    ) as url:
        yield url


@pytest.fixture(scope="module")
def filled(prometheus, traffic, bench):
    """Every reason has happened, and was scraped twice since."""
    sends = [scenario.send for scenario in SCENARIOS if bench.environment.release >= scenario.since]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda send: send(traffic), sends))
    time.sleep(2 * SCRAPE)
    return prometheus


def test_every_expression_of_every_panel_and_alert_is_answered(filled, traffic) -> None:
    """No error, data where there should be some, no series and no label that nobody exports."""
    expressions = check.everything()
    assert len(expressions) > 100
    # Ages are shown only of what is in flight, and a busy machine may miss a scrape.
    for _ in range(TRIES):
        with in_flight(traffic):
            time.sleep(2 * SCRAPE + 0.5)
            problems = check.check(filled, expressions)
        if not problems:
            break
    assert [str(problem) for problem in problems] == []


@contextmanager
def in_flight(traffic: Traffic) -> Iterator[None]:
    """A load that waits, and so a hand-off that is not read."""
    with silent_peer() as port, ThreadPoolExecutor(1) as pool:
        prompt = traffic.prompt()
        handoff = elsewhere(traffic.handoff(Endpoint.COMPLETIONS, prompt), port, f"silent-{port}")
        ask = body(Endpoint.COMPLETIONS, prompt, OUTPUT) | {KEY: handoff}
        waiting = pool.submit(traffic.decode, Endpoint.COMPLETIONS, ask)
        yield
        assert waiting.result().status == httpx.codes.OK


def test_every_reason_shows(filled) -> None:
    """Prometheus has the requests by the reasons that were sent."""
    answer = check.ask(filled, "query", query=f'sum by (reason) ({REQUESTS}{{role="decode"}}) > 0')
    found = {item["metric"]["reason"] for item in answer["result"]}
    assert found >= {
        "none",
        "params_missing",
        "params_empty",
        "params_not_remote",
        "params_invalid",
        "peer_denied",
        "handoff_reused",
        "handoff_mismatch",
        "handoff_expired",
        "unsupported_mode",
        "not_disaggregated",
        "router_bypass",
        "load_failed",
        "peer_unavailable",
    }


@pytest.mark.parametrize("board", ["fleet", "instance"])
def test_a_dashboard_is_drawn_with_live_data(filled, traffic, board) -> None:
    """To be looked at, in .cache/e2e; no panels overlap and every title fits."""
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("`make soak` installs matplotlib")
    picture = LOGS / f"{board}.png"
    picture.unlink(missing_ok=True)
    instance = traffic.pair.decode.url.removeprefix("http://")
    command = [sys.executable, "-m", "dashboards.render", str(picture), "--prometheus", filled]
    command += ["--board", str(check.GENERATED / f"{board}.json"), "--hours", "0.06", "--rows", "28"]
    if board == "instance":
        command += ["--variable", f"instance={instance}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.stat().st_size > 0


def test_metrics_and_labels_in_use_are_the_catalogues_or_vllms(filled, traffic) -> None:
    """Read from the servers themselves, not from what Prometheus made of them."""
    served = set[str]()
    for server in (traffic.pair.prefill, traffic.pair.decode):
        served |= traffic.pair.metrics(server).names()
    ours = {metric.wire_name for metric in catalog.CATALOG}
    for expression in check.everything():
        for name, _ in check.selectors(check.filled(expression.text)):
            if name.startswith(check.MAY_BE_ABSENT):
                continue
            base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
            assert name in served, f"{expression.where}: no server exports {name}"
            assert base in ours or not name.startswith(catalog.PREFIX), f"{expression.where}: {name}"


def test_alertmanager_is_told_when_prefill_is_killed_and_when_it_is_over(filled, traffic, pager) -> None:
    """The router has no prefill and sends decode its requests as they are; then it finds another one."""
    pair = traffic.pair
    instance = pair.decode.url.removeprefix("http://")

    def over() -> bool:
        return not _alerts(filled) & set(KILLED) and all(pager.state(name) != "firing" for name in KILLED)

    assert _busy(lambda: _through(traffic, pair.others[0].url), over), _alerts(filled)
    kill(pair.prefill)
    assert _busy(lambda: _alone(traffic), lambda: {pager.state(name) for name in KILLED} == {"firing"}), (
        pager.told
    )
    for name in KILLED:
        assert pager.labels[name]["role"] == "decode"
    assert pager.labels[KILLED[0]]["instance"] == instance
    back = _busy(
        lambda: _through(traffic, pair.others[0].url),
        lambda: {pager.state(name) for name in KILLED} == {"resolved"},
    )
    assert back, pager.told
    assert pager.firing() & NEVER == set()


def _busy(send: Callable[[], None], enough: Callable[[], bool]) -> bool:
    """Whether it came to this in time, with requests going on."""
    deadline = time.monotonic() + WITHIN
    while not enough():
        if time.monotonic() > deadline:
            return False
        send()
        time.sleep(0.1)
    return True


def _through(traffic: Traffic, prefill: str) -> None:
    """One request by way of this prefill server."""
    prompt = traffic.prompt()
    ask = body(Endpoint.COMPLETIONS, prompt, 1)
    handoff = json.loads(
        traffic.post(prefill, Endpoint.COMPLETIONS, ask | {KEY: {"do_remote_decode": True}}).text
    )
    traffic.decode(Endpoint.COMPLETIONS, body(Endpoint.COMPLETIONS, prompt, OUTPUT) | {KEY: handoff[KEY]})


def _alone(traffic: Traffic) -> None:
    """One request that the router could send to no prefill server."""
    traffic.decode(Endpoint.COMPLETIONS, body(Endpoint.COMPLETIONS, traffic.prompt(), OUTPUT))


def _alerts(url: str) -> set[str]:
    return {alert["labels"]["alertname"] for alert in check.ask(url, "alerts")["alerts"]}
