"""Read a vLLM server's `/metrics` and answer questions about it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import httpx

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
"""vLLM's own count of prompt tokens, by where their KV came from (vllm/v1/metrics/loggers.py)."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one scrape: name, labels and value."""

    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    @classmethod
    def parse(cls, text: str) -> Scrape:
        """Read the text format.

        Raises:
            ValueError: it is none.
        """
        families = text_string_to_metric_families(text)
        return cls(tuple((s.name, s.labels, float(s.value)) for family in families for s in family.samples))

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """A metric's values, summed over all labels but these, by these labels' values."""
        sums: dict[tuple[str, ...], float] = defaultdict(float)
        for found, its_labels, value in self.samples:
            if found == name:
                sums[tuple(its_labels.get(label, "") for label in labels)] += value
        return dict(sums)

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels; 0 where there is none."""
        return sum(
            value
            for found, its_labels, value in self.samples
            if found == name and labels.items() <= dict(its_labels).items()
        )

    def names(self) -> set[str]:
        """Every sample's name."""
        return {name for name, _, _ in self.samples}


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens of one server, by where their KV came from."""

    pulled: int = 0
    local: int = 0
    cached: int = 0

    @classmethod
    def of(cls, scrape: Scrape) -> Tokens:
        """As vLLM counts them."""

        def source(name: str) -> int:
            return int(scrape.total(BY_SOURCE, source=name))

        return cls(source("external_kv_transfer"), source("local_compute"), source("local_cache_hit"))

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.pulled + other.pulled, self.local + other.local, self.cached + other.cached)

    def __sub__(self, other: Tokens) -> Tokens:
        return Tokens(self.pulled - other.pulled, self.local - other.local, self.cached - other.cached)

    @property
    def total(self) -> int:
        """All of them."""
        return self.pulled + self.local + self.cached


def scrape(client: httpx.Client, url: str) -> Scrape:
    """Read the metrics of the server at `url`.

    Raises:
        httpx.HTTPError: it did not answer, or not with metrics.
    """
    response = client.get(f"{url}/metrics", timeout=30)
    response.raise_for_status()
    return Scrape.parse(response.text)


def sum_tokens(parts: Iterable[Tokens]) -> Tokens:
    """All of these together."""
    return sum(parts, Tokens())
