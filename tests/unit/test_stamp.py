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
    prompt = stamp.digest(tokens, made.prompt.k, **kwargs)
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


PICTURE, OTHER_PICTURE = "a" * 64, "b" * 64
HERE = {"hashing": "vllm blake3 model"}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"items": [(3, PICTURE)]}, {}),
        ({}, {"items": [(3, PICTURE)]}),
        ({"items": [(3, PICTURE), (9, PICTURE)]}, {"items": [(3, PICTURE)]}),
        ({"items": [(3, PICTURE)]}, {"items": [(3, "placeholder-1")]}),
        ({"items": [(3, "cat.png")]}, {"items": [(3, "dog.png")]}),
        ({"items": [(3, PICTURE)]}, {"items": [(3, OTHER_PICTURE)], "hashing": "vllm blake3 /mnt/model"}),
        ({"items": [(3, PICTURE)]}, {"items": [(3, OTHER_PICTURE)], "hashing": ""}),
        ({"names": ["salt pepper"]}, {}),
        ({"names": ["lora alice"]}, {"names": ["lora alice-v1"]}),
        ({"adapter": "weights", "names": ["lora alice"]}, {}),
        ({"adapter": "weights"}, {"names": ["lora alice"]}),
        ({"adapter": "weights", "names": ["lora a"]}, {"adapter": "weights", "names": ["lora b"]}),
    ],
)
@pytest.mark.parametrize("key", [b"", b"secret"])
def test_what_one_side_lacks_or_renames_loads_and_is_counted(prefill, decode, key):
    """It proves nothing: the picture's KV comes with the hand-off, and a name is no content."""
    made = issue(key=key, **{**HERE, **prefill})

    assert verify(made, key=key, **{**HERE, **decode}) is StampResult.INCOMPARABLE
    assert verify(made, key=key, **{**HERE, **prefill}) is StampResult.OK


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"items": [(3, PICTURE)]}, {"items": [(3, OTHER_PICTURE)]}),
        ({"items": [(3, PICTURE), (9, "x")]}, {"items": [(3, OTHER_PICTURE)], "names": ["salt s"]}),
        ({"adapter": "weights"}, {"adapter": "other weights"}),
        ({"adapter": "weights", "names": ["lora a"]}, {"adapter": "other weights", "names": ["lora a"]}),
    ],
)
@pytest.mark.parametrize("key", [b"", b"secret"])
def test_a_contradiction_of_content_is_another_prompt(prefill, decode, key):
    """Both sides know the picture or the adapter, and they are not the same."""
    made = issue(key=key, **{**HERE, **prefill})

    assert verify(made, key=key, **{**HERE, **decode}) is StampResult.MISMATCH


def test_items_past_k_do_not_count_and_many_are_bounded():
    """They stand where the digest does not reach; and a stamp stays small however many pictures there are."""
    many = [(n, f"{n:064x}") for n in range(300)]
    made = issue(items=many, **HERE)

    assert stamp.digest(TOKENS, 100, items=[(100, PICTURE)], **HERE) == stamp.digest(TOKENS, 100)
    assert len(made.prompt.content) == stamp.MAX_ITEMS
    assert verify(made, items=many, **HERE) is StampResult.OK
    assert verify(made, items=[*many[:-1], (299, PICTURE)], **HERE) is StampResult.INCOMPARABLE


@pytest.mark.parametrize("tokens", [None, [], [1, "x"], [2**70]])
def test_a_prompt_without_plain_tokens_gets_no_stamp(tokens):
    """Embeddings can't be told apart by tokens."""
    assert stamp.digest(tokens, 5) is None


@pytest.mark.parametrize(("late", "result"), [(34.9, StampResult.OK), (35.1, StampResult.EXPIRED)])
def test_the_lease_ends_with_the_clocks_skew(late, result):
    """Clocks may differ by the skew, and no more."""
    assert verify(issue(lease=30.0), now=NOW + late, skew=5.0) is result


CHANGES = {
    "issued": NOW + 60,
    "lease": 31.0,
    "traceparent": "",
    "prompt.digest": "0" * 32,
    "prompt.content": [[3, "0" * 16]],
    "prompt.hashing": "0" * 16,
    "prompt.adapter": "",
    "prompt.names": "0" * 16,
}


@pytest.mark.parametrize("field", CHANGES)
def test_with_a_key_nothing_in_a_stamp_may_be_changed(field):
    """The MAC covers every field."""
    known = {"items": [(3, PICTURE)], "adapter": "weights", **HERE}
    raw = stamp.encode(issue(key=b"secret", **known))
    outer, _, inner = field.partition(".")
    (raw[outer] if inner else raw)[inner or outer] = CHANGES[field]

    assert verify(stamp.decode(raw), key=b"secret", **known) is StampResult.REJECTED


def test_with_a_key_no_other_length_may_be_claimed():
    """How many tokens it covers is part of what is digested."""
    raw = stamp.encode(issue(key=b"secret"))
    raw["prompt"]["k"] = 498

    assert verify(stamp.decode(raw), key=b"secret") is StampResult.MISMATCH


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
        {"version": 1},
        {"prompt": None},
        {"prompt": GOOD["prompt"] | {"k": -1}},
        {"prompt": GOOD["prompt"] | {"k": True}},
        {"prompt": GOOD["prompt"] | {"k": 2**63}},
        {"prompt": GOOD["prompt"] | {"digest": "A" * 32}},
        {"prompt": GOOD["prompt"] | {"digest": "a" * 33}},
        {"prompt": GOOD["prompt"] | {"content": [[1, "a" * 16]] * 129}},
        {"prompt": GOOD["prompt"] | {"content": [[1, "x"]]}},
        {"prompt": GOOD["prompt"] | {"extra": 1}},
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
    ("raw", "foreign"),
    [
        ({"version": 1}, True),
        ({"version": 3, "x": 1}, True),
        ({"version": 2}, False),
        ({"version": True}, False),
    ],
)
def test_a_stamp_of_another_format_is_told_from_a_broken_one(raw, foreign):
    """A fleet is updated one server after the other."""
    assert stamp.is_foreign(raw) is foreign
