"""Read and expired hand-offs are told apart by what NIXL's workers count."""

from types import SimpleNamespace
from typing import Any

import pytest

from shim.connector.ends import EXPIRIES, NixlEnds
from shim.verdict import HandoffEnd


def output(expiries: int, *, nested: bool = False) -> Any:
    """A connector output whose stats count these expiries."""
    nixl = SimpleNamespace(data={EXPIRIES: [1] * expiries, "transfer_duration": []})
    inner = SimpleNamespace(data={"NixlPullConnector": nixl}) if nested else nixl
    return SimpleNamespace(kv_connector_stats=SimpleNamespace(ours={}, inner=inner))


class Clock:
    """Time that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("nested", [False, True])
def test_the_old_one_expired_and_the_new_one_was_read(nested: bool) -> None:
    """One expiry among two ends: it is the one past its lease, alone or inside a MultiConnector."""
    clock = Clock()
    ends = NixlEnds(30.0, 1, clock)
    ends.issued("old")
    clock.now += 31
    ends.issued("new")
    ends.see(output(1, nested=nested))
    assert (ends.of("new"), ends.of("old")) == (HandoffEnd.READ, HandoffEnd.EXPIRED)


def test_a_lease_that_heartbeats_extended_was_read() -> None:
    """Old and let go, but nobody counted an expiry."""
    clock = Clock()
    ends = NixlEnds(30.0, 1, clock)
    ends.issued("a")
    clock.now += 300
    ends.see(output(0))
    assert ends.of("a") is HandoffEnd.READ


def test_each_rank_counts_its_own() -> None:
    """With two workers an expiry is counted twice, maybe in two steps."""
    clock = Clock()
    ends = NixlEnds(30.0, 2, clock)
    for name in ("a", "b"):
        ends.issued(name)
    clock.now += 31
    ends.see(output(1))
    assert ends.of("a") is HandoffEnd.READ  # reported by all ranks before both had counted: no expiry
    ends.see(output(1))
    assert ends.of("b") is HandoffEnd.EXPIRED


@pytest.mark.parametrize("stats", [None, 7, SimpleNamespace(data=None), SimpleNamespace(data={EXPIRIES: None})])
def test_outputs_without_counts_are_no_expiries(stats: Any) -> None:
    """Other connectors' stats, or none."""
    ends = NixlEnds(30.0, 1, Clock())
    ends.see(SimpleNamespace(kv_connector_stats=stats))
    ends.see(SimpleNamespace())
    assert ends.of("never issued") is HandoffEnd.UNKNOWN
