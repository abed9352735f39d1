"""Gives a hand-off back when its load failed and no worker read it, so that a router may send it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shim.verdict import LoadResult, Observer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shim.connector.claims import Claims
    from shim.verdict import Load

CAPACITY: Final = 1024
"""Loads that failed on some workers and not, or not yet, on all; the oldest is forgotten for a new one."""


class Retries(Observer):
    """An `Observer` of loads that tells the claims which failed, and which were read by nobody.

    The scheduler sees one end for all workers; their stats (`ShimStats`) say on how many it failed. It takes
    all of them: the notification of a worker that read counts on prefill for good. vLLM 0.28 does not tell, so
    there only a single worker's loads are given back; delete this sentence with it.

    Args:
        claims: the engine's.
        workers: how many load each request's KV.
    """

    def __init__(self, claims: Claims, workers: int) -> None:
        self._claims = claims
        self._workers = workers
        self._failed: dict[str, int] = {}

    def load_ended(self, load: Load) -> None:
        """A wait for remote KV ended; one that came from no peer says nothing of a hand-off."""
        if load.facts.peer is None or load.result not in {LoadResult.FAILED, LoadResult.PARTIAL}:
            return
        self._claims.load_failed(load.request_id, whole=load.result is LoadResult.FAILED)
        if self._workers == 1:
            self._claims.unread(load.request_id)

    def see(self, connector_output: Any) -> None:
        """Take in which loads failed on which number of workers."""
        stats = getattr(connector_output, "kv_connector_stats", None)
        for request_id, count in _failed_loads(stats):
            failed = self._failed.pop(request_id, 0) + count
            if failed >= self._workers:
                self._claims.unread(request_id)
                continue
            if len(self._failed) >= CAPACITY:
                del self._failed[next(iter(self._failed))]
            self._failed[request_id] = failed


def _failed_loads(stats: Any) -> Iterator[tuple[str, int]]:
    """By request id, also where a `MultiConnector` keeps the stats of a child that is wrapped."""
    if stats is None:
        return
    yield from getattr(stats, "failed_loads", {}).items()
    data = getattr(stats, "data", None)
    for part in data.values() if isinstance(data, dict) else ():
        if hasattr(part, "failed_loads"):
            yield from _failed_loads(part)
