"""PromQL as named functions: what is asked, apart from the panels and alerts that ask it.

Metric names, labels and reasons come from `shim.telemetry.catalog` and `shim.verdict`; the few stock series are
those of vLLM's `v1/metrics/loggers.py` and `kv_connector/v1/nixl/stats.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shim.telemetry import catalog
from shim.telemetry.catalog import Metric
from shim.telemetry.catalog import Scope as CountedIn
from shim.verdict import Outcome, Reason, ReasonClass, TokenKind, reasons_of

if TYPE_CHECKING:
    from collections.abc import Iterable

TARGET = ("cluster", "namespace", "job", "instance")
"""What names one scraped server; a label that a fleet does not have matches as empty."""

SERVER = (*TARGET, "role", "model_name")
"""What a per-server alert keeps."""

GROUP = ("cluster", "namespace", "job", "role", "model_name")
"""What a fleet-wide alert keeps: servers of one kind that serve one model."""

ENGINE = (*SERVER, "engine")

LLMD_DECISIONS = (
    # Newer routers export the first name and, for a while, the last as well: never to be added up.
    "llm_d_epp_disagg_decision_total",
    "llm_d_router_epp_disagg_decision_total",
    "llm_d_inference_scheduler_disagg_decision_total",
)

STOCK_REQUESTS = "vllm:request_success_total"
STOCK_RUNNING = "vllm:num_requests_running"
STOCK_WAITING = "vllm:num_requests_waiting"
STOCK_CACHE = "vllm:kv_cache_usage_perc"
STOCK_PREEMPTIONS = "vllm:num_preemptions_total"
STOCK_TOKENS = "vllm:prompt_tokens_by_source_total"
STOCK_TTFT = "vllm:time_to_first_token_seconds"
STOCK_ITL = "vllm:inter_token_latency_seconds"
NIXL_TIME = "vllm:nixl_xfer_time_seconds"
NIXL_BYTES = "vllm:nixl_bytes_transferred"
NIXL_FAILED = "vllm:nixl_num_failed_transfers_total"
NIXL_EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
NIXL_AFTER_EXPIRY = "vllm:nixl_num_notifications_after_expiry_total"  # not in vLLM 0.28.0

RATE = "$__rate_interval"
RANGE = "$__range"
NOW = "5m"
"""The window of "now" on the dashboards; the ratio alerts read the same."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which servers a query reads.

    Attributes:
        matchers: label matchers that every series of a server can answer.
        engine: the matcher for series that carry `engine`; entrypoint facts do not.
        model: the matcher for series that carry `model_name`.
    """

    matchers: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()


EVERYTHING = Scope()
"""For rules: they see all servers."""

SELECTED = Scope(
    tuple(f'{label}=~"${label}"' for label in ("cluster", "namespace", "job", "role", "instance")),
    ('model_name=~"$model_name"',),
    ('engine=~"$engine"',),
)
"""For dashboards: what the variables select."""


def any_of(values: Iterable[str]) -> str:
    """A regular expression that matches exactly these label values."""
    return "|".join(values)


OPERATOR = any_of(reasons_of(ReasonClass.OPERATOR))
CLIENT = any_of(reasons_of(ReasonClass.CLIENT))
FAULTS = any_of(reasons_of(ReasonClass.OPERATOR, ReasonClass.CLIENT))
INTENDED = any_of(reasons_of(ReasonClass.INTENDED))
BAD_OUTCOMES = any_of((Outcome.LOCAL_PREFILL, Outcome.FAILED, Outcome.PARTIAL))
PULLABLE = any_of((Outcome.REMOTE, Outcome.PARTIAL, Outcome.LOCAL_PREFILL, Outcome.FAILED))
UNUSABLE = any_of((Reason.PARAMS_MISSING, Reason.PARAMS_EMPTY, Reason.PARAMS_NOT_REMOTE))
EXPLAINED = any_of((TokenKind.FAULT, TokenKind.INTENDED, TokenKind.TAIL, TokenKind.PREFILL))


def series(metric: Metric, scope: Scope, *matchers: str, suffix: str = "") -> str:
    """A selector of one of the shim's metrics; `suffix` is a histogram's `_bucket`, `_sum` or `_count`."""
    engine = scope.engine if metric.scope is CountedIn.ENGINE else ()
    return stock(metric.wire_name + suffix, Scope(scope.matchers, scope.model, engine), *matchers)


def stock(name: str, scope: Scope, *matchers: str) -> str:
    """A selector of a series by its name on the wire."""
    inside = ",".join((*scope.matchers, *scope.model, *scope.engine, *matchers))
    return f"{name}{{{inside}}}" if inside else name


def total(expr: str, by: Iterable[str] = ()) -> str:
    """`sum`, over everything or by these labels."""
    labels = ", ".join(by)
    return f"sum by ({labels}) ({expr})" if labels else f"sum({expr})"


def rate(selector: str, window: str = RATE, by: Iterable[str] = ()) -> str:
    """Per second, added up."""
    return total(f"rate({selector}[{window}])", by)


def growth(selector: str, window: str = RANGE, by: Iterable[str] = ()) -> str:
    """How much a counter grew over the window, added up."""
    return total(f"increase({selector}[{window}])", by)


def quantile(q: float, buckets: str, window: str = RATE, by: Iterable[str] = ()) -> str:
    """A quantile of a classic histogram, from its `_bucket` selector."""
    return f"histogram_quantile({q}, {rate(buckets, window, ('le', *by))})"


def fault_rate(scope: Scope, window: str = RATE, by: Iterable[str] = ()) -> str:
    """Requests per second that should have been served from remote KV and were not: the operator's faults."""
    return rate(
        series(catalog.REQUESTS, scope, f'outcome=~"{BAD_OUTCOMES}"', f'reason=~"{OPERATOR}"'), window, by
    )


def pullable_rate(scope: Scope, window: str = RATE, by: Iterable[str] = ()) -> str:
    """Requests per second that could have pulled; those that the client spoiled are left out."""
    return rate(series(catalog.REQUESTS, scope, f'outcome=~"{PULLABLE}"', f'reason!~"{CLIENT}"'), window, by)


def fault_ratio(scope: Scope, window: str = RATE, by: Iterable[str] = ()) -> str:
    """The ratio of TELEMETRY.md; no sample where there was no traffic."""
    return f"{fault_rate(scope, window, by)}\n/\n({pullable_rate(scope, window, by)} > 0)"


def pulled_share(scope: Scope, window: str = RATE, by: Iterable[str] = ()) -> str:
    """Share of decodes that pulled: what the ratio leaves."""
    return f"1 - {fault_ratio(scope, window, by)}"


def outcome_rate(scope: Scope, *matchers: str, window: str = RATE, by: Iterable[str] = ("outcome",)) -> str:
    """Requests per second by outcome."""
    return rate(series(catalog.REQUESTS, scope, *matchers), window, by)


def reason_rate(scope: Scope, reasons: str = FAULTS) -> str:
    """Requests per second by reason; only those that occur: two dozen lines at 0 would hide them."""
    picked = series(catalog.REQUESTS, scope, f'reason=~"{reasons}"')
    return f"{rate(picked, by=('reason',))} > 0"


def top_reasons(scope: Scope, count: int = 10) -> str:
    """Most frequent faults over the dashboard's time range."""
    picked = series(catalog.REQUESTS, scope, f'reason=~"{FAULTS}"')
    return f"topk({count}, {growth(picked, by=('reason',))} > 0)"


def token_rate(scope: Scope, *matchers: str, by: Iterable[str] = ("kind",)) -> str:
    """Prompt tokens per second computed here."""
    return rate(series(catalog.PROMPT_TOKENS, scope, *matchers), by=by)


def tokens_burnt(scope: Scope) -> str:
    """Prompt tokens computed here for a fault, over the dashboard's time range."""
    return growth(series(catalog.PROMPT_TOKENS, scope, f'kind="{TokenKind.FAULT}"'))


def loads_in_flight(scope: Scope) -> str:
    """Waits for remote KV begun and not ended, per engine."""
    ended = series(catalog.LOAD_WAIT_SECONDS, scope, suffix="_count")
    return f"{series(catalog.LOADS_STARTED, scope)} - sum without (result) ({ended})"


def handoffs_open(scope: Scope) -> str:
    """Hand-offs issued and not closed, per engine: blocks that prefill keeps for decode."""
    issued = series(catalog.HANDOFFS, scope, 'result="issued"')
    closed = series(catalog.HANDOFFS_CLOSED, scope)
    return f"sum without (result, reason) ({issued}) - sum without (result) ({closed})"


def _age(metric: Metric, in_flight: str, scope: Scope) -> str:
    # 0 = none in flight; and a stale start must not count while the counters say that nothing is open.
    return f"(time() - ({series(metric, scope)} > 0))\nand (({in_flight}) > 0)"


def oldest_load_age(scope: Scope) -> str:
    """Seconds that the oldest load in flight has waited, per engine; grows also when the engine hangs."""
    return _age(catalog.OLDEST_LOAD_START, loads_in_flight(scope), scope)


def oldest_handoff_age(scope: Scope) -> str:
    """Seconds that the oldest open hand-off has pinned its blocks, per engine."""
    return _age(catalog.OLDEST_HANDOFF_START, handoffs_open(scope), scope)


def missing_handoff_share(scope: Scope, window: str = RATE, by: Iterable[str] = ()) -> str:
    """Share of finished prefill requests that came without a hand-off."""
    missing = rate(series(catalog.HANDOFFS, scope, 'result="missing"'), window, by)
    return f"{missing}\n/\n({rate(series(catalog.HANDOFFS, scope), window, by)} > 0)"


def expired_handoff_share(scope: Scope, window: str = RATE, by: Iterable[str] = ()) -> str:
    """Share of closed hand-offs that nobody read in time."""
    expired = rate(series(catalog.HANDOFFS_CLOSED, scope, 'result="expired"'), window, by)
    return f"{expired}\n/\n({rate(series(catalog.HANDOFFS_CLOSED, scope), window, by)} > 0)"


def open_breakers(scope: Scope, by: Iterable[str] = ()) -> str:
    """Peers that decode does not ask now."""
    return total(series(catalog.PEERS, scope), by)


def target_info(scope: Scope) -> str:
    """What runs where: one row a target."""
    labels = ", ".join(("instance", "role", *catalog.INFO.labels))
    return f"max by ({labels}) ({series(catalog.INFO, scope)})"


def explained_token_rate(scope: Scope, window: str = RATE, by: Iterable[str] = ()) -> str:
    """Prompt tokens per second that the shim accounts for; vLLM's `local_compute` is the other side."""
    return rate(series(catalog.PROMPT_TOKENS, scope, f'kind=~"{EXPLAINED}"'), window, by)


def local_token_rate(scope: Scope, *matchers: str, window: str = RATE, by: Iterable[str] = ()) -> str:
    """Prompt tokens per second that vLLM says it computed."""
    return rate(stock(STOCK_TOKENS, scope, 'source="local_compute"', *matchers), window, by)


def router_decisions(scope: Scope, window: str = RATE) -> str:
    """llm-d's routing decisions per second, under whichever one of its names is there.

    The same as `{__name__=~"llm_d_(epp|router_epp|inference_scheduler)_disagg_decision_total"}`, but a
    router that exports its old name beside the new one is not counted twice. Its series carry none of a
    server's labels.
    """
    where = Scope(tuple(m for m in scope.matchers if m.startswith(("cluster", "namespace"))), scope.model)
    return "\nor\n".join(rate(stock(name, where), window, ("decision_type",)) for name in LLMD_DECISIONS)
