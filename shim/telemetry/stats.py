"""The stats object that vLLM carries from the connector to its loggers: the shim's part beside the inner's.

vLLM merges worker and scheduler stats with `aggregate` and needs one class on both sides
(kv_connector/utils.py); the inner's classes index fixed keys, so its part is kept apart and handed back to it.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from shim.telemetry import tally
from shim.telemetry.tally import Payload, empty_payload
from shim.verdict import Outcome

OURS = "kv_shim"
INNERS = "inner"


class ShimStats(KVConnectorStats):  # type: ignore[misc]  # vLLM's class is untyped to mypy
    """The shim's payload and the inner connector's own stats, if it gave any.

    `failed_loads` says on how many workers a request's load failed; it goes, pickled, from them to the engine
    and no further.
    """

    def __init__(
        self,
        ours: Payload | None = None,
        inner: KVConnectorStats | None = None,
        failed_loads: dict[str, int] | None = None,
    ) -> None:
        self.ours = ours if ours is not None else empty_payload()
        self.inner = inner
        self.failed_loads = failed_loads or {}

    @property
    def data(self) -> dict[str, Any]:
        """What goes over the wire: plain data, the inner's part as vLLM would send it alone."""
        plain: dict[str, Any] = {OURS: self.ours}
        if self.inner is not None:
            # 0.28 sends `.data`, 0.32 `to_dict()`; delete the branch with support for 0.28.
            to_dict = getattr(self.inner, "to_dict", None)
            plain[INNERS] = self.inner.data if to_dict is None else to_dict()
        return plain

    def to_dict(self) -> dict[str, Any]:
        """`data`, under the name that newer vLLM calls."""
        return self.data

    def reset(self) -> None:
        """Forget everything."""
        self.ours, self.failed_loads = empty_payload(), {}
        if self.inner is not None:
            self.inner.reset()

    def is_empty(self) -> bool:
        """Whether there is nothing to report on either side."""
        return not any(self.ours.values()) and (self.inner is None or self.inner.is_empty())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another step's, rank's or process's stats to these."""
        inner = other
        if isinstance(other, ShimStats):
            tally.merge(self.ours, other.ours)
            for request_id, count in other.failed_loads.items():
                self.failed_loads[request_id] = self.failed_loads.get(request_id, 0) + count
            inner = other.inner
        if self.inner is None:
            self.inner = inner
        elif inner is not None:
            self.inner = self.inner.aggregate(inner)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The log line's figures: the inner's, then how many local prefills should not have been."""
        reduced: dict[str, int | float] = {}
        if self.inner is not None and not self.inner.is_empty():
            reduced.update(self.inner.reduce())
        for outcome in (Outcome.REMOTE, Outcome.PARTIAL, Outcome.LOCAL_PREFILL, Outcome.FAILED):
            counters = self.ours["counters"].items()
            reduced[f"Requests {outcome}"] = sum(
                count for name, count in counters if name.startswith(f"requests|{outcome}|")
            )
        return reduced


def split(data: Any) -> tuple[Payload, Any]:
    """A wire payload's two parts: the shim's, checked to be of its shape, and the inner's (None if absent)."""
    ours = empty_payload()
    if not isinstance(data, dict):
        return ours, None
    if isinstance(data.get(OURS), dict):
        tally.merge(ours, data[OURS])
    return ours, data.get(INNERS)
