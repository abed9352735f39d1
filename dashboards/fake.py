"""A fleet that is not there: `/metrics` pages with the whole catalogue and the stock vLLM series that are read.

For looking at dashboards and checking queries without servers. `Exporter` adds up rates; `openmetrics` writes a
past for `promtool tsdb create-blocks-from openmetrics`, `serve` answers scrapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from shim.telemetry import catalog
from shim.telemetry.catalog import Kind, Labels, Metric, Scope
from shim.verdict import Endpoint, HandoffEnd, HandoffReason, LoadResult, Outcome, Reason, Source, TokenKind

from . import queries as q

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BYTES = tuple(float(2 ** (10 + i)) for i in range(1, 25, 2))

Rates = Mapping[tuple[str, Labels], float]
"""Per second, by catalogue name or stock name and label values."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family on the wire. `typical` is the middle of a histogram's observations."""

    name: str
    kind: Kind
    labels: tuple[str, ...] = ()
    series: tuple[Labels, ...] = ((),)
    buckets: tuple[float, ...] = ()
    typical: float = 0.1
    engine: bool = True


def _ours(metric: Metric) -> Family:
    typical = {"local_prefill_seconds": 0.8, "load_wait_seconds": 0.03, "handoff_age_seconds": 0.06}
    engine = metric.scope is Scope.ENGINE
    return Family(
        metric.full_name,
        metric.kind,
        metric.labels,
        metric.series,
        metric.buckets,
        typical.get(metric.name, 0.1),
        engine,
    )


STOCK = (
    Family("vllm:num_requests_running", Kind.GAUGE),
    Family("vllm:num_requests_waiting", Kind.GAUGE),
    Family("vllm:kv_cache_usage_perc", Kind.GAUGE),
    Family("vllm:num_preemptions", Kind.COUNTER),
    Family("vllm:request_success", Kind.COUNTER, ("finished_reason",), (("stop",), ("length",), ("abort",))),
    Family(
        "vllm:prompt_tokens_by_source",
        Kind.COUNTER,
        ("source",),
        (("local_compute",), ("local_cache_hit",), ("external_kv_transfer",)),
    ),
    Family(q.STOCK_TTFT, Kind.HISTOGRAM, buckets=SECONDS, typical=0.12),
    Family(q.STOCK_ITL, Kind.HISTOGRAM, buckets=SECONDS, typical=0.02),
    Family(q.NIXL_TIME, Kind.HISTOGRAM, buckets=SECONDS, typical=0.01),
    Family(q.NIXL_BYTES, Kind.HISTOGRAM, buckets=BYTES, typical=4e8),
    Family("vllm:nixl_num_failed_transfers", Kind.COUNTER),
    Family("vllm:nixl_num_kv_expired_reqs", Kind.COUNTER),
    Family("vllm:nixl_num_notifications_after_expiry", Kind.COUNTER),
)
FAMILIES = (*(_ours(metric) for metric in catalog.CATALOG), *STOCK)


@dataclass(slots=True)
class Exporter:
    """One server's `/metrics`: counters add up by rates, gauges are set."""

    info: Labels
    engines: tuple[str, ...] = ("0",)
    started: float = 0.0
    counts: dict[tuple[str, Labels], float] = field(default_factory=dict)
    gauges: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def advance(self, seconds: float, rates: Rates) -> None:
        """Let time pass."""
        for name, rate in rates.items():
            self.counts[name] = self.counts.get(name, 0.0) + rate * seconds

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Every series: name on the wire, labels, value."""
        for family in FAMILIES:
            for engine in self.engines if family.engine else ("",):
                base = {"model_name": MODEL} | ({"engine": engine} if family.engine else {})
                series = (self.info,) if family.name == catalog.INFO.full_name else family.series
                for values in series:
                    labels = base | dict(zip(family.labels, values, strict=True))
                    yield from self._one(family, values, labels)

    def _one(
        self, family: Family, values: Labels, labels: dict[str, str]
    ) -> Iterator[tuple[str, dict[str, str], float]]:
        name = family.name
        found = (name.removeprefix(catalog.PREFIX), values)
        count = self.counts.get(found, 0.0)
        if family.kind is Kind.COUNTER:
            yield f"{name}_total", labels, float(math.floor(count))
        elif family.kind is Kind.GAUGE:
            fixed = {catalog.INFO.full_name: 1.0, catalog.START_TIME_SECONDS.full_name: self.started}
            yield name, labels, fixed.get(name, self.gauges.get(found, 0.0))
        else:
            for bound in (*family.buckets, math.inf):
                below = 1.0 if bound == math.inf else _share_below(bound, family.typical)
                text = "+Inf" if bound == math.inf else f"{bound:g}"
                yield f"{name}_bucket", labels | {"le": text}, float(math.floor(count * below))
            yield f"{name}_count", labels, float(math.floor(count))
            yield f"{name}_sum", labels, count * family.typical * 1.2


def _share_below(bound: float, typical: float) -> float:
    return 0.5 * (1 + math.erf((math.log(bound) - math.log(typical)) / (0.7 * math.sqrt(2))))


def page(exporter: Exporter) -> str:
    """The classic text format."""
    return "".join(f"{name}{_braces(labels)} {value!r}\n" for name, labels, value in exporter.samples())


def _braces(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}"


def openmetrics(
    servers: Sequence[tuple[Mapping[str, str], Exporter, Callable[[float], Rates]]],
    start: float,
    end: float,
    step: float,
) -> str:
    """A past, as OpenMetrics with timestamps.

    Args:
        servers: target labels, exporter, and rates by progress (0 at `start`, 1 at `end`).
        start: Unix seconds, as `end`.
        end: the last sample is not after this.
        step: seconds between samples.
    """
    lines: dict[str, list[str]] = {}
    now = start
    while now <= end:
        for target, exporter, story in servers:
            exporter.advance(step, story((now - start) / (end - start)))
            for name, labels, value in exporter.samples():
                lines.setdefault(name, []).append(
                    f"{name}{_braces({**labels, **target})} {value!r} {now:.3f}\n"
                )
        now += step
    # promtool wants each family together; a family per sample name, of unknown type, is enough for it.
    return "".join("".join(found) for found in lines.values()) + "# EOF\n"


def everything() -> Rates:
    """Every counter and histogram of the catalogue and of vLLM grows."""
    rates: dict[tuple[str, Labels], float] = {}
    for family in FAMILIES:
        if family.kind is not Kind.GAUGE:
            for values in family.series:
                rates[family.name.removeprefix(catalog.PREFIX), values] = 2.0
    # Something must be in flight, or ages have nothing to say.
    rates[catalog.LOADS_STARTED.name, ()] = 2.0 * len(LoadResult) + 1
    rates[catalog.HANDOFFS.name, ("issued", "none")] = 2.0 * len(HandoffEnd) + 1
    return rates


def decode_story(progress: float) -> Rates:
    """A decode server whose router begins to lose params after half the time and is put right later."""
    bad = 0.45 if 0.55 < progress < 0.8 else 0.004  # the bad time  # noqa: PLR2004  # the bad time
    wave = 1 + 0.3 * math.sin(9 * progress)
    load = 6.0 * wave
    lost, failed = load * bad * 0.8, load * bad * 0.2
    pulled = load - lost - failed
    prompt = 1800.0
    request = catalog.REQUESTS.name
    tokens = catalog.PROMPT_TOKENS.name
    ended = catalog.LOAD_WAIT_SECONDS.name
    return {
        (request, (Outcome.REMOTE, Reason.NONE)): pulled,
        (request, (Outcome.LOCAL_PREFILL, Reason.PARAMS_MISSING)): lost,
        (request, (Outcome.LOCAL_PREFILL, Reason.LOAD_FAILED)): failed * 0.7,
        (request, (Outcome.LOCAL_PREFILL, Reason.PEER_UNAVAILABLE)): failed * 0.3,
        (request, (Outcome.LOCAL_PREFILL, Reason.PARAMS_INVALID)): 0.02,
        (request, (Outcome.LOCAL_INTENDED, Reason.BELOW_THRESHOLD)): load * 0.1,
        (request, (Outcome.LOCAL_INTENDED, Reason.LOCAL_CACHE)): load * 0.05,
        (request, (Outcome.ABORTED, Reason.NONE)): load * 0.01,
        (tokens, (TokenKind.FAULT, Reason.PARAMS_MISSING)): lost * prompt,
        (tokens, (TokenKind.FAULT, Reason.LOAD_FAILED)): failed * prompt,
        (tokens, (TokenKind.INTENDED, Reason.BELOW_THRESHOLD)): load * 0.1 * 40,
        (tokens, (TokenKind.TAIL, Reason.TAIL)): pulled * 8,
        (tokens, (TokenKind.RECOMPUTED, Reason.PREEMPTED)): 20 * wave,
        (catalog.LOCAL_PREFILL_SECONDS.name, ()): lost + failed,
        (catalog.PARAMS.name, (Source.EXTRA_ARGS, Endpoint.CHAT)): pulled * 0.7,
        (catalog.PARAMS.name, (Source.BODY, Endpoint.GENERATE)): pulled * 0.3,
        (catalog.PARAMS.name, (Source.NONE, Endpoint.CHAT)): lost,
        (catalog.PARAMS.name, (Source.NONE, Endpoint.COMPLETIONS)): load * 0.15,
        (catalog.LOADS_STARTED.name, ()): pulled + failed,
        (ended, (LoadResult.LOADED,)): pulled,
        (ended, (LoadResult.FAILED,)): failed,
        (catalog.HANDOFF_AGE_SECONDS.name, ()): pulled,
        (catalog.STAMPS.name, ("ok",)): pulled,
        (catalog.STAMPS.name, ("absent",)): failed,
        (catalog.PEER_TRANSITIONS.name, ("open",)): bad * 0.01,
        (catalog.PEER_TRANSITIONS.name, ("closed",)): bad * 0.01,
        (catalog.ENTRYPOINT.name, ("refused", Endpoint.CHAT)): 0.01,
        ("vllm:request_success", ("stop",)): load * 1.1,
        ("vllm:prompt_tokens_by_source", ("local_compute",)): (lost + failed) * prompt + pulled * 8,
        ("vllm:prompt_tokens_by_source", ("external_kv_transfer",)): pulled * prompt,
        (q.STOCK_TTFT, ()): load,
        (q.STOCK_ITL, ()): load * 120,
        (q.NIXL_TIME, ()): pulled,
        (q.NIXL_BYTES, ()): pulled,
        ("vllm:nixl_num_failed_transfers", ()): failed,
    }


def prefill_story(progress: float) -> Rates:
    """The prefill server beside it."""
    wave = 1 + 0.3 * math.sin(9 * progress)
    load = 6.0 * wave
    bad = 0.3 if 0.55 < progress < 0.8 else 0.01  # the same bad time  # noqa: PLR2004  # the bad time
    prompt = 1800.0
    return {
        (catalog.REQUESTS.name, (Outcome.PREFILL, Reason.NONE)): load,
        (catalog.PROMPT_TOKENS.name, (TokenKind.PREFILL, Reason.NONE)): load * prompt,
        (catalog.PARAMS.name, (Source.EXTRA_ARGS, Endpoint.CHAT)): load,
        (catalog.HANDOFFS.name, ("issued", HandoffReason.NONE)): load * (1 - bad),
        (catalog.HANDOFFS.name, ("missing", HandoffReason.PARAMS_MISSING)): load * bad,
        (catalog.HANDOFFS_CLOSED.name, (HandoffEnd.READ,)): load * (1 - bad) * 0.985,
        (catalog.HANDOFFS_CLOSED.name, (HandoffEnd.EXPIRED,)): load * (1 - bad) * 0.0148,
        (catalog.ENTRYPOINT.name, ("response_without_handoff", Endpoint.CHAT)): load * bad,
        ("vllm:request_success", ("length",)): load,
        ("vllm:prompt_tokens_by_source", ("local_compute",)): load * prompt,
        ("vllm:nixl_num_kv_expired_reqs", ()): load * 0.0148,
        (q.STOCK_TTFT, ()): load,
        (q.STOCK_ITL, ()): load,
    }


def serve(exporters: Mapping[str, Exporter], port: int = 0) -> ThreadingHTTPServer:
    """Answers `/<name>` with that exporter's page, until `shutdown`; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # http.server's name
            exporter = exporters.get(self.path.strip("/"))
            body = page(exporter).encode() if exporter else b""
            self.send_response(200 if exporter else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Scrapes are not worth a line."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return server
