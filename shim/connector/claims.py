"""Single use of hand-offs: which engine request owns which.

Prefill frees a hand-off's blocks at the first notification it gets, so a second reader would read,
or free, what is no longer its own. A claim is given back only where nobody can have notified: its load failed
and no worker read it. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Claim:
    owner: str
    until: float
    repeatable: bool  # a load that no worker read leaves the hand-off whole
    failed: bool = False
    unread: bool = False

    @property
    def given_back(self) -> bool:
        return self.repeatable and self.failed and self.unread


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
        self._claims: dict[ClaimKey, _Claim] = {}
        self._owned: dict[str, list[_Claim]] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def owner(self, key: ClaimKey) -> str | None:
        """Who owns this hand-off, if somebody does."""
        claim = self._find(key)
        return None if claim is None or claim.given_back else claim.owner

    def known(self, key: ClaimKey) -> bool:
        """Whether a request ever had this hand-off, also one that gave it back."""
        return self._find(key) is not None

    def failed(self, key: ClaimKey) -> bool:
        """Whether this hand-off's load failed."""
        claim = self._find(key)
        return claim is not None and claim.failed

    def load_failed(self, owner: str, *, whole: bool) -> None:
        """The load of what this request owns failed.

        Args:
            owner: the engine request's id; unknown ones are ignored.
            whole: nothing of it arrived.
        """
        for claim in self._owned.get(owner, ()):
            claim.failed = True
            claim.repeatable = claim.repeatable and whole

    def unread(self, owner: str) -> None:
        """All workers failed to read what this request owns."""
        for claim in self._owned.get(owner, ()):
            claim.unread = True

    def claim(self, key: ClaimKey, owner: str, lease: float | None = None, *, repeatable: bool = False) -> bool:
        """Claim a hand-off for an engine request; `False` if another one owns it.

        Args:
            key: the profile's hand-off key.
            owner: the engine request's id; may ask again.
            lease: seconds that prefill keeps the blocks, if known.
            repeatable: whether prefill still has them after a load that failed unread.
        """
        key = _short(key)
        now = self._clock()
        before = self._claims.get(key)
        if before is not None:
            if before.owner == owner:
                return True
            if before.until > now and not before.given_back:
                return False
            self._drop(key)  # so that the new one goes to the end
        if len(self._claims) >= self._capacity:
            self._drop(next(iter(self._claims)))
        held = DEFAULT_LEASE if lease is None else min(max(lease, 0.0), MAX_LEASE)
        made = self._claims[key] = _Claim(owner, now + held + MARGIN, repeatable)
        self._owned.setdefault(owner, []).append(made)
        self._sweep(now)
        return True

    def _find(self, key: ClaimKey) -> _Claim | None:
        claim = self._claims.get(_short(key))
        return claim if claim is not None and claim.until > self._clock() else None

    def _drop(self, key: ClaimKey) -> None:
        claim = self._claims.pop(key)
        rest = [other for other in self._owned.pop(claim.owner) if other is not claim]
        if rest:
            self._owned[claim.owner] = rest

    def _sweep(self, now: float) -> None:
        # Leases differ little, so the order of arrival is near enough the order of expiry; where it
        # is not, the capacity bounds what waits behind a long lease.
        for _ in range(_SWEEP):
            key = next(iter(self._claims))
            if self._claims[key].until > now:
                return
            self._drop(key)


class Unclaimed(Claims):
    """Owns nothing and keeps nothing: for screening that only wants an opinion."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)

    def claim(
        self,
        key: ClaimKey,  # noqa: ARG002  # Claims' signature
        owner: str,  # noqa: ARG002
        lease: float | None = None,  # noqa: ARG002
        *,
        repeatable: bool = False,  # noqa: ARG002
    ) -> bool:
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
