"""The stats pipeline, with vLLM's own classes: nothing lost, nothing raised, the inner's part untouched."""

from __future__ import annotations

import pickle
import re
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from shim import plugin
from shim.telemetry import catalog
from shim.telemetry.catalog import CATALOG, SERIES_LIMIT, Kind, Scope, key
from shim.telemetry.stats import ShimStats
from shim.telemetry.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

LABELS = ["model_name", "engine"]
ENGINES = {0: ["m", "0"], 1: ["m", "1"]}
REMOTE = key(catalog.REQUESTS, "remote", "none")
WAIT = key(catalog.LOAD_WAIT_SECONDS, "loaded")
OLDEST = key(catalog.OLDEST_LOAD_START)
PEERS = key(catalog.PEERS, "open")

SHAPES = {
    "around NIXL": ("shim", {}),
    "around Offloading": ("shim", {"shim": {"connector": "OffloadingConnector"}}),
    "inside MultiConnector": (
        "MultiConnector",
        {"connectors": [{"kv_connector": "shim", "kv_role": "kv_both"}]},
    ),
    "around MultiConnector": (
        "shim",
        {
            "shim": {"connector": "MultiConnector"},
            "connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}],
        },
    ),
    "around and inside": (
        "shim",
        {
            "shim": {"connector": "MultiConnector"},
            "connectors": [{"kv_connector": "shim", "kv_role": "kv_both"}],
        },
    ),
}


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """vLLM's own way to begin with an empty registry."""
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def config(shape: str) -> VllmConfig:
    """A vLLM config of this shape."""
    plugin.install()
    name, extra = SHAPES[shape]
    return VllmConfig(
        kv_transfer_config=KVTransferConfig(
            kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra
        )
    )


def nixl_stats(transfers: int = 1) -> NixlKVConnectorStats:
    """NIXL's worker-side stats of some transfers."""
    stats = NixlKVConnectorStats()
    for _ in range(transfers):
        for name, value in (("transfer_duration", 0.5), ("post_duration", 0.1), ("bytes_transferred", 8.0)):
            stats.data[name].append(value)
        stats.data["num_descriptors"].append(3)
    return stats


def ours(count: int = 1, oldest: float = 0.0) -> ShimStats:
    """The scheduler side's stats."""
    tally = Tally()
    tally.add(REMOTE, count)
    tally.sample(WAIT, 0.02)
    tally.gauge(OLDEST, oldest)
    return ShimStats(tally.take())


def over_the_wire(stats: Any) -> dict[str, Any]:
    """What the API server gets of it: taken as the scheduler takes it, through vLLM's own msgpack."""
    payload = stats.to_dict() if hasattr(MultiKVConnectorStats, "to_dict") else stats.data
    encoded = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=payload))
    decoded = MsgpackDecoder(SchedulerStats).decode(encoded).kv_connector_stats
    assert decoded is not None
    return decoded


def step(shape: str) -> Any:
    """One step's stats as `update_from_output` merges them: worker.aggregate(scheduler)."""
    if shape == "around Offloading":
        return ShimStats(None, None).aggregate(ours())
    worker, scheduler = ShimStats(None, nixl_stats()), ours()
    name = "Shim_NixlPullConnector"
    if shape == "inside MultiConnector":
        return MultiKVConnectorStats({name: worker}).aggregate(MultiKVConnectorStats({name: scheduler}))
    if shape == "around MultiConnector":
        worker = ShimStats(None, MultiKVConnectorStats({"NixlPullConnector": nixl_stats()}))
    elif shape == "around and inside":
        worker = ShimStats(None, MultiKVConnectorStats({name: worker}))
    return worker.aggregate(scheduler)


def scraped() -> dict[str, float]:
    """Every sample of the registry, `_created` left out."""
    text = prometheus_client.generate_latest(prometheus_client.REGISTRY).decode()
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def series(scrape: dict[str, float], name: str, **labels: str) -> float:
    """One sample's value."""
    wanted = {"model_name": "m", "engine": "0", **{label: str(value) for label, value in labels.items()}}
    return scrape[f"{name}{sorted(wanted.items())}"]


@pytest.mark.parametrize("shape", SHAPES)
def test_both_parts_arrive_whole_in_metrics_and_log(shape: str) -> None:
    """Twice a step's stats: the shim's counters add up, and the inner's own series are what they were."""
    vllm_config = config(shape)
    prom = KVConnectorProm(vllm_config, LABELS, ENGINES)
    log = KVConnectorLogging(vllm_config.kv_transfer_config)
    for _ in range(2):
        data = over_the_wire(step(shape))
        prom.observe(data, 0)
        log.observe(data)
    scrape = scraped()
    assert series(scrape, "vllm:kv_shim_requests_total", outcome="remote", reason="none") == 2
    assert series(scrape, "vllm:kv_shim_load_wait_seconds_count", result="loaded") == 2
    assert series(scrape, "vllm:kv_shim_stats_dropped_total") == 0
    if shape != "around Offloading":
        assert series(scrape, "vllm:nixl_bytes_transferred_count") == 2
        assert series(scrape, "vllm:nixl_xfer_time_seconds_sum") == 1.0
    lines: list[str] = []
    log.log(lambda form, text: lines.append(form % text))
    assert re.search(r"Requests remote'?[:=] ?2", lines[0])


def test_nothing_is_missing_before_it_happens() -> None:
    """Every valid series is there at 0, no other, and an engine stays under the limit."""
    KVConnectorProm(config("around NIXL"), LABELS, ENGINES)
    mine = {name: value for name, value in scraped().items() if name.startswith(catalog.PREFIX)}
    for metric in CATALOG:
        if metric.scope is Scope.ENGINE and metric.kind is Kind.COUNTER:
            for values in metric.series:
                labels = dict(zip(metric.labels, values, strict=True))
                assert series(mine, metric.wire_name, **labels) == 0
    for engine in ("0", "1"):
        assert 0 < sum(f"('engine', '{engine}')" in name for name in mine) <= SERIES_LIMIT
    assert sum(name.startswith("vllm:kv_shim_info") for name in mine) == 2


def test_engines_are_told_apart() -> None:
    """A payload counts for the engine that sent it."""
    prom = KVConnectorProm(config("around NIXL"), LABELS, ENGINES)
    prom.observe(over_the_wire(ours(3)), 1)
    scrape = scraped()
    labels = {"outcome": "remote", "reason": "none"}
    assert series(scrape, "vllm:kv_shim_requests_total", **labels) == 0
    assert series(scrape, "vllm:kv_shim_requests_total", engine="1", **labels) == 3


def test_payloads_out_of_order_never_turn_the_oldest_start_back() -> None:
    """Several API servers get payloads in any order: the latest start stands; a count of breakers may fall."""
    prom = KVConnectorProm(config("around NIXL"), LABELS, ENGINES)
    for start in (100.0, 300.0, 200.0, 0.0):
        prom.observe(over_the_wire(ours(oldest=start)), 0)
    name = "vllm:kv_shim_oldest_load_start_timestamp_seconds"
    assert series(scraped(), name) == 300.0
    for count in (2.0, 1.0):
        tally = Tally()
        tally.gauge(PEERS, count)
        prom.observe(over_the_wire(ShimStats(tally.take())), 0)
    assert series(scraped(), "vllm:kv_shim_peers", state="open") == 1


@pytest.mark.parametrize(
    "junk",
    [
        {},
        {"kv_shim": None},
        {"kv_shim": {"counters": {"requests|evil|none": 1, "info": 1}}},
        {"kv_shim": {"counters": {REMOTE: -1}, "samples": {WAIT: ["x"]}, "gauges": {OLDEST: None}}},
        {"kv_shim": {"samples": {WAIT: [0.1, "x", 0.2]}}},
    ],
)
def test_what_cannot_be_delivered_is_counted_and_raises_nothing(junk: dict[str, Any]) -> None:
    """An exception here would end the API server."""
    prom = KVConnectorProm(config("around NIXL"), LABELS, ENGINES)
    prom.observe(junk, 0)
    prom.observe(junk, 7)
    log = KVConnectorLogging(config("around NIXL").kv_transfer_config)
    log.observe(junk)
    part = junk.get("kv_shim") or {}
    lost = len(part.get("counters", {})) + len(part.get("gauges", {})) + str(part.get("samples")).count("'x'")
    assert series(scraped(), "vllm:kv_shim_stats_dropped_total") == lost


def test_a_registry_that_refuses_us_does_not_stop_the_server() -> None:
    """Somebody took our name: the inner's metrics still work."""
    taken = prometheus_client.Counter("vllm:kv_shim_requests", "taken")
    try:
        prom = KVConnectorProm(config("around NIXL"), LABELS, ENGINES)
        prom.observe(over_the_wire(step("around NIXL")), 0)
        assert series(scraped(), "vllm:nixl_bytes_transferred_count") == 1
    finally:
        prometheus_client.REGISTRY.unregister(taken)
    assert prom.prom_metrics is not None
    assert prom.prom_metrics._series == {}


def test_stats_cross_processes_as_objects_too() -> None:
    """Workers in their own processes send theirs pickled; ranks are added up by vLLM with one class."""
    ranks = [pickle.loads(pickle.dumps(ShimStats(None, nixl_stats()))) for _ in range(2)]
    whole = ranks[0].aggregate(ranks[1]).aggregate(ours())
    assert len(whole.inner.data["transfer_duration"]) == 2
    assert not whole.is_empty()
    whole.reset()
    assert whole.is_empty()


def test_the_wrapped_class_is_what_the_factory_gives_for_its_name() -> None:
    """MultiConnector parses children's stats by class name."""
    config("inside MultiConnector")
    cls = KVConnectorFactory.get_connector_class_by_name("Shim_NixlPullConnector")
    data = over_the_wire(ShimStats(None, nixl_stats()).aggregate(ours()))
    rebuilt = cls.build_kv_connector_stats(data)
    assert isinstance(rebuilt, ShimStats)
    assert isinstance(rebuilt.inner, NixlKVConnectorStats)
    assert cls.build_kv_connector_stats(None).is_empty()
