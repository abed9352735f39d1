"""Single use of hand-offs."""

from __future__ import annotations

import pytest

from shim.connector.claims import DEFAULT_LEASE, MARGIN, MAX_LEASE, Claims

KEY = ("engine", "request")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    """Time that goes on when told to."""
    return Clock()


def test_the_owner_may_ask_again_and_others_may_not(clock):
    """A claim binds a hand-off to one engine request."""
    claims = Claims(clock)

    assert claims.claim(KEY, "a")
    assert claims.claim(KEY, "a")
    assert not claims.claim(KEY, "b")
    assert claims.owner(KEY) == "a"


@pytest.mark.parametrize(
    ("lease", "lives"),
    [(None, DEFAULT_LEASE), (30.0, 30.0), (-5.0, 0.0), (1e9, MAX_LEASE)],
)
def test_a_claim_lives_for_the_lease_and_a_margin(clock, lease, lives):
    """The lease bounds a claim's life, and is itself bounded."""
    claims = Claims(clock)
    claims.claim(KEY, "a", lease)

    clock.now += lives + MARGIN - 0.1
    assert not claims.claim(KEY, "b")
    clock.now += 0.2
    assert claims.owner(KEY) is None
    assert claims.claim(KEY, "b")


def test_expired_claims_are_dropped_as_new_ones_come(clock):
    """What has expired goes with the traffic, without anybody sweeping."""
    claims = Claims(clock)
    for i in range(100):
        claims.claim(("e", str(i)), "a")
    clock.now += DEFAULT_LEASE + MARGIN + 1
    for i in range(100):
        claims.claim(("f", str(i)), "a")

    assert len(claims) == 100


def test_a_million_requests_leave_a_bounded_table(clock):
    """At capacity the oldest claim makes room for a new one."""
    claims = Claims(clock, capacity=10)
    for i in range(1000):
        assert claims.claim(("e", str(i)), str(i))

    assert len(claims) == 10
    assert claims.owner(("e", "989")) is None
    assert claims.owner(("e", "990")) == "990"


def test_long_keys_are_kept_short_and_apart(clock):
    """Ids come from clients, so what is kept of them is of bounded size."""
    claims = Claims(clock)
    assert claims.claim(("e" * 500, "r" * 500), "a")
    assert claims.claim(("e" * 501, "r" * 499), "b")

    assert not claims.claim(("e" * 500, "r" * 500), "c")
    assert all(sum(map(len, key)) <= 64 for key in claims._claims)
