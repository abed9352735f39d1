"""The recording and alerting rules, as data; `generate` writes them for Prometheus and for its operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shim.telemetry import catalog
from shim.verdict import Outcome, Reason

from . import links
from . import queries as q
from .limits import LIMITS, RATIO_WINDOWS, Limits

PREFIX = "KVShim"
RATIO = "kv_shim:fault_ratio"
PULLABLE_RATE = "kv_shim:pullable_requests:rate5m"
TARGET_INFO = "kv_shim:target_info"

CRITICAL, WARNING, TICKET = "critical", "warning", "ticket"
"""Severities: wake somebody, tell the channel, file a ticket."""

ON_GROUP = f"on ({', '.join(q.GROUP)})"
ON_TARGET = f"on ({', '.join(q.TARGET)})"
ON_SERVER = f"on ({', '.join(q.SERVER)})"
ALL = q.EVERYTHING
DECODE = 'role="decode"'


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule.

    Attributes:
        name: also its heading in the runbook.
        for_seconds: how long the expression must hold.
        summary: one line; may use `$labels` and `$value`.
        description: what it means and what to do first.
    """

    name: str
    expr: str
    severity: str
    for_seconds: int
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        """As Prometheus wants it."""
        rule: dict[str, Any] = {"alert": self.name, "expr": self.expr}
        if self.for_seconds:
            rule["for"] = duration(self.for_seconds)
        rule["labels"] = {"severity": self.severity}
        rule["annotations"] = {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": links.GRAFANA_URL + links.runbook_path(self.name),
            "dashboard_url": f"{links.GRAFANA_URL}/d/{links.FLEET_UID}",
        }
        return rule


def duration(seconds: int) -> str:
    """Prometheus notation."""
    return f"{seconds // 60}m" if seconds % 60 == 0 else f"{seconds}s"


def recordings() -> list[dict[str, Any]]:
    """The ratio over each window, its traffic, and `info` cut to one series a target."""
    rules: list[dict[str, Any]] = [
        {"record": RATIO, "labels": {"window": window}, "expr": q.fault_ratio(ALL, window, q.GROUP)}
        for window in RATIO_WINDOWS
    ]
    rules.append({"record": PULLABLE_RATE, "expr": q.pullable_rate(ALL, "5m", q.GROUP)})
    # Data-parallel engines, and a restart within the look-back, make several `info` series of one target.
    newest = (
        f"topk by ({', '.join(q.TARGET)}) (1, max without (engine, model_name) ({q.series(catalog.INFO, ALL)}))"
    )
    rules.append({"record": TARGET_INFO, "expr": newest})
    return rules


def alerts(limits: Limits = LIMITS) -> list[Alert]:
    """Every alert, in the order of the runbook."""
    return [*_ratio(limits), *_decode(limits), *_prefill(limits), *_shim(limits), *_stock(limits)]


def _ratio_is_over(window: str, bound: float) -> str:
    return f'max without (window) ({RATIO}{{window="{window}"}}) > {_number(bound)}'


def _number(value: float) -> str:
    return f"{round(value, 6):g}"


def _ratio(x: Limits) -> list[Alert]:
    busy = f"and {ON_GROUP} ({PULLABLE_RATE} > {_number(x.ratio_floor)})"
    budget = 1 - x.objective

    def burn(factor: float, long: str, short: str) -> str:
        bound = factor * budget
        return f"{_ratio_is_over(long, bound)}\nand {ON_GROUP} ({_ratio_is_over(short, bound)})"

    where = "{{ $labels.job }} ({{ $labels.model_name }})"
    return [
        Alert(
            "KVShimFaultRatioHigh",
            f"{_ratio_is_over('5m', x.ratio_warning)}\n{busy}",
            WARNING,
            x.ratio_warning_for,
            f"{{{{ $value | humanizePercentage }}}} of the requests to {where} did not pull their KV",
            "Decode is doing prefill's work for them. Open the fleet dashboard, row Why: the"
            " biggest reason has a"
            " runbook entry of its own.",
        ),
        Alert(
            "KVShimFaultRatioCritical",
            f"{_ratio_is_over('5m', x.ratio_critical)}\n{busy}",
            CRITICAL,
            x.ratio_critical_for,
            f"{{{{ $value | humanizePercentage }}}} of the requests to {where} did not pull their KV",
            "At this share decode servers are slowed down for everybody. Look at row Why of the"
            " fleet dashboard; undo"
            " the last change of the router or of prefill if there was one.",
        ),
        Alert(
            "KVShimBudgetBurnFast",
            burn(x.burn_fast, "1h", "5m"),
            CRITICAL,
            x.burn_fast_for,
            f"{where} burns its budget of local prefills so fast that a month's lasts two days",
            "{{ $value | humanizePercentage }} of the last hour's requests did not pull, and it"
            " goes on. Objective:"
            f" {_number(x.objective * 100)} % pull.",
        ),
        Alert(
            "KVShimBudgetBurnSlow",
            burn(x.burn_slow, "6h", "30m"),
            WARNING,
            x.burn_slow_for,
            f"{where} burns its budget of local prefills so fast that a month's lasts five days",
            "{{ $value | humanizePercentage }} of the last six hours' requests did not pull, and it goes on."
            f" Objective: {_number(x.objective * 100)} % pull.",
        ),
    ]


def _decode(x: Limits) -> list[Alert]:
    where = "{{ $labels.instance }} ({{ $labels.job }})"
    requests = catalog.REQUESTS

    def grew(outcome: Outcome, reasons: str, window: str) -> str:
        return q.growth(
            q.series(requests, ALL, f'outcome="{outcome}"', f'reason=~"{reasons}"'), window, q.SERVER
        )

    local = f"{grew(Outcome.LOCAL_PREFILL, q.OPERATOR, '10m')} > 0"
    unnoticed = (
        f"({grew(Outcome.LOCAL_INTENDED, Reason.NOT_DISAGGREGATED, '10m')} > 0)\n"
        f'  and {ON_TARGET} {TARGET_INFO}{{expect_remote="auto"}}\n'
        f"  and {ON_SERVER} ({grew(Outcome.REMOTE, Reason.NONE, '1d')} > 0)"
    )
    by_reason = (*q.GROUP, "reason")
    unusable = q.rate(q.series(requests, ALL, f'reason=~"{q.UNUSABLE}"'), "5m", by_reason)
    client = q.rate(q.series(requests, ALL, f'reason=~"{q.CLIENT}"'), "5m", by_reason)
    return [
        Alert(
            "KVShimNothingPulled",
            f"(\n  {local}\n  or\n  {unnoticed}\n)\n"
            f"and {ON_SERVER} ({grew(Outcome.REMOTE, Reason.NONE, '5m')} == 0)",
            CRITICAL,
            x.nothing_pulled_for,
            f"{where} prefills everything itself",
            "Requests come in, and not one pulled its KV. The router sends no hand-off to this"
            " server, or none of"
            " its prefill servers answers.",
        ),
        Alert(
            "KVShimParamsBroken",
            f"{unusable} > {_number(x.params_broken)}",
            WARNING,
            x.params_broken_for,
            "{{ $labels.job }} gets requests whose transfer params are of no use ({{ $labels.reason }})",
            "{{ $value | humanize }} requests/s reach decode without usable params. Compare the"
            " router's version and"
            " the endpoint in use (fleet dashboard, By endpoint) with what worked before.",
        ),
        Alert(
            "KVShimClientParamsRefused",
            f"{client} > {_number(x.client_params)}",
            TICKET,
            x.client_params_for,
            "{{ $labels.job }} refuses transfer params that clients send ({{ $labels.reason }})",
            "{{ $value | humanize }} requests/s fail the screen and are prefilled locally."
            " Nothing is broken here;"
            " find the client in the log (one line a reason) and tell its owner.",
        ),
        Alert(
            "KVShimBreakerOpen",
            f"{q.open_breakers(ALL, q.SERVER)} > {_number(x.breaker_open)}",
            WARNING,
            x.breaker_open_for,
            f"{where} no longer asks {{{{ $value }}}} of its prefill servers",
            "Loads from them failed one after another; requests for them are prefilled locally until one gets"
            " through. See whether those prefill servers run and can be reached.",
        ),
        Alert(
            "KVShimLoadStuck",
            f"max by ({', '.join(q.SERVER)}) (\n{q.oldest_load_age(ALL)}\n) > {_number(x.load_age)}",
            CRITICAL,
            x.load_age_for,
            f"A request on {where} has waited {{{{ $value | humanizeDuration }}}} for its KV",
            "The load neither ends nor fails, or the engine itself hangs. The request holds its"
            " blocks meanwhile.",
        ),
    ]


def _prefill(x: Limits) -> list[Alert]:
    where = "{{ $labels.instance }} ({{ $labels.job }})"
    group = "{{ $labels.job }}"
    return [
        Alert(
            "KVShimPrefillBlocksPinned",
            f"max by ({', '.join(q.SERVER)}) (\n{q.oldest_handoff_age(ALL)}\n) > {_number(x.pinned_age)}",
            WARNING,
            x.pinned_age_for,
            f"{where} has kept blocks for decode for {{{{ $value | humanizeDuration }}}}",
            "A hand-off was issued and neither read nor given up. Pinned blocks are lost to new prompts.",
        ),
        Alert(
            "KVShimPrefillIssuesNothing",
            f"{q.missing_handoff_share(ALL, '5m', q.GROUP)}\n> {_number(x.missing_share)}",
            CRITICAL,
            x.missing_share_for,
            f"{{{{ $value | humanizePercentage }}}} of the prefills on {group} end without a hand-off",
            "Decode will prefill these prompts again. Fleet dashboard, row Prefill side, says"
            " why none was issued.",
        ),
        Alert(
            "KVShimHandoffsExpiring",
            f"{q.expired_handoff_share(ALL, '5m', q.GROUP)}\n> {_number(x.expired_share)}",
            WARNING,
            x.expired_share_for,
            f"{{{{ $value | humanizePercentage }}}} of the hand-offs of {group} are never read",
            "Prefill works for nothing and keeps the blocks until the lease ends: decode is"
            " overloaded, down, or"
            " does not get the hand-offs.",
        ),
        Alert(
            "KVShimReadAfterExpiry",
            f"{q.growth(q.stock(q.NIXL_AFTER_EXPIRY, ALL), '10m', q.SERVER)} > {_number(x.reads_after_expiry)}",
            CRITICAL,
            0,
            f"Decode read blocks of {where} after their lease had ended",
            "The blocks may already have held another prompt's KV: answers may be wrong. Make the lease longer"
            " (kv_lease_duration) and find out why decode is late. vLLM 0.28.0 does not count this.",
        ),
    ]


def _shim(x: Limits) -> list[Alert]:
    where = "{{ $labels.instance }} ({{ $labels.job }})"
    by_hook = (*q.TARGET, "role", "hook")
    inside = q.growth(q.series(catalog.ERRORS, ALL), "10m", by_hook)
    at_entry = q.growth(q.series(catalog.ENTRYPOINT, ALL, 'event="hook_error"'), "10m", (*q.TARGET, "role"))
    succeeded = q.growth(q.stock(q.STOCK_REQUESTS, ALL), "10m", (*q.TARGET, "role"))
    # A verdict comes with the prompt, vLLM's success at the end: half an hour covers long answers.
    counted = q.growth(q.series(catalog.REQUESTS, ALL), "30m", q.TARGET)
    return [
        Alert(
            "KVShimErrors",
            f'(\n  {inside}\n  or\n  label_replace({at_entry}, "hook", "entrypoint", "", "")\n)'
            f" > {_number(x.shim_errors)}",
            WARNING,
            0,
            f"Exceptions in {{{{ $labels.hook }}}} on {where}",
            'Contained: requests go on, at worst prefilled locally as shim_error. hook="inner" is the wrapped'
            " connector's own exception, passed on. The log names type and frames.",
        ),
        Alert(
            "KVShimSilent",
            f"({succeeded} > {_number(x.silent_requests)})\n"
            f"unless {ON_TARGET} ({counted} > 0)\n"
            f'and {ON_TARGET} {TARGET_INFO}{{state!="disabled"}}',
            WARNING,
            x.silent_for,
            f"{where} serves requests and the shim sees none of them",
            "The dashboards show nothing for this server although the shim is installed there:"
            " its hooks are not in place in this vLLM, or do not deliver. The log of the server's start"
            " says more.",
        ),
        Alert(
            "KVShimStatsDropped",
            f"{q.growth(q.series(catalog.STATS_DROPPED, ALL), '10m', (*q.TARGET, 'role'))} > "
            f"{_number(x.stats_dropped)}",
            TICKET,
            0,
            f"{where} lost {{{{ $value | humanize }}}} telemetry records",
            "Counts on the dashboards are too low by these; requests are not affected.",
        ),
    ]


def _stock(x: Limits) -> list[Alert]:
    """From vLLM's own series, for servers where the shim cannot speak for itself."""
    where = "{{ $labels.instance }} ({{ $labels.job }})"
    target = (*q.TARGET, "role")
    by = ", ".join(target)
    present = f"{q.stock(q.NIXL_FAILED, ALL, DECODE)} or {q.stock(q.STOCK_RUNNING, ALL, DECODE)}"
    local = q.local_token_rate(ALL, DECODE, window="5m", by=target)
    explained = q.explained_token_rate(q.Scope((DECODE,)), "5m", target)
    unexplained = f"({local} - ({explained} or 0 * {local}))"
    everything = q.rate(q.stock(q.STOCK_TOKENS, ALL, DECODE), "5m", target)
    return [
        Alert(
            "KVShimMissing",
            f"group by ({by}) ({present})\nunless {ON_TARGET} {TARGET_INFO}",
            WARNING,
            x.shim_missing_for,
            f"{where} is a decode server without the shim",
            "Local prefills on it are not counted and lost params are not recovered. Start it with"
            ' kv_connector "shim", or relabel it if it is no decode server.',
        ),
        Alert(
            "KVShimUnexplainedLocalPrefill",
            f"{unexplained} / {everything} > {_number(x.unexplained_share)}\n"
            f"and {unexplained} > {_number(x.unexplained_floor)}",
            WARNING,
            x.unexplained_for,
            f"{where} computes {{{{ $value | humanizePercentage }}}} of its prompt tokens and nothing says why",
            "By vLLM's own count this decode server prefills, and no shim accounts for it."
            " Without the shim: install"
            " it to learn the reason. With it: the two counts differ, which is a defect of the shim.",
        ),
    ]


def groups(limits: Limits = LIMITS) -> list[dict[str, Any]]:
    """One group: Prometheus evaluates it in order, so that an alert sees that round's recordings."""
    rules = [*recordings(), *(alert.rule() for alert in alerts(limits))]
    return [{"name": "kv-shim", "interval": "30s", "rules": rules}]
