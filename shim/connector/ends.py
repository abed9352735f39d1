"""Tells hand-offs that were read from those that expired, where the connector's worker half knows.

NIXL's workers report both kinds of end alike, as `finished_sending`, but count expiries in the stats of the
same output (nixl/base_worker.py, `record_kv_expired_req`); an expiry is one that is older than the lease.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shim.verdict import HandoffEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXPIRIES = "num_kv_expired_reqs"


class NixlEnds:
    """How NIXL's hand-offs ended.

    Args:
        lease: seconds that prefill keeps blocks nobody asks for; a reader's heartbeats extend it, so an older
            hand-off may still have been read.
        ranks: workers, each of which counts an expiry.
        clock: seconds, never going back.
    """

    def __init__(self, lease: float, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease = lease
        self._ranks = max(ranks, 1)
        self._clock = clock
        self._issued: dict[str, float] = {}
        self._expired = 0  # counted by workers, and not yet matched with a hand-off

    def issued(self, request_id: str) -> None:
        """The connector keeps the blocks of this request for a reader."""
        self._issued[request_id] = self._clock()

    def see(self, connector_output: Any) -> None:
        """Take in what the workers counted, before the ends in the same output are asked for."""
        stats = getattr(connector_output, "kv_connector_stats", None)
        self._expired += sum(_expiries(stats))

    def of(self, request_id: str) -> HandoffEnd:
        """How this hand-off ended; asked once, when its blocks were let go."""
        issued = self._issued.pop(request_id, None)
        if issued is None:
            return HandoffEnd.UNKNOWN
        if self._expired >= self._ranks and self._clock() - issued >= self._lease:
            self._expired -= self._ranks
            return HandoffEnd.EXPIRED
        return HandoffEnd.READ


def _expiries(stats: Any) -> Iterator[int]:
    """The counts in a stats object, ours or NIXL's, also where a `MultiConnector` keeps several."""
    if stats is None:
        return
    if hasattr(stats, "ours"):
        yield from _expiries(stats.inner)
        return
    data = getattr(stats, "data", stats)
    if not isinstance(data, dict):
        return
    yield sum(data.get(EXPIRIES) or ())
    for part in data.values():
        if hasattr(part, "data"):
            yield from _expiries(part)
