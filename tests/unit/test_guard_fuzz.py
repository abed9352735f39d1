"""Screening never raises, and what it lets through has the shape the connector needs."""

from __future__ import annotations

import os

import pytest
from handoffs import BLOCK, JUNK, PROMPT, mooncake, moriio, mutated, nixl
from hypothesis import given, settings
from hypothesis import strategies as st

from shim.config import Settings
from shim.connector.guard import Guard, Screened
from shim.connector.profiles import PROFILES, profile_for
from shim.verdict import Ask, Reason

EXAMPLES = int(os.environ.get("SHIM_FUZZ_EXAMPLES", "100"))
fuzz = settings(max_examples=EXAMPLES, deadline=None)


def fresh(name, children=(), **kwargs):
    """A guard that has seen nothing."""
    return Guard(
        profile_for(name, children),
        Settings(),
        group_count=1,
        block_size=BLOCK,
        is_producer=True,
        is_consumer=True,
        stamp_key=b"",
        **kwargs,
    )


def screened(name, params, *, prompt=PROMPT, sibling=False, **kwargs):
    """One request screened by a fresh guard."""
    return fresh(name, **kwargs).screen("r", params, prompt_tokens=prompt, sibling=sibling)


def is_id(value):
    """What every connector takes as an id."""
    return type(value) is str and 0 < len(value) <= 512 and bool(value.encode())


def is_blocks(value, count=None):
    """What every connector takes as the block ids of one group."""
    return (
        type(value) in {list, tuple}
        and len(value) == 1
        and all(type(i) is int and 0 <= i < 2**31 for i in value[0])
        and (count is None or len(value[0]) == count)
    )


def nixl_shape(params):
    """What both NIXL schedulers need for a load."""
    return (
        params["do_remote_prefill"] == 1
        and not params.get("do_remote_decode")
        and all(is_id(params[key]) for key in ("remote_engine_id", "remote_request_id", "remote_host"))
        and type(params["remote_port"]) is int
        and 0 < params["remote_port"] < 65_536
        and all(1 <= params.get(key, 1) <= 64 for key in ("tp_size", "dcp_size", "pp_size"))
        and not any(key.startswith("_") for key in params)
    )


@pytest.mark.parametrize("name", [*PROFILES, "Unknown"])
@given(params=JUNK | st.dictionaries(st.text(max_size=8), JUNK))
@settings(max_examples=max(20, EXAMPLES // 10), deadline=None)
def test_no_value_makes_screening_raise(name, params):
    """Arbitrary JSON for any connector."""
    result = screened(name, params)

    assert isinstance(result, Screened)
    assert result.params is None or type(result.params) is dict
    assert result.reason is not Reason.SHIM_ERROR
    assert not (result.tell and result.params is None)


@given(mutated(nixl()), st.integers(1, 300), st.booleans(), st.booleans())
@fuzz
def test_what_nixl_pull_sees_has_its_shape(params, prompt, bidirectional, sibling):
    """Whatever was sent, a load has five good keys and blocks enough."""
    extra = {"bidirectional_kv_xfer": bidirectional}
    result = screened("NixlConnector", params, prompt=prompt, sibling=sibling, extra_config=extra)
    if result.ask is Ask.LOAD:
        assert nixl_shape(result.params)
        assert is_blocks(result.params["remote_block_ids"])
        if not result.tell:
            assert len(result.params["remote_block_ids"][0]) >= -(-prompt // BLOCK)
    elif result.params is not None:
        assert not result.params.get("do_remote_prefill")
        if result.params.get("do_remote_decode") and result.params.get("remote_block_ids"):
            assert bidirectional
            assert is_blocks(result.params["remote_block_ids"])


@given(mutated(nixl()), st.integers(1, 300))
@fuzz
def test_what_nixl_push_sees_has_its_shape(params, prompt):
    """Push subscripts `tp_size`, too."""
    result = screened("NixlPushConnector", params, prompt=prompt)
    if result.ask is Ask.LOAD:
        assert nixl_shape(result.params)
        assert "tp_size" in result.params
    elif result.params is not None:
        assert not result.params.get("do_remote_prefill")


@given(mutated(mooncake()))
@fuzz
def test_what_mooncake_sees_has_its_shape(params):
    """Three ids, one of them a URL."""
    result = screened("MooncakeConnector", params)
    if result.ask is Ask.LOAD:
        assert all(
            is_id(result.params[k]) for k in ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")
        )
        assert result.params["remote_bootstrap_addr"].startswith(("http://", "https://"))
    elif result.params is not None:
        assert not result.params.get("do_remote_prefill")
        assert not result.params.get("do_remote_decode") or is_id(result.params["transfer_id"])


@given(mutated(moriio()), st.booleans())
@fuzz
def test_what_moriio_sees_has_its_shape(params, read):
    """Addresses and ranks that `int()` takes; in read mode blocks, too."""
    result = screened("MoRIIOConnector", params, extra_config={"read_mode": read})
    if result.ask is Ask.LOAD:
        assert is_id(result.params["remote_host"])
        assert all(type(result.params[k]) is int for k in ("remote_handshake_port", "remote_notify_port"))
        assert all(type(result.params.get(k, 0)) is int for k in ("remote_dp_rank", "remote_dp_size"))
        if read:
            assert is_blocks(result.params["remote_block_ids"], count=None if result.tell else 7)
