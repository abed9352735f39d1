"""The one table of metrics: code, dashboards, README and tests read it.

An *engine* metric travels in the stats payload from the scheduler to vLLM's Prometheus logger
(labels `model_name`, `engine` and its own); an *entrypoint* metric is counted in the API process
(label `model_name` and its own). Pure Python; imports neither vLLM nor prometheus_client.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING

from shim.verdict import (
    Endpoint,
    HandoffEnd,
    HandoffReason,
    HandoffResult,
    LoadResult,
    Outcome,
    Reason,
    ReasonClass,
    Source,
    TokenKind,
    reasons_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PREFIX = "vllm:kv_shim_"
"""vLLM drops every collector whose name starts with `vllm:` before it builds its own, so ours go with them."""

SEPARATOR = "|"
"""Between the metric's name and its label values in a payload key; no label value may hold it."""

SERIES_LIMIT = 250
"""Series one engine may export, `_created` left out (tests/unit/test_catalog.py)."""

WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PREFILL_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Kind(StrEnum):
    """A metric's Prometheus type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(StrEnum):
    """Where a metric is counted."""

    ENGINE = "engine"
    ENTRYPOINT = "entrypoint"


class Hook(StrEnum):
    """Where a fault of the shim was contained; `INNER` = the inner connector's own exception, passed on."""

    ADMIT = "admit"
    SCREEN = "screen"
    MATCH = "match"
    ALLOC = "alloc"
    STEP = "step"
    OUTPUT = "output"
    FINISH = "finish"
    STATS = "stats"
    WORKER = "worker"
    SINK = "sink"
    INNER = "inner"


class ShimState(StrEnum):
    """What the shim does on this server; `DISABLED` by `SHIM_DISABLE`."""

    ACTIVE = "active"
    DISABLED = "disabled"


class PeerState(StrEnum):
    """A circuit breaker's state, as far as it is counted."""

    OPEN = "open"
    HALF_OPEN = "half_open"


class StampResult(StrEnum):
    """What checking a hand-off's stamp gave."""

    OK = "ok"
    ABSENT = "absent"
    MISMATCH = "mismatch"
    INCOMPARABLE = "incomparable"
    EXPIRED = "expired"
    REJECTED = "rejected"


class EntrypointEvent(StrEnum):
    """What only the API server can see."""

    REFUSED = "refused"
    REJECTED_BEFORE_ENGINE = "rejected_before_engine"
    RESPONSE_WITHOUT_HANDOFF = "response_without_handoff"
    NO_CONNECTOR = "no_connector"
    LOAD_TIMEOUT = "load_timeout"
    HOOK_ERROR = "hook_error"


Labels = tuple[str, ...]
"""One combination of label values, in the order of the metric's label names."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series.

    Attributes:
        name: without prefix; a counter gets `_total` on the wire.
        labels: its own label names, after vLLM's.
        series: the valid combinations of label values, pre-created at 0; no other may be counted.
            Empty for `info`, whose values are known only at start-up.
        buckets: upper bounds in the metric's unit (histograms only).
        latest: of several API processes' copies of a gauge the latest counts; else the largest.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    series: tuple[Labels, ...] = ((),)
    buckets: tuple[float, ...] = ()
    scope: Scope = Scope.ENGINE
    latest: bool = False

    @property
    def full_name(self) -> str:
        """As prometheus_client wants it: with prefix, without `_total`."""
        return PREFIX + self.name

    @property
    def wire_name(self) -> str:
        """As PromQL sees it (a histogram's base name)."""
        return self.full_name + ("_total" if self.kind is Kind.COUNTER else "")

    @property
    def width(self) -> int:
        """Prometheus series one label combination makes, `_created` left out."""
        return len(self.buckets) + 3 if self.kind is Kind.HISTOGRAM else 1


def key(metric: Metric, *values: str) -> str:
    """A payload key: the metric's name and its label values, flat, since msgpack carries only string keys."""
    return SEPARATOR.join((metric.name, *values))


def _pairs(rows: Mapping[str, Iterable[str]]) -> tuple[Labels, ...]:
    return tuple((first, second) for first, seconds in rows.items() for second in seconds)


_FAULTS = reasons_of(ReasonClass.OPERATOR, ReasonClass.CLIENT)
_INTENTIONS = reasons_of(ReasonClass.INTENDED)
_UNUSED_LOCALLY = {Reason.PARTIAL_MATCH}
_PARTIAL = (Reason.PARTIAL_MATCH, Reason.LOAD_FAILED, Reason.OTHER)

REQUESTS = Metric(
    "requests",
    Kind.COUNTER,
    "Engine requests by how they got their prompt's KV, one each, at the verdict.",
    ("outcome", "reason"),
    _pairs(
        {
            Outcome.REMOTE: (Reason.NONE,),
            Outcome.PARTIAL: _PARTIAL,
            Outcome.LOCAL_PREFILL: [r for r in _FAULTS if r not in _UNUSED_LOCALLY],
            Outcome.LOCAL_INTENDED: _INTENTIONS,
            Outcome.FAILED: (Reason.LOAD_FAILED, Reason.OTHER),
            Outcome.ABORTED: (Reason.NONE, Reason.LOAD_TIMEOUT),
            Outcome.PREFILL: (Reason.NONE,),
        }
    ),
)
PROMPT_TOKENS = Metric(
    "prompt_tokens",
    Kind.COUNTER,
    "Prompt tokens computed on this engine; the kinds partition them.",
    ("kind", "reason"),
    _pairs(
        {
            TokenKind.FAULT: _FAULTS,
            TokenKind.INTENDED: _INTENTIONS,
            TokenKind.TAIL: (Reason.TAIL,),
            TokenKind.RECOMPUTED: (Reason.PREEMPTED,),
            TokenKind.PREFILL: (Reason.NONE,),
        }
    ),
)
LOCAL_PREFILL_SECONDS = Metric(
    "local_prefill_seconds",
    Kind.HISTOGRAM,
    "Local prefills that should not have been: first scheduled chunk to prompt complete.",
    buckets=PREFILL_BUCKETS,
)
PARAMS = Metric(
    "params",
    Kind.COUNTER,
    "Engine requests by where their transfer params came from.",
    ("source", "endpoint"),
    tuple(
        (source, endpoint)
        for source, endpoint in product(Source, Endpoint)
        if not (endpoint is Endpoint.ENGINE and source in {Source.BODY, Source.HEADER})
    ),
)
LOADS_STARTED = Metric(
    "loads_started", Kind.COUNTER, "Waits for remote KV begun; less load_wait_seconds_count = in flight."
)
LOAD_WAIT_SECONDS = Metric(
    "load_wait_seconds",
    Kind.HISTOGRAM,
    "Time from asking for remote KV to its end.",
    ("result",),
    tuple((result,) for result in LoadResult),
    buckets=WAIT_BUCKETS,
)
OLDEST_LOAD_START = Metric(
    "oldest_load_start_timestamp_seconds",
    Kind.GAUGE,
    "When the oldest load in flight began (Unix time); read it only while something is in flight.",
)
OLDEST_HANDOFF_START = Metric(
    "oldest_handoff_start_timestamp_seconds",
    Kind.GAUGE,
    "When the oldest hand-off still pinned was issued (Unix time); read it only while one is open.",
)
HANDOFFS = Metric(
    "handoffs",
    Kind.COUNTER,
    "Prefill requests finished, by whether the connector issued a hand-off, and why not.",
    ("result", "reason"),
    _pairs(
        {
            HandoffResult.ISSUED: (HandoffReason.NONE,),
            HandoffResult.MISSING: [r for r in HandoffReason if r is not HandoffReason.NONE],
        }
    ),
)
HANDOFFS_CLOSED = Metric(
    "handoffs_closed",
    Kind.COUNTER,
    "Issued hand-offs by their end, one each.",
    ("result",),
    tuple((end,) for end in HandoffEnd),
)
HANDOFF_AGE_SECONDS = Metric(
    "handoff_age_seconds",
    Kind.HISTOGRAM,
    "Time from a hand-off's issue on prefill to its admission on decode, where a stamp travels.",
    buckets=WAIT_BUCKETS,
)
STAMPS = Metric(
    "stamps",
    Kind.COUNTER,
    "Hand-off stamps checked on decode.",
    ("result",),
    tuple((result,) for result in StampResult),
)
PEERS = Metric(
    "peers",
    Kind.GAUGE,
    "Circuit breakers that keep a prefill peer from being asked.",
    ("state",),
    tuple((state,) for state in PeerState),
    latest=True,
)
PEER_TRANSITIONS = Metric(
    "peer_transitions",
    Kind.COUNTER,
    "Circuit breaker transitions.",
    ("to",),
    (("open",), ("half_open",), ("closed",)),
)
ERRORS = Metric(
    "errors",
    Kind.COUNTER,
    "The shim's own exceptions, contained, by hook; and the inner connector's, passed on, as inner.",
    ("hook",),
    tuple((hook,) for hook in Hook),
)
STATS_DROPPED = Metric("stats_dropped", Kind.COUNTER, "Telemetry records that could not be delivered.")
INFO = Metric(
    "info",
    Kind.GAUGE,
    "Always 1; what runs here.",
    (
        "version",
        "vllm_version",
        "connector",
        "kv_role",
        "failure_policy",
        "expect_remote",
        "state",
    ),
    series=(),
)
START_TIME_SECONDS = Metric("start_time_seconds", Kind.GAUGE, "When this server's metrics began (Unix time).")
ENTRYPOINT = Metric(
    "entrypoint",
    Kind.COUNTER,
    "What only the API server can see, by route.",
    ("event", "endpoint"),
    tuple(
        (event, endpoint)
        for event, endpoint in product(EntrypointEvent, Endpoint)
        if endpoint is not Endpoint.ENGINE
    ),
    scope=Scope.ENTRYPOINT,
)

CATALOG: tuple[Metric, ...] = (
    REQUESTS,
    PROMPT_TOKENS,
    LOCAL_PREFILL_SECONDS,
    PARAMS,
    LOADS_STARTED,
    LOAD_WAIT_SECONDS,
    OLDEST_LOAD_START,
    OLDEST_HANDOFF_START,
    HANDOFFS,
    HANDOFFS_CLOSED,
    HANDOFF_AGE_SECONDS,
    STAMPS,
    PEERS,
    PEER_TRANSITIONS,
    ERRORS,
    STATS_DROPPED,
    INFO,
    START_TIME_SECONDS,
    ENTRYPOINT,
)

KEYS: Mapping[str, tuple[Metric, Labels]] = MappingProxyType(
    {key(m, *values): (m, values) for m in CATALOG for values in m.series}
)
"""Every payload key that may be counted, and what it stands for."""


def series_per_engine() -> int:
    """Series one engine exports, `_created` left out; `info` is one."""
    return sum(m.width * (len(m.series) or 1) for m in CATALOG if m.scope is Scope.ENGINE)
