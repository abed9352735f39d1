"""The catalogue: one closed table of series that everything else reads."""

from shim.telemetry import catalog
from shim.telemetry.catalog import CATALOG, INFO, KEYS, SEPARATOR, SERIES_LIMIT, Kind, series_per_engine
from shim.verdict import REASON_CLASS, Outcome, Reason, TokenKind


def test_an_engine_exports_at_most_the_limit() -> None:
    """The contract's bound on series holds for everything an engine may ever count."""
    assert 0 < series_per_engine() <= SERIES_LIMIT


def test_keys_are_unambiguous() -> None:
    """No label value holds the separator, so a flat key means exactly one series."""
    for metric in CATALOG:
        for labels in metric.series:
            assert len(labels) == len(metric.labels)
            assert not any(SEPARATOR in value for value in labels)
    assert len(KEYS) == sum(len(metric.series) for metric in CATALOG)


def test_every_reason_has_one_class() -> None:
    """The reason table is complete."""
    assert set(REASON_CLASS) == set(Reason)


def test_every_outcome_and_token_kind_can_be_counted() -> None:
    """Nothing the ledger can say lacks a series."""
    assert {labels[0] for labels in catalog.REQUESTS.series} == set(Outcome)
    assert {labels[0] for labels in catalog.PROMPT_TOKENS.series} == set(TokenKind)


def test_names_follow_prometheus() -> None:
    """Counters end in _total on the wire only, times carry their unit, and only `info` waits for start-up."""
    for metric in CATALOG:
        assert metric.full_name.startswith("vllm:kv_shim_")
        assert not metric.name.endswith("_total")
        assert metric.wire_name.endswith("_total") is (metric.kind is Kind.COUNTER)
        assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(metric.buckets)
        assert bool(metric.series) is (metric is not INFO)
