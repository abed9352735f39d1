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


@pytest.mark.parametrize(
    ("repeatable", "failed", "whole", "unread", "free"),
    [
        (True, True, True, True, True),
        (True, True, True, False, False),  # a worker read it
        (True, True, False, True, False),  # a part arrived
        (True, False, True, True, False),  # it did not end as failed
        (False, True, True, True, False),  # this connector's prefill may have sent it
    ],
)
def test_only_a_load_that_failed_unread_gives_its_claim_back(clock, repeatable, failed, whole, unread, free):
    """Whatever may have been read is gone; that it was somebody's stays known either way."""
    claims = Claims(clock)
    claims.claim(KEY, "a", repeatable=repeatable)
    if unread:
        claims.unread("a")
    if failed:
        claims.load_failed("a", whole=whole)

    assert claims.failed(KEY) is failed
    assert claims.known(KEY)
    assert claims.owner(KEY) == (None if free else "a")
    assert claims.claim(KEY, "b", repeatable=True) is free
    if free:
        claims.load_failed("a", whole=True)  # the former owner's news is not about this claim
        assert not claims.failed(KEY)


def test_what_is_remembered_of_owners_goes_with_their_claims(clock):
    """No table beside the table grows."""
    claims = Claims(clock, capacity=10)
    for i in range(1000):
        claims.claim(("e", str(i)), str(i), repeatable=True)
        claims.load_failed(str(i), whole=True)
        claims.unread(str(i))
        claims.claim(("e", str(i)), f"{i} again")

    assert len(claims._owned) == len(claims) == 10
