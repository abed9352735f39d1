"""The caller's trace context, in one form."""

from typing import Any

import pytest

from shim.trace_context import read, traceparent, tracestate

IDS = "a" * 32 + "-" + "b" * 16


@pytest.mark.parametrize(
    ("given", "carried"),
    [
        (f"00-{IDS}-01", f"00-{IDS}-01"),
        (f" 00-{IDS}-00\t", f"00-{IDS}-00"),
        (f"00-{IDS}-03", f"00-{IDS}-03"),
        (f"01-{IDS}-01", f"00-{IDS}-01"),
        (f"cc-{IDS}-ff", f"00-{IDS}-01"),
        (f"fe-{IDS}-02-what-the-future-brings", f"00-{IDS}-00"),
    ],
)
def test_every_version_of_the_standard_is_read(given: str, carried: str) -> None:
    """00 to fe, those above 00 with more fields; of their flags only "sampled" is known."""
    assert traceparent(given) == carried


@pytest.mark.parametrize(
    "given",
    [
        None,
        b"00-" + IDS.encode() + b"-01",
        "",
        f"ff-{IDS}-01",
        f"00-{IDS}-01-more",
        f"00-{IDS}-01-",
        f"01-{IDS}-01more",
        f"01-{IDS}-01-\r\n",
        f"00-{IDS}-01\n",
        f"00-{IDS.upper()}-01",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        "01-" + IDS + "-01-" + "x" * 1_000_000,
    ],
    ids=range(13),
)
def test_what_is_malformed_is_no_context(given: Any) -> None:
    """The span is a root then; nothing of it is carried, or logged."""
    assert traceparent(given) == ""
    assert read({"traceparent": given, "tracestate": "a=1"}) == ("", "")


def test_a_state_is_bounded_and_well_formed() -> None:
    """Anything else is dropped, and the parent stays."""
    parent = f"00-{IDS}-01"
    assert read({"traceparent": parent, "tracestate": "a=1, b@c=2"}) == (parent, "a=1, b@c=2")
    assert read({"traceparent": parent, "tracestate": "a=\x1b"}) == (parent, "")
    assert tracestate("a=" + "b" * 512) == ""
    assert read({"traceparent": parent}) == (parent, "")
    assert read([parent]) == ("", "")
