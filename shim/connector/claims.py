"""Single use of hand-offs: which engine request owns which.

Prefill frees a hand-off's blocks at the first notification it gets, so a second reader would read,
or free, what is no longer its own. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_LEASE: Final = 480.0
"""Seconds; the longest that vLLM pins blocks by default (`decoder_kv_blocks_ttl`, nixl/base_scheduler.py)."""
MAX_LEASE: Final = 3600.0
MARGIN: Final = 60.0
"""Seconds past the lease: clocks, and a notification that arrives late."""
CAPACITY: Final = 65_536
_LONG = 256
_SWEEP = 2
"""Entries looked at per new claim: one is added, so two keep up with whatever has expired."""

ClaimKey = tuple[str, ...]


class Claims:
    """A bounded table of hand-offs and their owners. Not thread-safe: lives on the scheduler's thread."""

    def __init__(self, clock: Callable[[], float], *, capacity: int = CAPACITY) -> None:
        """Hold nothing yet.

        Args:
            clock: seconds, never going back.
            capacity: most claims held; the oldest is dropped for a new one.
        """
        self._clock = clock
        self._capacity = capacity
        self._claims: dict[ClaimKey, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def owner(self, key: ClaimKey) -> str | None:
        """Who owns this hand-off, if somebody does."""
        entry = self._claims.get(_short(key))
        return entry[0] if entry is not None and entry[1] > self._clock() else None

    def claim(self, key: ClaimKey, owner: str, lease: float | None = None) -> bool:
        """Claim a hand-off for an engine request; `False` if another one owns it.

        Args:
            key: the profile's hand-off key.
            owner: the engine request's id; may ask again.
            lease: seconds that prefill keeps the blocks, if known.
        """
        key = _short(key)
        now = self._clock()
        entry = self._claims.get(key)
        if entry is not None:
            if entry[0] == owner:
                return True
            if entry[1] > now:
                return False
            del self._claims[key]  # so that the new one goes to the end
        if len(self._claims) >= self._capacity:
            del self._claims[next(iter(self._claims))]
        held = DEFAULT_LEASE if lease is None else min(max(lease, 0.0), MAX_LEASE)
        self._claims[key] = (owner, now + held + MARGIN)
        self._sweep(now)
        return True

    def _sweep(self, now: float) -> None:
        # Leases differ little, so the order of arrival is near enough the order of expiry; where it
        # is not, the capacity bounds what waits behind a long lease.
        for _ in range(_SWEEP):
            key = next(iter(self._claims))
            if self._claims[key][1] > now:
                return
            del self._claims[key]


class Unclaimed(Claims):
    """Owns nothing and keeps nothing: for screening that only wants an opinion."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)

    def claim(self, key: ClaimKey, owner: str, lease: float | None = None) -> bool:  # noqa: ARG002  # Claims' signature
        """Every hand-off is free."""
        return True


def _short(key: ClaimKey) -> ClaimKey:
    """A key of bounded size: ids come from clients."""
    if sum(map(len, key)) <= _LONG:
        return key
    digest = blake2b(digest_size=32)
    for part in key:
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return ("", digest.hexdigest())
