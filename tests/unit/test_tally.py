"""The tally: plain data that adds up."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shim.telemetry import catalog
from shim.telemetry.catalog import KEYS, Kind, key
from shim.telemetry.tally import SAMPLES_LIMIT, Tally, empty_payload, merge

DROPPED = key(catalog.STATS_DROPPED)
REMOTE = key(catalog.REQUESTS, "remote", "none")
WAIT = key(catalog.LOAD_WAIT_SECONDS, "loaded")


def test_nothing_happened_is_none() -> None:
    """A step without news costs no payload, and taking empties."""
    tally = Tally()
    assert tally.take() is None
    tally.add(REMOTE)
    payload = tally.take()
    assert payload is not None
    assert payload["counters"] == {REMOTE: 1}
    assert tally.take() is None


def test_an_unknown_key_is_counted_as_dropped() -> None:
    """A label outside the closed set never becomes a series, and never goes unnoticed."""
    tally = Tally()
    tally.add("requests|remote|because")
    tally.sample("nonsense", 1.0)
    tally.gauge("nonsense", 1.0)
    assert tally.take() == {"counters": {DROPPED: 3}, "samples": {}, "gauges": {}}


def test_samples_nobody_takes_are_bounded() -> None:
    """With --disable-log-stats nobody may take: the payload stops growing and says what it lost."""
    tally = Tally()
    for _ in range(SAMPLES_LIMIT + 10):
        tally.sample(WAIT, 0.1)
    payload = tally.take()
    assert payload is not None
    assert len(payload["samples"][WAIT]) == SAMPLES_LIMIT
    assert payload["counters"] == {DROPPED: 10}


COUNTERS = [name for name, (metric, _) in KEYS.items() if metric.kind is Kind.COUNTER]


@given(st.lists(st.dictionaries(st.sampled_from(COUNTERS), st.integers(0, 10**6)), max_size=6))
def test_merging_in_any_grouping_adds_up(parts: list[dict[str, int]]) -> None:
    """Aggregation over ranks, steps and processes loses nothing, and survives msgpack."""
    whole = empty_payload()
    for part in parts:
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode({"counters": part, "samples": {}, "gauges": {}}))
        merge(whole, wire)
    for name in COUNTERS:
        assert whole["counters"].get(name, 0) == sum(part.get(name, 0) for part in parts)


def test_merging_foreign_data_is_harmless() -> None:
    """A payload of another shape adds nothing and raises nothing."""
    whole = empty_payload()
    merge(whole, {"counters": [1], "samples": "x", "gauges": None, "other": {}})
    assert whole == empty_payload()
