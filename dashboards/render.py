"""Draws a dashboard's layout with live data to a PNG, to look at where Grafana cannot be had.

`python -m dashboards.render --fake fleet.png` draws a fleet that is not there;
`python -m dashboards.render --prometheus http://localhost:9090 fleet.png` a real one.
Needs matplotlib. Grafana's grid, titles, units, thresholds and legends are kept; it exits with 1 when panels
overlap or a title does not fit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from . import check, fake, local
from .panels import COLUMNS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, ROW, GAP = 1600, 38, 8
"""Grafana's look at 1600 px: a grid row is 30 px and an 8 px gap."""

DPI = 100
CHARACTER = 4.6
"""Pixels that a character of a table's text takes, on average."""

BACK, CARD, INK, DIM, GRID = "#111217", "#181b1f", "#d8d9da", "#8e9297", "#2c3235"
COLOURS = {"green": "#56a64b", "yellow": "#e0b400", "orange": "#ff780a", "red": "#e02f44", "blue": "#3274d9"}
LINES = (
    "#7eb26d",
    "#eab839",
    "#6ed0e0",
    "#ef843c",
    "#e24d42",
    "#1f78c1",
    "#ba43a9",
    "#705da0",
    "#508642",
    "#cca300",
)


@dataclass(frozen=True, slots=True)
class Window:
    """What is drawn."""

    url: str
    start: float
    end: float
    variables: dict[str, str]

    def range(self, expr: str) -> list[dict[str, Any]]:
        """A panel's lines."""
        step = max(15.0, (self.end - self.start) / 240)
        text = check.filled(expr, self.variables)
        times = {"start": str(self.start), "end": str(self.end), "step": str(step)}
        result: list[dict[str, Any]] = check.ask(self.url, "query_range", query=text, **times)["result"]
        return result

    def instant(self, expr: str) -> list[dict[str, Any]]:
        """A panel's values at the end."""
        text = check.filled(expr, self.variables)
        result: list[dict[str, Any]] = check.ask(self.url, "query", query=text, time=str(self.end))["result"]
        return result


def shown(value: float, unit: str, decimals: int | None = None) -> str:
    """A value as Grafana would write it, more or less."""
    if math.isnan(value):
        return "NaN"
    if unit == "percentunit":
        return f"{value * 100:.{1 if decimals is None else decimals}f}%"
    suffix = {"reqps": " req/s", "s": " s", "tok/s": " tok/s", "Bps": "B/s"}.get(unit, "")
    if unit == "s" and abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {letter}{suffix.strip()}"
    return f"{value:.3g}{suffix}" if decimals is None else f"{value:.{decimals}f}{suffix}"


def named(legend: str, labels: dict[str, str]) -> str:
    """The line's name."""
    for label, value in labels.items():
        legend = legend.replace("{{" + label + "}}", value)
    return legend


def colour(panel: dict[str, Any], value: float) -> str:
    """By the panel's thresholds."""
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    chosen = [s["color"] for s in steps if s["value"] is None or value >= s["value"]]
    return COLOURS[chosen[-1]]


class Drawing:
    """One page."""

    def __init__(self, board: dict[str, Any], window: Window, rows: int | None = None) -> None:
        self.board = board
        self.window = window
        lines = rows or max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
        self.height = lines * ROW + 60
        self.figure: Figure = plt.figure(figsize=(WIDTH / DPI, self.height / DPI), dpi=DPI, facecolor=BACK)
        self.faults: list[str] = []
        self.lines = lines

    def draw(self) -> None:
        """Everything that is on the page."""
        self._text(12, 14, self.board["title"], 15, INK)
        chosen = "   ".join(
            f"{name}: All" for name in ("cluster", "namespace", "job", "role", "model", "instance")
        )
        self._text(12, 38, chosen, 9, DIM)
        self.faults += overlaps(self.board)
        for panel in self.board["panels"]:
            if panel["gridPos"]["y"] < self.lines:
                self._panel(panel)

    def _text(self, x: float, y: float, text: str, size: float, ink: str, **more: Any) -> Any:
        more = {"va": "top", **more}
        return self.figure.text(x / WIDTH, 1 - y / self.height, text, fontsize=size, color=ink, **more)

    def _panel(self, panel: dict[str, Any]) -> None:
        place = panel["gridPos"]
        column = (WIDTH - GAP) / COLUMNS
        x, y = GAP + place["x"] * column, 60 + place["y"] * ROW
        w, h = place["w"] * column - GAP, place["h"] * ROW - GAP
        if panel["type"] == "row":
            self._text(x + 4, y + 8, f"⌄ {panel['title']}", 12, INK, weight="bold")
            return
        corner = (x / WIDTH, 1 - (y + h) / self.height)
        self.figure.add_artist(
            Rectangle(
                corner,
                w / WIDTH,
                h / self.height,
                facecolor=CARD,
                edgecolor=GRID,
                transform=self.figure.transFigure,
                zorder=-2,
            )
        )
        title = self._text(x + 8, y + 6, panel["title"], 9.5, INK)
        box = title.get_window_extent(self.figure.canvas.get_renderer())  # type: ignore[attr-defined]
        if box.width > w - 30:  # the links' icon stands at the right
            self.faults.append(f"title does not fit: {panel['title']}")
        draw = {"stat": self._stat, "timeseries": self._lines, "table": self._table, "bargauge": self._bars}
        draw.get(panel["type"], self._words)(panel, x + 8, y + 26, w - 16, h - 32)

    def _axes(self, x: float, y: float, w: float, h: float) -> Axes:
        axes = self.figure.add_axes((x / WIDTH, 1 - (y + h) / self.height, w / WIDTH, h / self.height))
        axes.set_facecolor(CARD)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(colors=DIM, labelsize=7.5, length=0)
        return axes

    def _stat(self, panel: dict[str, Any], x: float, y: float, w: float, h: float) -> None:
        defaults = panel["fieldConfig"]["defaults"]
        found = self.window.instant(panel["targets"][0]["expr"])
        value = float(found[0]["value"][1]) if found else None
        text = (
            defaults.get("noValue", "-")
            if value is None
            else shown(value, defaults["unit"], defaults.get("decimals"))
        )
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        back = COLOURS["green"] if value is None and steps[0]["color"] == "green" else DIM
        back = back if value is None else colour(panel, value)
        corner = (x / WIDTH, 1 - (y + h) / self.height)
        self.figure.add_artist(
            Rectangle(
                corner, w / WIDTH, h / self.height, facecolor=back, transform=self.figure.transFigure, zorder=-1
            )
        )
        self._text(x + w / 2, y + h / 2, text, 17, "white", ha="center", va="center", weight="bold")

    def _lines(self, panel: dict[str, Any], x: float, y: float, w: float, h: float) -> None:
        defaults = panel["fieldConfig"]["defaults"]
        series = [
            (named(target.get("legendFormat", ""), item["metric"]), item["values"])
            for target in panel["targets"]
            for item in self.window.range(target["expr"])
        ]
        legend = self._fit_legend([name for name, _ in series], w)
        axes = self._axes(x + 58, y, w - 62, h - 22 - 14 * len(legend))
        axes.set_xlim(self.window.start, self.window.end)
        axes.grid(color=GRID, linewidth=0.6)
        if not series:
            axes.text(0.5, 0.5, "No data", transform=axes.transAxes, color=DIM, ha="center", fontsize=10)
        stacked = defaults["custom"].get("stacking", {}).get("mode") == "normal"
        self._plot(axes, series, stacked=stacked)
        for step in defaults["thresholds"]["steps"][1:]:
            axes.axhline(step["value"], color=COLOURS[step["color"]], linestyle="--", linewidth=0.9)
        low, high = axes.get_ylim()
        axes.set_ylim(0, max(high, 1e-9) if defaults["unit"] != "percentunit" else min(1.02, max(high, 0.3)))
        del low
        axes.yaxis.set_major_formatter(lambda v, _: shown(v, defaults["unit"]))
        axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda v, _: time.strftime("%H:%M", time.gmtime(v)))
        for row, names in enumerate(legend):
            left = x + 4
            for index, name, width in names:
                top = y + h - 14 * (len(legend) - row)
                self._text(left, top, "▬", 7, LINES[index % len(LINES)])
                self._text(left + 12, top, name, 7.5, INK)
                left += width

    def _fit_legend(self, names: list[str], width: float) -> list[list[tuple[int, str, float]]]:
        rows: list[list[tuple[int, str, float]]] = [[]]
        left = 0.0
        for index, name in enumerate(names[:12]):
            need = 24 + 5.6 * len(name)
            if left + need > width and rows[-1]:
                rows.append([])
                left = 0.0
            rows[-1].append((index, name, need))
            left += need
        return rows[:3]

    @staticmethod
    def _plot(axes: Axes, series: list[tuple[str, list[Any]]], *, stacked: bool) -> None:
        grid = sorted({stamp for _, values in series for stamp, _ in values})
        base = dict.fromkeys(grid, 0.0)
        for index, (_, values) in enumerate(series):
            ink = LINES[index % len(LINES)]
            if stacked:
                here = {t: (0.0 if math.isnan(float(v)) else float(v)) for t, v in values}
                top = {t: base[t] + here.get(t, 0.0) for t in grid}
                axes.fill_between(
                    grid, list(base.values()), list(top.values()), color=ink, alpha=0.6, linewidth=0.6
                )
                base = top
            else:
                axes.plot([t for t, _ in values], [float(v) for _, v in values], color=ink, linewidth=1.2)

    def _table(self, panel: dict[str, Any], x: float, y: float, w: float, h: float) -> None:
        options = panel["transformations"][0]["options"]
        order = sorted(options["indexByName"], key=options["indexByName"].__getitem__)
        names = {key: options["renameByName"][key] for key in order}
        rows = [item["metric"] for item in self.window.instant(panel["targets"][0]["expr"])]
        widths = {
            key: max(len(head), *(len(row.get(key, "")) for row in rows or [{}])) + 1.5
            for key, head in names.items()
        }
        scale = w / sum(widths.values())
        if scale < CHARACTER:
            self.faults.append(f"table too wide: {panel['title']}")
        left = x
        for key, head in names.items():
            self._text(left, y, head, 8, DIM, weight="bold")
            for index, row in enumerate(rows[: int(h // 18) - 1]):
                self._text(left, y + 20 + index * 18, row.get(key, ""), 7.8, INK)
            left += widths[key] * scale

    def _bars(self, panel: dict[str, Any], x: float, y: float, w: float, h: float) -> None:
        defaults = panel["fieldConfig"]["defaults"]
        target = panel["targets"][0]
        found = [
            (named(target["legendFormat"], i["metric"]), float(i["value"][1]))
            for i in self.window.instant(target["expr"])
        ]
        found = sorted(found, key=lambda item: -item[1])
        if not found:
            self._text(
                x + w / 2, y + h / 2, defaults.get("noValue", "No data"), 10, DIM, ha="center", va="center"
            )
        most = max((value for _, value in found), default=1) or 1
        each = min(30.0, h / max(len(found), 1))
        for index, (name, value) in enumerate(found):
            top = y + index * each
            label = 7 * max(len(n) for n, _ in found) + 8
            room = w - label - 76
            corner = ((x + label) / WIDTH, 1 - (top + each - 4) / self.height)
            bar = Rectangle(
                corner, room * value / most / WIDTH, (each - 6) / self.height, facecolor=colour(panel, value),
                transform=self.figure.transFigure,
            )  # fmt: skip
            self.figure.add_artist(bar)
            self._text(x, top + each / 2 - 1, name, 8, INK, va="center")
            text = shown(value, defaults["unit"], defaults.get("decimals"))
            self._text(x + w, top + each / 2 - 1, text, 8, INK, ha="right", va="center")

    def _words(self, panel: dict[str, Any], x: float, y: float, w: float, h: float) -> None:
        wide = int(w / 5.8)
        lines = [
            part
            for line in panel["options"]["content"].splitlines()
            for part in textwrap.wrap(line, wide) or [""]
        ]
        self._text(x, y, "\n".join(lines[: int(h / 13)]).replace("**", "").replace("$", r"\$"), 8, INK)
        if len(lines) > int(h / 13):
            self.faults.append(f"text is cut: {panel['title']}")


def overlaps(board: dict[str, Any]) -> list[str]:
    """Pairs of panels that share a cell of the grid, and panels outside it."""
    taken: dict[tuple[int, int], str] = {}
    found = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        if place["x"] + place["w"] > COLUMNS:
            found.add(f"outside the grid: {panel['title']}")
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            if cell in taken:
                found.add(f"overlap: {taken[cell]} and {panel['title']}")
            taken[cell] = panel["title"]
    return sorted(found)


def pretend(folder: Path, end: float, hours: float = 3) -> None:
    """A past of two decode and two prefill servers with a bad half hour."""
    start = end - hours * 3600

    def versions(role: str, expect: str) -> tuple[str, ...]:
        return ("0.1.0", "0.32.0", "NixlConnector", role, "recompute", expect, "active")

    servers = []
    for index in range(2):
        decode = fake.Exporter(versions("kv_consumer", "always"), started=start - 600)
        decode.gauges |= {
            ("vllm:num_requests_running", ()): 40.0, ("vllm:num_requests_waiting", ()): 2.0,
            ("vllm:kv_cache_usage_perc", ()): 0.61, ("peers", ("open",)): float(index),
        }  # fmt: skip
        prefill = fake.Exporter(versions("kv_producer", "never"), started=start - 600)
        prefill.gauges |= {
            ("vllm:kv_cache_usage_perc", ()): 0.35,
            ("oldest_handoff_start_timestamp_seconds", ()): end - 9,
        }
        place = {"cluster": "eu-1", "namespace": "llm"}
        servers.append(
            (
                {**place, "job": "decode", "role": "decode", "instance": f"decode-{index}:8000"},
                decode,
                fake.decode_story,
            )
        )
        servers.append(
            (
                {**place, "job": "prefill", "role": "prefill", "instance": f"prefill-{index}:8000"},
                prefill,
                fake.prefill_story,
            )
        )
    local.backfill(folder, fake.openmetrics(servers, start, end, 30))


def main() -> None:
    """Draw one dashboard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--board", type=Path, default=check.GENERATED / "fleet.json")
    parser.add_argument("--prometheus", default="")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--hours", type=float, default=3)
    parser.add_argument("--rows", type=int, help="draw only so many rows of the grid; 28 are one screen")
    parser.add_argument("--variable", action="append", default=[], help="name=value")
    options = parser.parse_args()
    board = json.loads(options.board.read_text(encoding="utf-8"))
    variables = {**check.VARIABLES, "__range": f"{int(options.hours * 3600)}s"}
    variables |= dict(item.split("=", 1) for item in options.variable)
    end = math.floor(time.time() / 60) * 60 - 60.0 if options.fake else time.time()

    def draw(url: str) -> Drawing:
        drawing = Drawing(board, Window(url, end - options.hours * 3600, end, variables), options.rows)
        drawing.draw()
        drawing.figure.savefig(options.out, facecolor=BACK)
        return drawing

    if options.fake:
        with tempfile.TemporaryDirectory() as folder:
            pretend(Path(folder), end, options.hours)
            with local.prometheus(Path(folder), interval="1m") as url:
                drawing = draw(url)
    else:
        drawing = draw(options.prometheus.rstrip("/"))
    for fault in drawing.faults:
        sys.stdout.write(f"{fault}\n")
    sys.exit(1 if drawing.faults else 0)


if __name__ == "__main__":
    main()
