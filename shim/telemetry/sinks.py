"""Tells every sink what the ledger says; what one sink raises reaches neither the others nor the ledger.

This is the one broad `except` around the sinks: telemetry may be lost, and is then counted, but never a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shim.telemetry import catalog
from shim.telemetry.catalog import Hook, key
from shim.telemetry.faults import FAULTS
from shim.verdict import Observer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shim.telemetry.tally import Tally


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
        for event in EVENTS:
            hearing = tuple(
                getattr(sink, event)
                for sink in (tally, *others)
                if getattr(type(sink), event) is not getattr(Observer, event)
            )
            setattr(self, event, self._teller(hearing))

    def _teller(self, hearing: Sequence[Callable[..., None]]) -> Callable[..., None]:
        def tell(*facts: object) -> None:
            for hear in hearing:
                try:
                    hear(*facts)
                except Exception as error:  # noqa: BLE001  # see the module's docstring
                    FAULTS.say(hear.__qualname__, error)
                    self._lost()

        return tell

    def _lost(self) -> None:
        try:
            self._tally.error(Hook.SINK)
            self._tally.add(key(catalog.STATS_DROPPED))
        except Exception as error:  # noqa: BLE001  # the tally itself is what fails: nowhere left to count it
            FAULTS.say("the tally", error)
