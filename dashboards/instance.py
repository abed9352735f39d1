"""The instance dashboard: one server, engine by engine, beside its own queue and cache."""

from __future__ import annotations

from shim.telemetry import catalog

from . import fleet, links
from . import queries as q
from .panels import ORANGE, RED, Board, Kind, Panel, Query, Row, Unit
from .queries import SELECTED


def engine_panels() -> tuple[Panel, ...]:
    """What the engine does besides."""
    by_state = (
        Query(q.total(q.stock(q.STOCK_RUNNING, SELECTED), ("engine",)), "running, engine {{engine}}"),
        Query(q.total(q.stock(q.STOCK_WAITING, SELECTED), ("engine",)), "waiting, engine {{engine}}"),
    )
    cache = f"max by (engine) ({q.stock(q.STOCK_CACHE, SELECTED)})"
    return (
        Panel(
            "Requests in the engine",
            Kind.TIME,
            by_state,
            "Waiting grows on decode: local prefills or a full cache hold everybody up. Requests"
            " that wait for remote"
            " KV count as waiting.",
            Unit.COUNT,
            8,
        ),
        Panel(
            "KV cache in use",
            Kind.TIME,
            (Query(cache, "engine {{engine}}"),),
            "Full on prefill: pinned hand-offs may be the cause (row Prefill side). Full on"
            " decode: requests get"
            " preempted and computed again.",
            Unit.SHARE,
            8,
            thresholds=((0.9, ORANGE), (0.98, RED)),
        ),
        Panel(
            "Preemptions",
            Kind.TIME,
            (Query(q.rate(q.stock(q.STOCK_PREEMPTIONS, SELECTED), by=("engine",)), "engine {{engine}}"),),
            "Each one's prompt is computed again: kind `recomputed` in row Cost. More KV cache"
            " or fewer sequences.",
            Unit.REQUESTS,
            8,
        ),
    )


def split_panels() -> tuple[Panel, ...]:
    """Where the fleet dashboard adds up, this one splits."""
    params = q.rate(q.series(catalog.PARAMS, SELECTED), by=("source", "endpoint"))
    reasons = q.rate(
        q.series(catalog.REQUESTS, SELECTED, f'reason=~"{q.FAULTS}"'), by=("engine", "outcome", "reason")
    )
    loads = q.total(q.loads_in_flight(SELECTED), ("engine",))
    return (
        Panel(
            "Faults by engine, outcome and reason",
            Kind.TIME,
            (Query(f"{reasons} > 0", "engine {{engine}}: {{outcome}}, {{reason}}"),),
            "One engine of a data-parallel server alone: its peer addresses or its side channel differ.",
            Unit.REQUESTS,
            8,
            traces=fleet.REASON_TRACES,
            stack=True,
        ),
        Panel(
            "Params by source and endpoint",
            Kind.TIME,
            (Query(f"{params} > 0", "{{source}} {{endpoint}}"),),
            "Which routes this server gets hand-offs on, and who found the params.",
            Unit.REQUESTS,
            8,
            runbook="params_missing",
        ),
        Panel(
            "Loads in flight by engine",
            Kind.TIME,
            (Query(loads, "engine {{engine}}"),),
            "Grows on one engine only: that engine hangs; its log says more.",
            Unit.COUNT,
            8,
            runbook="KVShimLoadStuck",
        ),
    )


def board() -> Board:
    """The instance dashboard."""
    return Board(
        links.INSTANCE_UID,
        "vLLM KV shim / Instance",
        "One server: what it pulled, what it computed, and what its engine did meanwhile."
        " Made by dashboards/generate.py: edit that.",
        (
            Row("Health", fleet.health_panels()),
            Row("Outcomes", fleet.outcome_panels()),
            Row("Why, by engine", split_panels()),
            Row("Engine", engine_panels()),
            Row("Cost", fleet.cost_panels()),
            Row("Loads", fleet.load_panels()),
            Row("Prefill side", fleet.prefill_panels()),
            Row("Cross-check against vLLM", fleet.check_panels()[:6]),
            Row("The shim itself", fleet.error_panels()),
        ),
        one_instance=True,
    )
