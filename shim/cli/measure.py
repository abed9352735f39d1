"""Send traffic through a router and say, from vLLM's own counters, what it cost on decode."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shim.cli.metrics import Tokens, scrape, sum_tokens
from shim.cli.router import Prompt

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from shim.cli.router import Exchange, Router
    from shim.verdict import Endpoint

TAIL = 1
"""Tokens of a prompt that decode may compute although all of its KV came: it needs the last one's logits."""

_COUNTED_WITHIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One exchange and where decode got its prompt's tokens from."""

    exchange: Exchange
    tokens: Tokens

    @property
    def pulled(self) -> bool:
        """Whether prefill handed over and decode computed no more than the tail."""
        return self.exchange.handoff is not None and self.tokens.pulled > 0 and self.tokens.local <= TAIL


@dataclass(frozen=True, slots=True)
class Row:
    """The samples of one route."""

    endpoint: Endpoint
    samples: tuple[Sample, ...]

    @property
    def handoffs(self) -> int:
        """How many of them prefill gave params for."""
        return sum(sample.exchange.handoff is not None for sample in self.samples)

    @property
    def pulls(self) -> int:
        """How many of them were pulled whole."""
        return sum(sample.pulled for sample in self.samples)

    @property
    def tokens(self) -> Tokens:
        """Prompt tokens on decode."""
        return sum_tokens(sample.tokens for sample in self.samples)

    @property
    def median_seconds(self) -> float:
        """The median round trip to decode."""
        return statistics.median(sample.exchange.decode_seconds for sample in self.samples)


def count(router: Router, endpoint: Endpoint, prompt: Prompt, *, lose: bool = False) -> Sample:
    """Send one request and read decode's counters around it; nothing else may be under way."""
    before = Tokens.of(scrape(router.client, router.decode))
    exchange = router.send(endpoint, prompt, lose=lose)
    return Sample(exchange, counted(router, before, exchange.prompt_tokens))


def counted(router: Router, before: Tokens, at_least: int) -> Tokens:
    """What decode's counters gained since, once they tell of `at_least` tokens.

    vLLM counts after it has handed the output to whoever waits for it, so a reply may come first.
    """
    deadline = time.monotonic() + _COUNTED_WITHIN_SECONDS
    while True:
        gained = Tokens.of(scrape(router.client, router.decode)) - before
        if gained.total >= at_least or time.monotonic() > deadline:
            return gained
        time.sleep(0.02)


def interleave(
    router: Router,
    endpoints: Sequence[Endpoint],
    rounds: int,
    length: int,
    source: random.Random,
    progress: Callable[[str], None] = lambda _line: None,
) -> dict[Endpoint, Row]:
    """The same traffic on each route, in turns, so that whatever else the machine does hits all alike.

    Args:
        router: to prefill and decode.
        endpoints: the routes.
        rounds: requests on each.
        length: of a prompt, in tokens.
        source: of distinct prompts.
        progress: told before each request.
    """
    samples: dict[Endpoint, list[Sample]] = {endpoint: [] for endpoint in endpoints}
    for turn in range(rounds):
        # Each route comes first as often as any other: what a request leaves behind favours none.
        first = turn % len(endpoints)
        for endpoint in (*endpoints[first:], *endpoints[:first]):
            progress(f"request {turn + 1} of {rounds} on {endpoint.value}")
            samples[endpoint].append(count(router, endpoint, Prompt.random(length, source)))
    return {endpoint: Row(endpoint, tuple(found)) for endpoint, found in samples.items()}


def merge(first: Mapping[Endpoint, Row], second: Mapping[Endpoint, Row]) -> dict[Endpoint, Row]:
    """Both measurements as one."""
    return {
        endpoint: Row(endpoint, (*row.samples, *second[endpoint].samples)) for endpoint, row in first.items()
    }
