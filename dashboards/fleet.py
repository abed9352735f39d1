"""The fleet dashboard: is it healthy, what happens, why, and what it costs."""

from __future__ import annotations

from shim.telemetry import catalog
from shim.verdict import Outcome, TokenKind

from . import links
from . import queries as q
from .limits import LIMITS
from .panels import BLUE, GREEN, ORANGE, RED, YELLOW, Board, Kind, Panel, Query, Row, Unit
from .queries import SELECTED

REASON_TRACES = '{ span.vllm.kv_transfer.reason = "${__field.labels.reason}" }'
OUTCOME_TRACES = '{ span.vllm.kv_transfer.outcome = "${__field.labels.outcome}" }'
LOAD_TRACES = '{ name = "kv_transfer.load" && span.vllm.kv_transfer.wait_seconds > 1 }'
LOCAL_TRACES = '{ name = "kv_transfer.local_prefill" }'
HANDOFF_TRACES = '{ name = "kv_transfer.handoff" && status = error }'
QUANTILES = ((0.5, "median"), (0.95, "p95"), (0.99, "p99"))

VERSIONS = (
    ("instance", "Instance"),
    ("role", "Role"),
    ("state", "State"),
    ("connector", "Connector"),
    ("kv_role", "kv_role"),
    ("expect_remote", "Expects"),
    ("failure_policy", "On failure"),
    ("version", "Shim"),
    ("vllm_version", "vLLM"),
)


def health_panels() -> tuple[Panel, ...]:
    """The first screen's first row: six numbers and what runs where."""
    age = max(LIMITS.load_age, 1)
    return (
        Panel(
            "Decodes that pulled (5 min)",
            Kind.STAT,
            (Query(q.pulled_share(SELECTED, q.NOW)),),
            "Share of the requests that should have pulled their KV and did, without those that"
            " clients spoiled."
            " Below 95 %: see row Why for the biggest reason and follow its runbook link.",
            Unit.SHARE,
            4,
            3,
            base=RED,
            thresholds=((1 - LIMITS.ratio_critical, ORANGE), (1 - LIMITS.ratio_warning, GREEN)),
            runbook="KVShimFaultRatioHigh",
            decimals=1,
            no_value="no traffic",
        ),
        Panel(
            "Local prefills (5 min)",
            Kind.STAT,
            (Query(q.fault_rate(SELECTED, q.NOW)),),
            "Requests per second that decode had to prefill although prefill should have. Not zero: row Why.",
            Unit.REQUESTS,
            4,
            3,
            thresholds=((0.01, YELLOW), (LIMITS.ratio_floor, ORANGE)),
            runbook="KVShimFaultRatioHigh",
            no_value="no data",
        ),
        Panel(
            "Tokens burnt (time range)",
            Kind.STAT,
            (Query(q.tokens_burnt(SELECTED)),),
            "Prompt tokens computed on decode for a fault, over the dashboard's time range: work done twice."
            " Compare with row Cost; find the reason in row Why.",
            Unit.COUNT,
            4,
            3,
            thresholds=((1, YELLOW), (1_000_000, ORANGE)),
            no_value="no data",
        ),
        Panel(
            "What runs where",
            Kind.TABLE,
            (Query(q.target_info(SELECTED)),),
            "One line a server. Versions should be equal; decode should expect `always`, prefill `never`; state"
            " `disabled` means that `SHIM_DISABLE` is set there. A server that is missing"
            " here runs without the shim. Click an instance for its own dashboard.",
            Unit.NONE,
            12,
            6,
            runbook="KVShimMissing",
            columns=VERSIONS,
        ),
        Panel(
            "Oldest load",
            Kind.STAT,
            (Query(f"max({q.oldest_load_age(SELECTED)})"),),
            "How long the oldest request in flight has waited for its KV. Over a minute: its"
            " prefill server or the"
            " engine hangs; see row Loads and the stuck server's log.",
            Unit.SECONDS,
            4,
            3,
            thresholds=((age / 2, ORANGE), (age, RED)),
            runbook="KVShimLoadStuck",
            no_value="none in flight",
        ),
        Panel(
            "Open breakers",
            Kind.STAT,
            (Query(q.open_breakers(SELECTED)),),
            "Prefill servers that some decode server does not ask now, because loads from them failed in a row."
            " Not zero: see that the prefill server is up and can be reached from decode.",
            Unit.COUNT,
            4,
            3,
            thresholds=((1, RED),),
            runbook="KVShimBreakerOpen",
            no_value="no data",
        ),
        Panel(
            "Firing alerts",
            Kind.STAT,
            (Query('count(ALERTS{alertname=~"KVShim.+",alertstate="firing"})'),),
            "Alerts of the shim that fire now, of all servers. Each has a runbook entry under its own name.",
            Unit.COUNT,
            4,
            3,
            thresholds=((1, RED),),
            no_value="none",
        ),
    )


def outcome_panels() -> tuple[Panel, ...]:
    """How requests got their KV."""
    bounds = ((LIMITS.ratio_warning, ORANGE), (LIMITS.ratio_critical, RED))
    return (
        Panel(
            "Requests by outcome",
            Kind.TIME,
            (Query(q.outcome_rate(SELECTED), "{{outcome}}"),),
            "One each, at the verdict. `remote` is what disaggregation is for; `local_prefill`, `partial` and"
            " `failed` are faults (row Why); `local_intended` and `prefill` are as they should be.",
            Unit.REQUESTS,
            12,
            traces=OUTCOME_TRACES,
            stack=True,
        ),
        Panel(
            "Fault ratio by job",
            Kind.TIME,
            (Query(q.fault_ratio(SELECTED, by=("job", "role")), "{{job}} {{role}}"),),
            "Faults for the operator over all that could have pulled. The dashed lines are the"
            " alerts' thresholds."
            " One job above the others: look at that job alone (variable Job).",
            Unit.SHARE,
            12,
            thresholds=bounds,
            runbook="KVShimFaultRatioHigh",
        ),
    )


def why_panels() -> tuple[Panel, ...]:
    """Reasons, and the routes they come by."""
    no_params = q.rate(q.series(catalog.PARAMS, SELECTED, 'source="none"'), by=("endpoint",))
    entry = q.rate(q.series(catalog.ENTRYPOINT, SELECTED), by=("event", "endpoint"))
    return (
        Panel(
            "Faults by reason",
            Kind.TIME,
            (Query(q.reason_rate(SELECTED), "{{reason}}"),),
            "Why requests were not served from remote KV. Click a reason for its runbook entry or its traces.",
            Unit.REQUESTS,
            12,
            traces=REASON_TRACES,
            by_reason=True,
            stack=True,
            no_value="no faults",
        ),
        Panel(
            "Top reasons (time range)",
            Kind.BARS,
            (Query(q.top_reasons(SELECTED), "{{reason}}"),),
            "Most frequent faults over the time range, in requests. Start with the first: its"
            " link says how to put"
            " it right.",
            Unit.COUNT,
            6,
            base=ORANGE,
            traces=REASON_TRACES,
            by_reason=True,
            decimals=0,
            no_value="no faults",
        ),
        Panel(
            "Without params, by endpoint",
            Kind.BARS,
            (Query(f"{no_params} > 0", "{{endpoint}}"),),
            "Requests per second that came without transfer params, by route. One route alone:"
            " the router does not"
            " hand off on it, or this vLLM drops the field there and the shim's entrypoint half is not loaded.",
            Unit.REQUESTS,
            6,
            base=BLUE,
            runbook="params_missing",
            no_value="none",
        ),
        Panel(
            "Intended local prefills by reason",
            Kind.TIME,
            (Query(q.reason_rate(SELECTED, q.INTENDED), "{{reason}}"),),
            "Rightly computed on decode. Only a change matters: `not_disaggregated` rising while"
            " `remote` falls means"
            " that hand-offs get lost where expect_remote is `auto`.",
            Unit.REQUESTS,
            8,
            runbook="not_disaggregated",
            by_reason=True,
            stack=True,
        ),
        Panel(
            "Params by source",
            Kind.TIME,
            (Query(q.rate(q.series(catalog.PARAMS, SELECTED), by=("source",)), "{{source}}"),),
            "`extra_args`: vLLM passed them. `body`, `header`: the shim recovered what vLLM"
            " dropped. `none`: there"
            " were none. Much `body` on one version: it has the bug that the shim covers for.",
            Unit.REQUESTS,
            8,
        ),
        Panel(
            "Entrypoint events",
            Kind.TIME,
            (Query(f"{entry} > 0", "{{event}} {{endpoint}}"),),
            "What only the API server sees. `response_without_handoff`: prefill answered without"
            " params the router"
            " could use. `load_timeout`: a bounded wait ended. `hook_error`: a defect of the shim, report it.",
            Unit.REQUESTS,
            8,
            runbook="KVShimErrors",
        ),
    )


def cost_panels() -> tuple[Panel, ...]:
    """What faults cost, beside the latencies that users feel."""
    prefill = q.series(catalog.LOCAL_PREFILL_SECONDS, SELECTED, suffix="_bucket")
    spent = q.rate(q.series(catalog.LOCAL_PREFILL_SECONDS, SELECTED, suffix="_sum"))
    ttft = q.stock(q.STOCK_TTFT + "_bucket", SELECTED)
    itl = q.stock(q.STOCK_ITL + "_bucket", SELECTED)
    return (
        Panel(
            "Prompt tokens computed, by kind",
            Kind.TIME,
            (Query(q.token_rate(SELECTED, f'kind!="{TokenKind.PREFILL}"'), "{{kind}}"),),
            "`fault` is waste. `tail` belongs to every decode. `recomputed` comes from"
            " preemption: more KV cache or"
            " fewer sequences. Prefill's own work is left out.",
            Unit.TOKENS_RATE,
            6,
            stack=True,
            traces=LOCAL_TRACES,
        ),
        Panel(
            "Time in faulty local prefills",
            Kind.TIME,
            (
                *(Query(q.quantile(at, prefill), name) for at, name in QUANTILES[:2]),
                Query(spent, "seconds spent per second"),
            ),
            "How long one takes, and how much of every second the fleet spends on them (1 = one"
            " server's worth)."
            " Decode's other requests wait meanwhile.",
            Unit.SECONDS,
            6,
            traces=LOCAL_TRACES,
        ),
        Panel(
            "Time to first token",
            Kind.TIME,
            tuple(Query(q.quantile(at, ttft), name) for at, name in QUANTILES),
            "vLLM's own. Rises together with the two panels to the left: local prefill is what"
            " users feel. Rises"
            " alone: look at loads and queues.",
            Unit.SECONDS,
            6,
        ),
        Panel(
            "Inter-token latency",
            Kind.TIME,
            tuple(Query(q.quantile(at, itl), name) for at, name in QUANTILES),
            "vLLM's own. A local prefill shares steps with running decodes and makes their tokens late.",
            Unit.SECONDS,
            6,
        ),
    )


def load_panels() -> tuple[Panel, ...]:
    """Waits for remote KV, and the breakers."""
    waits = q.series(catalog.LOAD_WAIT_SECONDS, SELECTED, 'result="loaded"', suffix="_bucket")
    ended = q.series(catalog.LOAD_WAIT_SECONDS, SELECTED, suffix="_count")
    moved = q.rate(q.series(catalog.PEER_TRANSITIONS, SELECTED), by=("to",))
    return (
        Panel(
            "Loads in flight",
            Kind.TIME,
            (Query(q.total(q.loads_in_flight(SELECTED), ("instance",)), "{{instance}}"),),
            "Requests that wait for remote KV. Grows and does not come down: transfers stall;"
            " see Oldest load by"
            " instance.",
            Unit.COUNT,
            6,
            runbook="KVShimLoadStuck",
        ),
        Panel(
            "Load wait",
            Kind.TIME,
            tuple(Query(q.quantile(at, waits), name) for at, name in QUANTILES),
            "Asked for remote KV until it was there. Slower than a local prefill would be: check"
            " the network between"
            " prefill and decode, and how busy prefill is.",
            Unit.SECONDS,
            6,
            traces=LOAD_TRACES,
        ),
        Panel(
            "Loads by result",
            Kind.TIME,
            (Query(q.rate(ended, by=("result",)), "{{result}}"),),
            "`failed` and `partial` end by vLLM's kv_load_failure_policy. `aborted`: clients gave up while they"
            " waited.",
            Unit.REQUESTS,
            6,
            runbook="load_failed",
            stack=True,
            traces='{ name = "kv_transfer.load" && status = error }',
        ),
        Panel(
            "Oldest load by instance",
            Kind.TIME,
            (Query(f"max by (instance) ({q.oldest_load_age(SELECTED)})", "{{instance}}"),),
            "No line: nothing in flight. A straight rise: one load hangs, or the engine does."
            " Abort the request;"
            " restart the server if the engine does not answer.",
            Unit.SECONDS,
            6,
            thresholds=((LIMITS.load_age, RED),),
            runbook="KVShimLoadStuck",
        ),
        Panel(
            "Breakers",
            Kind.TIME,
            (Query(q.open_breakers(SELECTED, ("instance", "state")), "{{instance}} {{state}}"),),
            "Prefill servers that a decode server does not ask (open) or asks once as a trial (half_open).",
            Unit.COUNT,
            8,
            thresholds=((1, RED),),
            runbook="KVShimBreakerOpen",
        ),
        Panel(
            "Breaker transitions",
            Kind.TIME,
            (Query(moved, "to {{to}}"),),
            "Back and forth without end: a prefill server that answers sometimes. Take it out of the router.",
            Unit.REQUESTS,
            8,
            runbook="peer_unavailable",
        ),
        Panel(
            "Stamps checked on decode",
            Kind.TIME,
            (Query(q.rate(q.series(catalog.STAMPS, SELECTED), by=("result",)), "{{result}}"),),
            "`absent` everywhere: prefill runs without the shim or the router drops unknown"
            " keys; hand-off age and"
            " trace links are then missing. `mismatch`, `rejected`: hand-offs get mixed up or forged.",
            Unit.REQUESTS,
            8,
            runbook="handoff_mismatch",
        ),
    )


def prefill_panels() -> tuple[Panel, ...]:
    """Hand-offs, from issue to end."""
    made = q.rate(q.series(catalog.HANDOFFS, SELECTED), by=("result", "reason"))
    ends = q.rate(q.series(catalog.HANDOFFS_CLOSED, SELECTED), by=("result",))
    ages = q.series(catalog.HANDOFF_AGE_SECONDS, SELECTED, suffix="_bucket")
    return (
        Panel(
            "Hand-offs issued and missing",
            Kind.TIME,
            (Query(f"{made} > 0", "{{result}} {{reason}}"),),
            "Finished prefill requests. `missing` says why: decode will prefill these again. The"
            " runbook has every"
            " reason.",
            Unit.REQUESTS,
            8,
            runbook="KVShimPrefillIssuesNothing",
            stack=True,
        ),
        Panel(
            "Missing hand-offs, share by job",
            Kind.TIME,
            (Query(q.missing_handoff_share(SELECTED, by=("job",)), "{{job}}"),),
            "Over half pages. A few are normal: aborted requests and prompts shorter than a block.",
            Unit.SHARE,
            8,
            thresholds=((LIMITS.missing_share, RED),),
            runbook="KVShimPrefillIssuesNothing",
        ),
        Panel(
            "How hand-offs end",
            Kind.TIME,
            (Query(ends, "{{result}}"),),
            "`expired`: nobody read it before the lease ended. `unknown`: this connector does not say.",
            Unit.REQUESTS,
            8,
            runbook="KVShimHandoffsExpiring",
            stack=True,
            traces=HANDOFF_TRACES,
        ),
        Panel(
            "Pinned sends",
            Kind.TIME,
            (Query(q.total(q.handoffs_open(SELECTED), ("instance",)), "{{instance}}"),),
            "Hand-offs issued and not yet read: their blocks are kept. Grows without end: decode"
            " does not read, or"
            " the lease is too long.",
            Unit.COUNT,
            6,
            runbook="KVShimPrefillBlocksPinned",
        ),
        Panel(
            "Oldest pinned hand-off",
            Kind.TIME,
            (Query(f"max by (instance) ({q.oldest_handoff_age(SELECTED)})", "{{instance}}"),),
            "Beyond the lease (NIXL: kv_lease_duration, 30 s, longer while decode sends"
            " heartbeats) blocks are stuck.",
            Unit.SECONDS,
            6,
            thresholds=((LIMITS.pinned_age, ORANGE),),
            runbook="KVShimPrefillBlocksPinned",
        ),
        Panel(
            "Expired hand-offs, share by job",
            Kind.TIME,
            (Query(q.expired_handoff_share(SELECTED, by=("job",)), "{{job}}"),),
            "Prefill work that nobody used. A peak when decode scales down is normal, a level is not.",
            Unit.SHARE,
            6,
            thresholds=((LIMITS.expired_share, ORANGE),),
            runbook="KVShimHandoffsExpiring",
        ),
        Panel(
            "Hand-off age at decode",
            Kind.TIME,
            tuple(Query(q.quantile(at, ages), name) for at, name in QUANTILES),
            "Issued on prefill until admitted on decode, where stamps travel. Near the lease:"
            " decode queues too long.",
            Unit.SECONDS,
            6,
            runbook="handoff_expired",
        ),
    )


def check_panels() -> tuple[Panel, ...]:
    """The same facts as vLLM counts them."""
    shim = q.rate(q.series(catalog.REQUESTS, SELECTED, f'outcome!="{Outcome.ABORTED}"'))
    moved = q.rate(q.stock(q.NIXL_BYTES + "_sum", SELECTED))
    nixl = q.stock(q.NIXL_TIME + "_bucket", SELECTED)
    failed = (
        (q.NIXL_FAILED, "transfers failed"),
        (q.NIXL_EXPIRED, "hand-offs expired"),
        (q.NIXL_AFTER_EXPIRY, "reads after expiry"),
    )
    return (
        Panel(
            "Requests: shim and vLLM",
            Kind.TIME,
            (
                Query(shim, "shim, verdicts"),
                Query(q.rate(q.stock(q.STOCK_REQUESTS, SELECTED)), "vLLM, successes"),
            ),
            "Should run together; a verdict comes earlier than a success by the time of decoding. vLLM alone: a"
            " server without the shim, or a silent one.",
            Unit.REQUESTS,
            6,
            runbook="KVShimSilent",
        ),
        Panel(
            "Computed prompt tokens: shim and vLLM",
            Kind.TIME,
            (
                Query(q.explained_token_rate(SELECTED), "shim"),
                Query(q.local_token_rate(SELECTED), "vLLM local_compute"),
            ),
            "Should be equal but for one token a fully loaded request. vLLM counts loads as"
            " remote even when they"
            " fail later.",
            Unit.TOKENS_RATE,
            6,
            runbook="KVShimUnexplainedLocalPrefill",
        ),
        Panel(
            "Prompt tokens by source (vLLM)",
            Kind.TIME,
            (Query(q.rate(q.stock(q.STOCK_TOKENS, SELECTED), by=("source",)), "{{source}}"),),
            "vLLM's own split. On decode external_kv_transfer should dominate.",
            Unit.TOKENS_RATE,
            6,
            stack=True,
        ),
        Panel(
            "NIXL troubles (vLLM)",
            Kind.TIME,
            tuple(Query(q.rate(q.stock(name, SELECTED)), label) for name, label in failed),
            "Transfer failures belong to the network or the peer. Reads after expiry may be wrong answers. vLLM"
            " 0.28.0 does not count the last.",
            Unit.REQUESTS,
            6,
            runbook="KVShimReadAfterExpiry",
        ),
        Panel(
            "NIXL transfer time (vLLM)",
            Kind.TIME,
            tuple(Query(q.quantile(at, nixl), name) for at, name in QUANTILES),
            "The transfer alone. Much shorter than Load wait: the time goes into queues and"
            " handshakes, not the wire.",
            Unit.SECONDS,
            6,
        ),
        Panel(
            "NIXL bytes (vLLM)",
            Kind.TIME,
            (Query(moved, "received"),),
            "KV that crossed the network. Falls while requests do not: decode stopped pulling.",
            Unit.BYTES_RATE,
            6,
        ),
        Panel(
            "Router's decisions and decode's outcomes",
            Kind.TIME,
            (
                Query(q.router_decisions(SELECTED), "router: {{decision_type}}"),
                Query(q.outcome_rate(SELECTED, 'outcome=~"remote|local_prefill"'), "decode: {{outcome}}"),
            ),
            "Where llm-d's counter is scraped: `prefill-decode` well above `remote` means that"
            " hand-offs get lost"
            " between the router and decode; its sidecar falls back without a word to decode.",
            Unit.REQUESTS,
            12,
            runbook="params_missing",
        ),
    )


def error_panels() -> tuple[Panel, ...]:
    """The shim's own troubles."""
    return (
        Panel(
            "The shim's errors by hook",
            Kind.TIME,
            (Query(q.rate(q.series(catalog.ERRORS, SELECTED), by=("hook",)), "{{hook}}"),),
            "Contained exceptions; `inner` is the wrapped connector's own. Any: report the log's line, which"
            " names type and frames; SHIM_DISABLE=1 takes the shim out of the way.",
            Unit.REQUESTS,
            12,
            runbook="KVShimErrors",
        ),
        Panel(
            "Telemetry dropped",
            Kind.TIME,
            (Query(q.rate(q.series(catalog.STATS_DROPPED, SELECTED), by=("instance",)), "{{instance}}"),),
            "Records that never reached these panels: the numbers above are too low by them.",
            Unit.REQUESTS,
            12,
            runbook="KVShimStatsDropped",
        ),
    )


def board() -> Board:
    """The fleet dashboard."""
    return Board(
        links.FLEET_UID,
        "vLLM KV shim / Fleet",
        "Did decode pull its KV, why not, and what did it cost. Made by dashboards/generate.py: edit that.",
        (
            Row("Health", health_panels()),
            Row("Outcomes", outcome_panels()),
            Row("Why", why_panels()),
            Row("Cost", cost_panels()),
            Row("Loads", load_panels()),
            Row("Prefill side", prefill_panels()),
            Row("Cross-check against vLLM and the router", check_panels()),
            Row("The shim itself", error_panels()),
        ),
    )
