"""Panels as data: what a dashboard shows, apart from how Grafana's JSON says it (`board` does that)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

COLUMNS = 24
"""Width of Grafana's grid."""

GREEN, YELLOW, ORANGE, RED, BLUE = "green", "yellow", "orange", "red", "blue"


class Kind(StrEnum):
    """Grafana's panel types that are used."""

    STAT = "stat"
    TIME = "timeseries"
    TABLE = "table"
    BARS = "bargauge"
    TEXT = "text"


class Unit(StrEnum):
    """Grafana's unit ids that are used."""

    SHARE = "percentunit"
    REQUESTS = "reqps"
    SECONDS = "s"
    COUNT = "short"
    TOKENS_RATE = "tok/s"
    BYTES_RATE = "Bps"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the name of its lines."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: unique on its dashboard; the panel's id follows from it.
        description: what it says and what to do about it.
        base: colour below the first threshold.
        thresholds: lower bound and colour, ascending.
        runbook: the runbook entry that its link opens.
        traces: a TraceQL condition for the "traces" link of its lines, "" for none.
        by_reason: its lines are reasons: each links to its own runbook entry.
        columns: a table's columns in order, by label, with their headings.
    """

    title: str
    kind: Kind
    queries: tuple[Query, ...]
    description: str
    unit: Unit = Unit.COUNT
    width: int = 8
    height: int = 8
    base: str = GREEN
    thresholds: tuple[tuple[float, str], ...] = ()
    runbook: str = ""
    traces: str = ""
    by_reason: bool = False
    stack: bool = False
    decimals: int | None = None
    no_value: str = ""
    columns: tuple[tuple[str, str], ...] = ()
    markdown: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A headed group of panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard.

    Attributes:
        one_instance: `instance` takes one value, not several.
        variables: whether it asks Prometheus at all.
    """

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    one_instance: bool = False
    variables: bool = True


@dataclass(frozen=True, slots=True)
class Placed:
    """A panel's place on the grid."""

    panel: Panel
    x: int
    y: int


@dataclass(slots=True)
class _Skyline:
    tops: list[int] = field(default_factory=lambda: [0] * COLUMNS)

    def put(self, width: int, height: int) -> tuple[int, int]:
        """The highest, then leftmost place where the panel fits."""
        places = [(max(self.tops[x : x + width]), x) for x in range(COLUMNS - width + 1)]
        y, x = min(places)
        self.tops[x : x + width] = [y + height] * width
        return x, y


def place(row: Row, top: int) -> tuple[list[Placed], int]:
    """Places a row's panels below its heading at `top`; gives them and where the next row begins."""
    skyline = _Skyline([top + 1] * COLUMNS)
    placed = [Placed(panel, *skyline.put(panel.width, panel.height)) for panel in row.panels]
    return placed, max(skyline.tops)
