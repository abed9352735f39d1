"""Puts the stamp on a hand-off, on prefill."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shim import stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shim.stamp import Prompt

    Answer = tuple[bool, dict[str, Any] | None]

NIXL_LEASE = 30.0
"""Seconds that NIXL's prefill keeps blocks nobody asks for, unless `kv_lease_duration` says otherwise
(nixl/base_scheduler.py)."""
LONGEST_LEASE = 480.0
"""Seconds; stands for the lease of a connector whose own is not known, so that none expires too early."""


def lease_of(connectors: Iterable[str], options: Mapping[str, Any]) -> float:
    """How long prefill keeps the blocks of a hand-off, in seconds.

    Args:
        connectors: the inner connector's name, or a `MultiConnector`'s children's.
        options: their `kv_connector_extra_config`.
    """
    if any(name.startswith("Nixl") for name in connectors):
        return float(options.get("kv_lease_duration", NIXL_LEASE))
    return LONGEST_LEASE


class Issuer:
    """Stamps the hand-offs of one prefill engine.

    Args:
        lease: how long the connector keeps the blocks, in seconds.
        context_of: the traceparent of a hand-off's span by request id; empty if nobody records.
        clock: Unix seconds.
    """

    def __init__(
        self, lease: float, context_of: Callable[[str], str], clock: Callable[[], float] = time.time
    ) -> None:
        self._lease = lease
        self._context_of = context_of
        self._clock = clock
        self._key = stamp.stamp_key()

    def stamped(self, answer: Answer, request_id: str, prompt: Prompt | None) -> Answer:
        """The answer to `request_finished` with a stamp in its hand-off, if it has one for a decode server.

        The inner's dict is copied: it may keep it.
        """
        pinned, handoff = answer
        if prompt is None or not isinstance(handoff, dict) or handoff.get("do_remote_prefill") is not True:
            return answer
        made = stamp.make(
            prompt,
            issued=self._clock(),
            lease=self._lease,
            traceparent=self._context_of(request_id),
            key=self._key,
        )
        return pinned, {**handoff, stamp.KEY: stamp.encode(made)}
