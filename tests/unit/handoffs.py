"""Well-formed params of each connector, and a strategy for those that are not; shared by tests."""

from __future__ import annotations

from hypothesis import strategies as st

BLOCK = 16
PROMPT = 100  # 7 blocks of 16


def nixl(prompt=PROMPT, **change):
    """What a NIXL prefill server answers (nixl/pull_scheduler.py `request_finished`)."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, 1 + -(-prompt // BLOCK)))],
        "remote_engine_id": "engine-p",
        "remote_request_id": "cmpl-1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": prompt,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    return changed(params, change)


def mooncake(**change):
    """What a router gives a Mooncake decode server."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-p",
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "transfer_id": "xfer-1",
    }
    return changed(params, change)


def moriio(**change):
    """What a MoRIIO prefill server answers."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, 8))],
        "remote_engine_id": "engine-p",
        "remote_host": "10.0.0.1",
        "remote_handshake_port": 6301,
        "remote_notify_port": 61005,
        "remote_dp_rank": 0,
        "remote_dp_rank_override": True,
        "remote_dp_size": 1,
        "remote_dp_size_local": 1,
        "tp_size": 1,
        "transfer_id": "xfer-1",
    }
    return changed(params, change)


def changed(params, change):
    """These params with some keys changed; `...` removes a key."""
    return {name: value for name, value in {**params, **change}.items() if value is not ...}


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 2)
    | st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64, 2**70, 65_535, 65_536, 10**9])
    | st.sampled_from(["", "yes", "false", "\ud800", "127.1"])
    | st.floats()
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=12,
)


def mutated(base):
    """`base` with a few of its keys gone, null, or something else; sometimes not a dict at all."""
    names = [*base, "_p_side_truncated", "_remote_blocks_processed", "kv_shim_stamp", "x", "remote_block_size"]
    some = st.dictionaries(st.sampled_from(names), JUNK | st.just(...), max_size=4)
    block_ids = st.fixed_dictionaries(
        {}, optional={"remote_block_ids": st.lists(st.lists(st.integers(0, 300), max_size=12), max_size=3)}
    )
    flags = st.fixed_dictionaries(
        {}, optional={"do_remote_prefill": st.booleans(), "do_remote_decode": st.booleans()}
    )
    return JUNK | st.builds(
        lambda a, b, c, d: changed(base, {**(d if d is not None else {}), **a, **b, **c}),
        some,
        block_ids,
        flags,
        st.none() | st.dictionaries(st.text(max_size=4), JUNK, max_size=2),
    )
