"""The stamp on a hand-off."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim import stamp
from shim.telemetry.catalog import StampResult

TOKENS = list(range(500))
NOW = 1_800_000_000.0
PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def issue(tokens=TOKENS, k=499, key=b"", lease=30.0, **kwargs):
    """What prefill puts on a hand-off."""
    return stamp.make(stamp.digest(tokens, k, **kwargs), issued=NOW, lease=lease, traceparent=PARENT, key=key)


def verify(made, tokens=TOKENS, key=b"", now=NOW + 1, skew=5.0, **kwargs):
    """What decode finds."""
    prompt = stamp.digest(tokens, made.k, **kwargs)
    return stamp.check(made, prompt, prompt_tokens=len(tokens), now=now, clock_skew=skew, key=key)


@pytest.mark.parametrize("key", [b"", b"secret", b"long" * 50])
def test_a_stamp_holds_for_its_own_prompt(key):
    """What prefill stamped, decode finds to be so, also after the wire."""
    raw = msgspec.json.decode(msgspec.json.encode(stamp.encode(issue(key=key))))

    assert verify(stamp.decode(raw), key=key) is StampResult.OK


@pytest.mark.parametrize("position", [0, 250, 498])
def test_one_other_token_is_another_prompt(position):
    """Every token that prefill's KV is used for counts."""
    tokens = list(TOKENS)
    tokens[position] += 1

    assert verify(issue(), tokens) is StampResult.MISMATCH


def test_the_last_token_does_not_count():
    """Decode computes it itself."""
    assert verify(issue(), [*TOKENS[:-1], 7]) is StampResult.OK


@pytest.mark.parametrize("tokens", [TOKENS[:400], TOKENS + TOKENS])
def test_a_shorter_or_longer_prompt_is_another(tokens):
    """Prefill's KV must reach to the prompt's end and not past it."""
    assert verify(issue(), tokens) is StampResult.MISMATCH


@pytest.mark.parametrize(
    "other",
    [
        {"lora": "adapter"},
        {"cache_salt": "pepper"},
        {"multimodal": [("image", 3)]},
    ],
)
def test_whatever_kv_depends_on_counts(other):
    """Adapters, salts and images change KV as tokens do."""
    assert verify(issue(), **other) is StampResult.MISMATCH
    assert verify(issue(**other), **other) is StampResult.OK


def test_where_an_image_stands_counts_and_one_past_k_does_not():
    """Multimodal items count with their offsets, up to where the digest reaches."""
    here = stamp.digest(TOKENS, 100, multimodal=[("image", 3)])

    assert here != stamp.digest(TOKENS, 100, multimodal=[("image", 4)])
    assert here == stamp.digest(TOKENS, 100, multimodal=[("image", 3), ("other", 100)])
    assert stamp.digest(TOKENS, 9, lora="ab", cache_salt="") != stamp.digest(
        TOKENS, 9, lora="a", cache_salt="b"
    )


@pytest.mark.parametrize("tokens", [None, [], [1, "x"], [2**70]])
def test_a_prompt_without_plain_tokens_gets_no_stamp(tokens):
    """Embeddings can't be told apart by tokens."""
    assert stamp.digest(tokens, 5) is None


@pytest.mark.parametrize(("late", "result"), [(34.9, StampResult.OK), (35.1, StampResult.EXPIRED)])
def test_the_lease_ends_with_the_clocks_skew(late, result):
    """Clocks may differ by the skew, and no more."""
    assert verify(issue(lease=30.0), now=NOW + late, skew=5.0) is result


@pytest.mark.parametrize("field", ["k", "issued", "lease", "traceparent", "digest"])
def test_with_a_key_nothing_in_a_stamp_may_be_changed(field):
    """The MAC covers every field."""
    raw = stamp.encode(issue(key=b"secret"))
    raw[field] = {"k": 498, "issued": NOW + 60, "lease": 31.0, "traceparent": "", "digest": "0" * 32}[field]

    wanted = StampResult.MISMATCH if field == "k" else StampResult.REJECTED
    assert verify(stamp.decode(raw), key=b"secret") is wanted


def test_a_stamp_made_without_the_key_is_rejected_by_one_who_has_it():
    """A client who knows the prompt can't stamp."""
    assert verify(issue(), key=b"secret") is StampResult.REJECTED
    assert verify(issue(key=b"other"), key=b"secret") is StampResult.REJECTED


def test_without_a_digest_only_what_the_stamp_says_in_clear_is_checked():
    """No entrypoint hook, no digest: nothing is found wrong that is not wrong."""
    made = issue()
    check = {"prompt_tokens": len(TOKENS), "clock_skew": 5.0}

    assert stamp.check(made, None, now=NOW, **check) is StampResult.ABSENT
    assert stamp.check(made, None, now=NOW + 99, **check) is StampResult.EXPIRED
    assert stamp.check(made, None, now=NOW + 99, key=b"k", **check) is StampResult.ABSENT


GOOD = stamp.encode(issue())


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"k": -1},
        {"k": True},
        {"k": 2**63},
        {"digest": "A" * 32},
        {"digest": "a" * 33},
        {"issued": "now"},
        {"issued": float("inf")},
        {"lease": float("nan")},
        {"lease": -1},
        {"traceparent": "x" * 10_000_000},
        {"extra": 1},
    ],
)
def test_a_malformed_stamp_is_none(change):
    """Stamps come from clients as well."""
    assert stamp.decode(GOOD | change) is None
    assert stamp.covered(GOOD | change) is None


def test_a_stamp_whose_keys_cannot_be_encoded_is_none():
    """A lone surrogate, which JSON can spell; msgspec raises another error for it."""
    assert stamp.decode({"\ud800": 1}) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(list(GOOD)), inner),
    )
)
def test_no_value_makes_reading_a_stamp_raise(value):
    """Whatever stands in a stamp's place is read or is none."""
    assert stamp.decode(value) is None or verify(stamp.decode(value)) in StampResult


@pytest.mark.parametrize(
    ("k", "text"), [(True, "a" * 32), (1, "g" * 32), (1, None), (-1, "a" * 32), ("1", "a" * 32)]
)
def test_an_entrypoints_digest_is_read_strictly(k, text):
    """It comes through `extra_args`, which clients can write."""
    assert stamp.read_prompt(k, text) is None
    assert stamp.read_prompt(1, "a" * 32) == stamp.Prompt(1, "a" * 32)
