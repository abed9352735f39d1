"""Feeds the circuit breakers with what the workers report of loads, and counts how the breakers move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shim.telemetry import catalog
from shim.telemetry.catalog import key
from shim.verdict import LoadResult, Observer

if TYPE_CHECKING:
    from shim.connector.peers import Breakers
    from shim.telemetry.tally import Tally
    from shim.verdict import Load, PeerKey

_FAILED = frozenset({LoadResult.FAILED, LoadResult.PARTIAL})
_COUNTED = frozenset(labels[0] for labels in catalog.PEER_TRANSITIONS.series)


class PeerHealth(Observer):
    """An `Observer` of loads: a handshake or transfer that failed counts against the peer, any success for it.

    An aborted load says nothing of the peer, nor does one that came from elsewhere: that one's facts name none.
    """

    def __init__(self, breakers: Breakers, tally: Tally) -> None:
        self._breakers = breakers
        self._tally = tally
        breakers.on_transition = self._moved

    def load_ended(self, load: Load) -> None:
        """A wait for remote KV ended."""
        peer = load.facts.peer
        if peer is None:
            return
        if load.result in _FAILED:
            self._breakers.failed(peer)
        elif load.result is LoadResult.LOADED:
            self._breakers.succeeded(peer)

    def _moved(self, _peer: PeerKey, to: str) -> None:
        # A peer that is forgotten leaves the gauge, but went to no state that is counted.
        if to in _COUNTED:
            self._tally.add(key(catalog.PEER_TRANSITIONS, to))
        for state, count in self._breakers.counts().items():
            self._tally.gauge(key(catalog.PEERS, state), float(count))
