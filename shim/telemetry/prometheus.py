"""The Prometheus sink, in the API process: the catalogue as real series, pre-created at 0, fed by payloads.

Everything runs inside vLLM's output handler, where an exception ends the server; so nothing of the shim's
may raise, and what can't be delivered is counted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from shim.telemetry import catalog
from shim.telemetry.catalog import CATALOG, INFO, KEYS, START_TIME_SECONDS, Kind, Metric, Scope, key
from shim.telemetry.faults import FAULTS
from shim.telemetry.stats import split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shim.telemetry.tally import Payload

_TYPES = {
    Kind.COUNTER: prometheus_client.Counter,
    Kind.GAUGE: prometheus_client.Gauge,
    Kind.HISTOGRAM: prometheus_client.Histogram,
}
_DROPPED = key(catalog.STATS_DROPPED)


class ShimPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM's class is untyped to mypy
    """The shim's series beside the inner connector's own.

    Args:
        inner: the inner connector's metrics, None if it has none.
        info: the labels of `kv_shim_info`; None for a wrapped child of a wrapped parent, which has the series.
    """

    def __init__(  # vLLM's signature, and what is ours
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
        *,
        inner: Any,
        info: Mapping[str, str] | None,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._inner = inner
        self._series: dict[int, dict[str, Any]] = {}
        self._highest: dict[tuple[int, str], float] = {}
        if info is None:
            return
        try:
            self._create(metric_types, labelnames, per_engine_labelvalues, info)
        except Exception as error:  # noqa: BLE001  # see below
            # A registry that refuses our names must not keep the server from starting.
            FAULTS.say("making the metrics, of which there are none now,", error)

    def _create(
        self,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
        info: Mapping[str, str],
    ) -> None:
        metrics = [metric for metric in CATALOG if metric.scope is Scope.ENGINE]
        families = {
            metric.name: _family(metric, metric_types[_TYPES[metric.kind]], labelnames) for metric in metrics
        }
        for engine, values in per_engine_labelvalues.items():
            series = {
                key(metric, *labels): families[metric.name].labels(*values, *labels)
                for metric in metrics
                for labels in metric.series
            }
            families[INFO.name].labels(*values, *(info[label] for label in INFO.labels)).set(1)
            series[key(START_TIME_SECONDS)].set(time.time())
            self._series[engine] = series

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Deliver one payload; the inner's part goes to the inner's metrics, whose exceptions are its own."""
        ours, inner = split(transfer_stats_data)
        self._deliver(ours, engine_idx)
        if inner is not None and self._inner is not None:
            self._inner.observe(inner, engine_idx)

    def _deliver(self, ours: Payload, engine: int) -> None:
        series, dropped = self._series.get(engine, {}), 0
        for name, count in ours["counters"].items():
            dropped += _try(series.get(name), "inc", count)
        for name, values in ours["samples"].items():
            for value in values:
                dropped += _try(series.get(name), "observe", value)
        for name, value in ours["gauges"].items():
            gauge = series.get(name)
            latest = name in KEYS and KEYS[name][0].latest
            dropped += _try(gauge, "set", value) if latest else self._raise(gauge, (engine, name), value)
        if dropped and _DROPPED in series:
            series[_DROPPED].inc(dropped)

    def _raise(self, gauge: Any, name: tuple[int, str], value: Any) -> int:
        """Set a gauge whose largest value counts: payloads may arrive out of order, so only growth is news."""
        if not isinstance(value, int | float):
            return 1
        if value <= self._highest.get(name, 0.0):
            return 0
        self._highest[name] = value
        return _try(gauge, "set", value)


def _family(metric: Metric, kind: Any, labelnames: list[str]) -> Any:
    labels = [*labelnames, *metric.labels]
    if metric.kind is Kind.HISTOGRAM:
        return kind(
            name=metric.full_name, documentation=metric.help, buckets=list(metric.buckets), labelnames=labels
        )
    if metric.kind is Kind.GAUGE:
        # Several API processes each hold a copy of what the engine last said to them.
        return kind(
            name=metric.full_name,
            documentation=metric.help,
            labelnames=labels,
            multiprocess_mode="mostrecent" if metric.latest else "max",
        )
    return kind(name=metric.full_name, documentation=metric.help, labelnames=labels)


def _try(series: Any, verb: str, value: object) -> int:
    """Call `series.verb(value)`; 1 if that could not be done."""
    if series is None:
        return 1
    try:
        getattr(series, verb)(value)
    except Exception as error:  # noqa: BLE001  # it would end the API server (see the module's docstring)
        FAULTS.say("delivering metrics", error)
        return 1
    return 0
