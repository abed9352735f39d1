"""Tells every sink what the ledger says; what one sink raises reaches neither the others nor the ledger.

This is the one broad `except` around the sinks: telemetry may be lost, and is then counted, but never a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shim.telemetry import catalog
from shim.telemetry.catalog import Hook, key
from shim.verdict import Observer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shim.telemetry.tally import Tally
    from shim.verdict import Handoff, Load, Reason, TokenKind, Verdict


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


class Sinks(Observer):
    """An `Observer` that passes on to the tally first, then to the others; a sink is asked only what it hears.

    Args:
        tally: also counts what the others could not take.
        others: spans, log lines.
    """

    def __init__(self, tally: Tally, others: Sequence[Observer]) -> None:
        self._tally = tally
        # Decided once: most sinks are deaf to most events.
        self._hearing: dict[str, tuple[Callable[..., None], ...]] = {
            event: tuple(
                getattr(sink, event)
                for sink in (tally, *others)
                if getattr(type(sink), event) is not getattr(Observer, event)
            )
            for event in EVENTS
        }

    def verdict(self, verdict: Verdict) -> None:
        """One request got its verdict."""
        self._tell("verdict", verdict)

    def tokens(self, kind: TokenKind, reason: Reason, count: int) -> None:
        """Prompt tokens were computed here."""
        self._tell("tokens", kind, reason, count)

    def load_started(self, started_at: float) -> None:
        """A request began to wait for remote KV."""
        self._tell("load_started", started_at)

    def load_ended(self, load: Load) -> None:
        """A wait for remote KV ended."""
        self._tell("load_ended", load)

    def handoff(self, handoff: Handoff) -> None:
        """A prefill request finished."""
        self._tell("handoff", handoff)

    def handoff_closed(self, handoff: Handoff) -> None:
        """An issued hand-off ended."""
        self._tell("handoff_closed", handoff)

    def oldest(self, load_started_at: float, handoff_issued_at: float) -> None:
        """The oldest load or hand-off in flight changed."""
        self._tell("oldest", load_started_at, handoff_issued_at)

    def _tell(self, event: str, *facts: object) -> None:
        for hear in self._hearing[event]:
            try:
                hear(*facts)
            except Exception:  # noqa: BLE001  # see the module's docstring
                self._lost()

    def _lost(self) -> None:
        try:
            self._tally.error(Hook.SINK)
            self._tally.add(key(catalog.STATS_DROPPED))
        except Exception:  # noqa: BLE001, S110  # the tally itself is what fails: nowhere left to count it
            pass
