"""What the demo prints: the traffic's cost by route, and the counters that rose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from shim.verdict import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shim.cli.measure import Row
    from shim.cli.metrics import Scrape
    from shim.telemetry.catalog import Metric

RATIO_LIMIT = 1.10
"""The shim's routes may take this much longer than completions, by the median."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One pair of servers and what the traffic cost there."""

    title: str
    rows: dict[Endpoint, Row]

    def ratio(self, endpoint: Endpoint) -> float:
        """This route's median decode time over that of completions."""
        return self.rows[endpoint].median_seconds / self.rows[Endpoint.COMPLETIONS].median_seconds

    def slowest(self) -> float:
        """The largest of the ratios."""
        return max(self.ratio(endpoint) for endpoint in self.rows)


def traffic(version: str, length: int, phases: Sequence[Phase]) -> Table:
    """The one table: what each route cost in each phase.

    Args:
        version: vLLM's.
        length: of a prompt, in tokens.
        phases: what was measured.
    """
    table = Table(
        title=f"vLLM {version}, prompts of {length:,} tokens, routes in turns; tokens as decode's "
        "own vllm:prompt_tokens_by_source_total counts them",
        title_justify="left",
    )
    table.add_column("connector")
    table.add_column("route")
    for heading in ("hand-offs", "tokens pulled", "tokens prefilled locally", "median decode", "ratio"):
        table.add_column(heading, justify="right")
    for phase in phases:
        for endpoint, row in phase.rows.items():
            ratio = phase.ratio(endpoint)
            table.add_row(
                phase.title if endpoint is Endpoint.COMPLETIONS else "",
                endpoint.value,
                _coloured(f"{row.handoffs} of {len(row.samples)}", good=row.handoffs == len(row.samples)),
                f"{row.tokens.pulled:,}",
                _coloured(f"{row.tokens.local:,}", good=row.pulls == len(row.samples)),
                f"{row.median_seconds:.2f} s",
                _coloured(f"{ratio:.2f}", good=ratio <= RATIO_LIMIT),
            )
        table.add_section()
    return table


def _coloured(text: str, *, good: bool) -> str:
    return text if good else f"[red]{text}[/]"


def risen(metrics: Sequence[Metric], before: Scrape, after: Scrape, title: str) -> Table:
    """The series of these metrics that rose between two scrapes."""
    table = Table(title=title, title_justify="left")
    table.add_column("counter")
    table.add_column("labels")
    table.add_column("increase", justify="right")
    for metric in metrics:
        for labels, increase in increases(metric, before, after):
            named = ", ".join(f"{name}={value}" for name, value in zip(metric.labels, labels, strict=True))
            table.add_row(metric.wire_name, named, f"{increase:,.0f}")
    return table


def increases(metric: Metric, before: Scrape, after: Scrape) -> Iterator[tuple[tuple[str, ...], float]]:
    """Label values and increase of each series of a counter that rose."""
    old = before.by(metric.wire_name, *metric.labels)
    for labels, value in after.by(metric.wire_name, *metric.labels).items():
        increase = value - old.get(labels, 0.0)
        if increase > 0:
            yield labels, increase
