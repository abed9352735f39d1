"""The metrics sink: adds up what happened since the scheduler last took it, as plain flat data.

The payload crosses processes as msgpack, so it holds str keys and int or float values only.
Pure Python; imports no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from shim.telemetry import catalog
from shim.telemetry.catalog import KEYS, Hook, key
from shim.verdict import Observer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shim.telemetry.catalog import Labels, Metric
    from shim.verdict import Handoff, Load, Reason, TokenKind, Verdict

SAMPLES_LIMIT = 4096
"""Histogram samples one payload may hold; more are dropped and counted, since nobody may be taking them."""


class Payload(TypedDict):
    """What one step reports; every key is one of `catalog.KEYS`."""

    counters: dict[str, int]
    samples: dict[str, list[float]]
    gauges: dict[str, float]


def empty_payload() -> Payload:
    """A payload that reports nothing."""
    return {"counters": {}, "samples": {}, "gauges": {}}


def merge(into: Payload, other: Mapping[str, object]) -> None:
    """Add `other`, a payload from another step or process, to `into`; later gauges win."""
    counters, samples, gauges = other.get("counters"), other.get("samples"), other.get("gauges")
    if isinstance(counters, dict):
        for name, count in counters.items():
            into["counters"][name] = into["counters"].get(name, 0) + count
    if isinstance(samples, dict):
        for name, values in samples.items():
            into["samples"].setdefault(name, []).extend(values)
    if isinstance(gauges, dict):
        into["gauges"].update(gauges)


def keys_of(metric: Metric) -> dict[Labels, str]:
    """The payload keys of a metric by its label values, so that a request joins no strings."""
    return {values: key(metric, *values) for values in metric.series}


_DROPPED = key(catalog.STATS_DROPPED)
_REQUESTS = keys_of(catalog.REQUESTS)
_TOKENS = keys_of(catalog.PROMPT_TOKENS)
_WAITS = keys_of(catalog.LOAD_WAIT_SECONDS)
_LOADS_STARTED = key(catalog.LOADS_STARTED)
_LOCAL_SECONDS = key(catalog.LOCAL_PREFILL_SECONDS)
_OLDEST_LOAD = key(catalog.OLDEST_LOAD_START)
_OLDEST_HANDOFF = key(catalog.OLDEST_HANDOFF_START)


class Tally(Observer):
    """An `Observer` that counts; `take` hands over what has come since the last call."""

    def __init__(self) -> None:
        self._payload = empty_payload()
        self._samples = 0
        self.changed = False

    def add(self, name: str, count: int = 1) -> None:
        """Count; `name` is a payload key of a counter. An unknown key counts as dropped telemetry."""
        if name not in KEYS:
            name, count = _DROPPED, 1
        self._count(name, count)

    def _count(self, name: str, count: int) -> None:
        counters = self._payload["counters"]
        counters[name] = counters.get(name, 0) + count
        self.changed = True

    def sample(self, name: str, value: float) -> None:
        """Observe one value of a histogram."""
        if name not in KEYS or self._samples >= SAMPLES_LIMIT:
            self.add(_DROPPED)
            return
        self._samples += 1
        self._payload["samples"].setdefault(name, []).append(value)
        self.changed = True

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        if name not in KEYS:
            self.add(_DROPPED)
            return
        self._payload["gauges"][name] = value
        self.changed = True

    def error(self, hook: Hook) -> None:
        """Count one contained fault of the shim, or one exception of the inner connector."""
        self.add(key(catalog.ERRORS, hook))

    def take(self) -> Payload | None:
        """What has come since the last call; None if nothing."""
        if not self.changed:
            return None
        payload, self._payload = self._payload, empty_payload()
        self._samples, self.changed = 0, False
        return payload

    # The ledger's events.

    def verdict(self, verdict: Verdict) -> None:
        """One request got its verdict."""
        self._count(_REQUESTS.get((verdict.outcome, verdict.reason), _DROPPED), 1)
        if verdict.is_local_fault and verdict.first_scheduled_at is not None:
            self.sample(_LOCAL_SECONDS, max(0.0, verdict.completed_at - verdict.first_scheduled_at))

    def tokens(self, kind: TokenKind, reason: Reason, count: int) -> None:
        """Prompt tokens were computed here."""
        self._count(_TOKENS.get((kind, reason), _DROPPED), count)

    def load_started(self, started_at: float) -> None:  # noqa: ARG002  # Observer's signature
        """A request began to wait for remote KV."""
        self._count(_LOADS_STARTED, 1)

    def load_ended(self, load: Load) -> None:
        """A wait for remote KV ended."""
        wait = max(0.0, load.ended_at - load.started_at)
        self.sample(_WAITS[load.result,], wait)

    def handoff(self, handoff: Handoff) -> None:
        """A prefill request finished, with or without a hand-off."""
        self.add(key(catalog.HANDOFFS, handoff.result, handoff.reason))

    def handoff_closed(self, handoff: Handoff) -> None:
        """An issued hand-off was read, expired or dropped."""
        if handoff.end is not None:
            self.add(key(catalog.HANDOFFS_CLOSED, handoff.end))

    def oldest(self, load_started_at: float, handoff_issued_at: float) -> None:
        """The oldest load or hand-off in flight changed."""
        self.gauge(_OLDEST_LOAD, load_started_at)
        self.gauge(_OLDEST_HANDOFF, handoff_issued_at)
