"""What the inner connector may see, rule by rule."""

from __future__ import annotations

import time

import pytest
from handoffs import BLOCK, PROMPT, mooncake, moriio, nixl

from shim import stamp
from shim.config import Settings
from shim.connector.guard import Guard
from shim.connector.peers import BACK_OFF, THRESHOLD
from shim.connector.profiles import profile_for
from shim.telemetry.catalog import StampResult
from shim.verdict import Ask, Reason

NOW = 1_800_000_000.0


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    """Time that goes on when told to."""
    return Clock()


def build(name="NixlConnector", children=(), clock=None, producer=True, consumer=True, groups=1, **kwargs):
    """A guard with settings and options by name."""
    settings = Settings(**{k: kwargs.pop(k) for k in list(kwargs) if k in Settings.__struct_fields__})
    return Guard(
        profile_for(name, children),
        settings,
        group_count=groups,
        block_size=BLOCK,
        is_producer=producer,
        is_consumer=consumer,
        clock=clock or Clock(),
        wall_clock=lambda: NOW,
        stamp_key=kwargs.pop("stamp_key", b""),
        **kwargs,
    )


def screen(guard, params, owner="r1", prompt_tokens=PROMPT, **kwargs):
    """One request, as the engine would screen it."""
    return guard.screen(owner, params, prompt_tokens=prompt_tokens, **kwargs)


def refused(screened, reason=Reason.PARAMS_INVALID):
    """Whether the params were taken away for this reason; asserts, so that a failure shows what else came."""
    assert screened.params is None
    assert not screened.tell
    assert screened.reason is reason
    return True


def test_a_good_hand_off_passes_unchanged():
    """What prefill said is what the connector sees, the very object."""
    params = nixl()
    screened = screen(build(), params)

    assert screened.params is params
    assert screened.params == nixl()
    assert (screened.reason, screened.tell, screened.ask) == (Reason.NONE, False, Ask.LOAD)
    assert screened.peer == ("10.0.0.1", 5600, "engine-p")
    assert screened.peer_request_id == "cmpl-1"


@pytest.mark.parametrize("name", ["NixlConnector", "FlexKVConnectorV1", "ExampleConnector"])
@pytest.mark.parametrize(
    ("params", "reason"),
    [(None, Reason.PARAMS_MISSING), ({}, Reason.PARAMS_EMPTY)]
    + [(junk, Reason.PARAMS_INVALID) for junk in ("", "x", [], [1], 0, 1, 1.5, True, False)],
)
def test_what_is_no_dict_never_reaches_a_connector(name, params, reason):
    """vLLM 0.32's scheduler calls `.get` on it whatever the connector (PROFILES 0)."""
    assert refused(screen(build(name), params), reason)


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": False, "do_remote_decode": False},
        {"do_remote_prefill": None},
        nixl(do_remote_prefill=False),
        {"other": 1},
    ],
)
def test_params_without_a_flag_ask_for_nothing(params):
    """They are no fault of shape, and the connector may see them."""
    screened = screen(build(), params)

    assert screened.params is not None
    assert (screened.reason, screened.ask) == (Reason.PARAMS_NOT_REMOTE, Ask.NOTHING)


@pytest.mark.parametrize("flag", [{}, {"do_remote_prefill": None}])
def test_half_a_hand_off_names_what_is_missing(flag):
    """Case 8 (smg#1622): a host and a port alone."""
    screened = screen(build(), {"remote_host": "h", "remote_port": 5600} | flag)

    assert refused(screened)
    assert screened.detail == (
        "missing do_remote_prefill, remote_block_ids, remote_engine_id, remote_request_id"
    )


@pytest.mark.parametrize("flag", ["yes", "false", "true", 2, -1, 1.0, [], {}, [True]])
@pytest.mark.parametrize("name", ["do_remote_prefill", "do_remote_decode"])
def test_flags_are_booleans(name, flag):
    """To a connector the string "false" is true."""
    screened = screen(build(), nixl(**{name: flag}))

    assert refused(screened)
    assert name in screened.detail


def test_both_flags_are_refused():
    """With a host buffer that hangs (PROFILES 1.1)."""
    assert refused(screen(build(), nixl(do_remote_decode=True)))


REQUIRED = ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"]


@pytest.mark.parametrize("value", [..., None])
@pytest.mark.parametrize("key", REQUIRED)
def test_nixl_pull_needs_five_keys(key, value):
    """Without one of them the engine dies or the request hangs."""
    screened = screen(build(), nixl(**{key: value}))

    assert refused(screened)
    assert key in screened.detail


@pytest.mark.parametrize("key", [*REQUIRED[1:], "tp_size"])
def test_nixl_push_needs_other_keys(key):
    """It subscripts `tp_size` and needs no block ids."""
    guard = build("NixlPushConnector")

    assert refused(screen(guard, nixl(**{key: ...})))
    assert screen(guard, nixl(remote_block_ids=...)).reason is Reason.NONE


BAD_VALUES = [
    ("remote_engine_id", ["", 1, [], {}, b"x", "\ud800", "x" * 600]),
    ("remote_request_id", ["", 1, ["a"], {}, "\udfff", "x" * 10_000_000]),
    ("remote_host", ["", 1, None, ["h"], "127.1", "0x7f.1", "a b", "h:1", "x" * 300, "h\0"]),
    ("remote_port", [0, -1, 65_536, 2**70, "5600", True, 5600.0, None, []]),
    ("tp_size", [0, -1, 65, 10**9, 2**70, True, "1", 1.0, [1]]),
    ("dcp_size", [0, 65, "1"]),
    ("pp_size", [0, 17, 10**9, True]),
    ("remote_num_tokens", [-1, 2**31, "100", True, 1.5]),
    ("remote_blocks_expiry_time", ["x", True, float("nan"), float("inf"), 10**400, []]),
    (
        "remote_block_ids",
        [
            1,
            True,
            "x",
            {},
            [1, 2],
            [[1], 2],
            [["1"]],
            [[True]],
            [[1.0]],
            [[-1]],
            [[2**31]],
            [[None]],
            [[[1]]],
            [],
            [[1], [2]],
            [[]] * 100,
            [[2**70]],
        ],
    ),
    ("x", [2**64, -(2**63) - 1, "\ud800", object(), {1: 2}, b"x", [2**70], {"a": {"b": 2**70}}]),
]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD_VALUES for value in values])
def test_values_that_connectors_choke_on_are_refused(key, value):
    """Types, ranges and sizes of PROFILES 1.1."""
    screened = screen(build(), nixl(**{key: value}))

    assert refused(screened)
    assert (key if key != "x" else "<unknown key>") in screened.detail


@pytest.mark.parametrize("value", [(), [()], ([1, 2, 3, 4, 5, 6, 7],), [(1, 2, 3, 4, 5, 6, 7)]])
def test_tuples_are_lists(value):
    """Offline use hands prefill's own tuples over."""
    assert screen(build(), nixl(remote_block_ids=value)).reason is not Reason.SHIM_ERROR
    assert (screen(build(), nixl(remote_block_ids=value)).reason is Reason.NONE) is bool(value and value[0])


@pytest.mark.parametrize("key", ["tp_size", "dcp_size", "pp_size"])
def test_nulls_give_way_to_the_connectors_default(key):
    """`params.get("tp_size", 1)` of a null is no 1."""
    screened = screen(build(), nixl(**{key: None}))

    assert screened.reason is Reason.NONE
    assert key not in screened.params


def test_keys_that_a_client_may_not_set_are_left_out():
    """`_p_side_truncated` would skip a needed truncation."""
    params = nixl(_p_side_truncated=True, _remote_blocks_processed=True, prompt_token_ids=[1] * 100_000)
    screened = screen(build(), params)

    assert screened.params == nixl()
    assert "_p_side_truncated" in params


@pytest.mark.parametrize(
    "hostile",
    [
        nixl(remote_block_ids=[list(range(5_000_000))]),
        nixl(x="y" * 20_000_000),
        nixl(x=[[]] * 5_000_000),
        {str(i): i for i in range(1_000_000)},
        nixl(remote_host="h" * 20_000_000),
        nixl(x=dict.fromkeys(map(str, range(1_000_000)))),
    ],
)
def test_megabytes_cost_nothing(hostile):
    """Sizes are checked before they are walked (case 11)."""
    guard = build()
    times = []
    for _ in range(3):  # the machine may be busy once
        start = time.perf_counter()
        screened = screen(guard, hostile)
        times.append(time.perf_counter() - start)

    assert min(times) < 0.005
    assert screened.reason in {Reason.PARAMS_INVALID, Reason.HANDOFF_MISMATCH}


def test_deep_nesting_is_no_recursion():
    """A body can nest deeper than Python's stack."""
    deep: list = []
    for _ in range(100_000):
        deep = [deep]

    assert refused(screen(build(), nixl(x=deep)))
    assert refused(screen(build(), nixl(remote_block_ids=deep)))
    while deep:  # so that freeing it is no recursion either
        deep = deep.pop()


@pytest.mark.parametrize(
    ("prompt", "change"),
    [
        (PROMPT, {"remote_block_ids": [[1, 2, 3, 4, 5, 6]]}),
        (PROMPT, {"remote_num_tokens": 50}),
        (PROMPT * 2, {}),
        (PROMPT // 2, {}),
        (10, {"remote_block_ids": [list(range(200))], "remote_num_tokens": 3200}),
        (PROMPT, {"remote_block_ids": [[]], "remote_num_tokens": 0}),
    ],
)
def test_blocks_of_another_prompt_are_told_but_not_loaded(prompt, change):
    """Prefill may free its blocks; nothing of them is read (case 17)."""
    screened = screen(build(), nixl(**change), prompt_tokens=prompt)

    assert screened.tell
    assert screened.reason is Reason.HANDOFF_MISMATCH
    assert screened.params["remote_block_ids"] == [[]]
    assert screened.params["remote_request_id"] == "cmpl-1"


def test_one_hand_off_serves_one_request(clock):
    """Cases 14 to 16: the second prefills locally and tells prefill nothing."""
    guard = build(clock=clock)

    assert screen(guard, nixl()).reason is Reason.NONE
    assert screen(guard, nixl()).reason is Reason.NONE  # the owner may ask again
    assert refused(screen(guard, nixl(), owner="r2"), Reason.HANDOFF_REUSED)
    assert refused(screen(guard, nixl(remote_port=5601), owner="r2"), Reason.HANDOFF_REUSED)
    assert screen(guard, nixl(remote_request_id="cmpl-2"), owner="r2").reason is Reason.NONE
    clock.now += 3600
    assert screen(guard, nixl(), owner="r3").reason is Reason.NONE


def test_a_hand_off_told_about_is_used_up():
    """A second notification would free what a third request may by then own."""
    guard = build()

    assert screen(guard, nixl(), prompt_tokens=200).tell
    assert refused(screen(guard, nixl(), owner="r2"), Reason.HANDOFF_REUSED)


def test_a_refused_hand_off_is_not_used_up():
    """Who never contacts prefill holds no claim."""
    guard = build(allow_peers=("10.0.0.0/8",))

    assert refused(screen(guard, nixl(remote_host="evil")), Reason.PEER_DENIED)
    assert screen(guard, nixl(), owner="r2").reason is Reason.NONE


def test_siblings_load_nothing():
    """Beam steps, tool follow-ups and further choices of one HTTP request."""
    guard = build()
    screen(guard, nixl())

    assert refused(screen(guard, nixl(), owner="r2", sibling=True), Reason.UNSUPPORTED_MODE)


def test_a_sibling_whose_first_never_came_tells_prefill():
    """Then the blocks are nobody's, and prefill may have them back."""
    screened = screen(build(), nixl(), sibling=True)

    assert screened.tell
    assert screened.reason is Reason.UNSUPPORTED_MODE


@pytest.mark.parametrize("host", ["169.254.169.254", "::ffff:a9fe:a9fe", "0.0.0.0", "fe80::1"])
def test_special_addresses_are_never_contacted(host):
    """Case 12."""
    screened = screen(build(), nixl(remote_host=host))

    assert refused(screened, Reason.PEER_DENIED)
    assert host not in screened.detail


def test_a_failing_peer_is_left_alone_until_its_back_off_ends(clock):
    """Case 21: requests go local at once, and one trial brings the peer back."""
    guard = build(clock=clock)
    peer = screen(guard, nixl()).peer
    for _ in range(THRESHOLD):
        guard.breakers.failed(peer)

    def ask(number):
        return screen(guard, nixl(remote_request_id=f"q{number}"), owner=f"q{number}")

    assert refused(ask(1), Reason.PEER_UNAVAILABLE)
    clock.now += BACK_OFF
    assert ask(1).reason is Reason.NONE  # the trial; being refused had claimed nothing
    assert refused(ask(2), Reason.PEER_UNAVAILABLE)
    guard.breakers.succeeded(peer)
    assert ask(3).reason is Reason.NONE


TOKENS = list(range(PROMPT))


def stamped(tokens=TOKENS, issued=NOW - 1, lease=30.0, key=b""):
    """A hand-off with a stamp."""
    made = stamp.make(stamp.digest(tokens, PROMPT - 1), issued=issued, lease=lease, key=key)
    return nixl(**{stamp.KEY: stamp.encode(made)})


def test_a_good_stamp_is_taken_off():
    """The connector never sees it."""
    screened = screen(build(), stamped(), prompt=stamp.digest(TOKENS, PROMPT - 1))

    assert screened.params == nixl()
    assert (screened.stamp, screened.issued_at) == (StampResult.OK, NOW - 1)


def test_a_stamp_for_another_prompt_is_a_mismatch():
    """Prefill is told, nothing is loaded."""
    screened = screen(build(), stamped([*TOKENS[:-2], 0, 0]), prompt=stamp.digest(TOKENS, PROMPT - 1))

    assert screened.tell
    assert (screened.reason, screened.stamp) == (Reason.HANDOFF_MISMATCH, StampResult.MISMATCH)
    assert stamp.KEY not in screened.params


def test_an_expired_hand_off_is_not_contacted_again():
    """Case 20: the blocks may be another request's by now."""
    assert refused(screen(build(), stamped(issued=NOW - 36)), Reason.HANDOFF_EXPIRED)
    assert screen(build(), stamped(issued=NOW - 34)).reason is Reason.NONE


@pytest.mark.parametrize("raw", [1, "x", {}, {"version": 2}, [], {"k": 10**30}])
def test_a_broken_stamp_is_rejected(raw):
    """It was there, and is no stamp: somebody tampered with it."""
    screened = screen(build(), nixl(**{stamp.KEY: raw}))

    assert refused(screened, Reason.HANDOFF_MISMATCH)
    assert screened.stamp is StampResult.REJECTED


def test_a_stamp_of_another_format_loads():
    """A fleet is updated one server after the other; the prompt is another's no more than without a stamp."""
    screened = screen(build(stamp_key=b"secret"), nixl(**{stamp.KEY: {"version": 1, "k": 99}}))

    assert (screened.reason, screened.stamp) == (Reason.NONE, StampResult.INCOMPARABLE)
    assert stamp.KEY not in screened.params


def test_with_a_key_a_forged_stamp_is_rejected():
    """And the genuine one is not."""
    guard = build(stamp_key=b"secret")
    prompt = stamp.digest(TOKENS, PROMPT - 1)

    assert refused(screen(guard, stamped(), prompt=prompt), Reason.HANDOFF_MISMATCH)
    assert screen(guard, stamped(key=b"secret"), prompt=prompt).stamp is StampResult.OK


def test_without_a_stamp_nothing_is_checked_but_counted():
    """Plain prefill servers go on working."""
    assert screen(build(), nixl()).stamp is StampResult.ABSENT
    assert screen(build(), {"do_remote_decode": True}).stamp is None


# --- prefill side

TOY_PROXY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.mark.parametrize("params", [{"do_remote_decode": True}, TOY_PROXY])
@pytest.mark.parametrize("name", ["NixlConnector", "NixlPushConnector"])
def test_prefill_needs_its_flag_only(name, params):
    """What vLLM's own proxy sends."""
    screened = screen(build(name), params)

    assert screened.params["do_remote_decode"] is True
    assert (screened.reason, screened.ask) == (Reason.NONE, Ask.HANDOFF)


def readback(**change):
    """A prefill request that reads back what decode kept."""
    return nixl(do_remote_prefill=False, do_remote_decode=True, **change)


def test_read_back_keys_are_left_out_where_nothing_is_read_back():
    """Without `bidirectional_kv_xfer` they hang the request (PROFILES 1.1)."""
    screened = screen(build(), readback(remote_num_tokens=10**6, remote_port="junk"))

    assert screened.ask is Ask.HANDOFF
    assert not {"remote_block_ids", "remote_host", "remote_num_tokens"} & set(screened.params)


BIDIRECTIONAL = {"bidirectional_kv_xfer": True}


def test_read_back_works_where_it_is_on():
    """Turn 2 pulls what decode kept, once."""
    guard = build(extra_config=BIDIRECTIONAL)

    assert "remote_block_ids" in screen(guard, readback(), prompt_tokens=300).params
    assert "remote_block_ids" not in screen(guard, readback(), prompt_tokens=300, owner="r2").params
    assert (
        "remote_block_ids"
        not in screen(build(extra_config=BIDIRECTIONAL, host_buffer=True), readback(), prompt_tokens=300).params
    )


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": [[1]]},
        {"remote_num_tokens": ...},
        {"remote_num_tokens": None},
        {"remote_host": None},
        {"remote_host": "169.254.169.254"},
        {"remote_block_ids": [1]},
        {"remote_block_ids": [[1] * 5000]},
    ],
)
def test_a_bad_read_back_costs_prefill_only_the_read_back(change):
    """It still has its own work to do, and a hand-off to issue."""
    screened = screen(build(extra_config=BIDIRECTIONAL), readback(**change), prompt_tokens=300)

    assert screened.params["do_remote_decode"] is True
    assert "remote_block_ids" not in screened.params
    assert screened.ask is Ask.HANDOFF
    assert screened.detail


# --- other connectors


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_bootstrap_addr", "transfer_id"])
def test_mooncake_needs_three_keys(key):
    """Without one of them the request hangs."""
    guard = build("MooncakeConnector", producer=False)

    assert screen(guard, mooncake()).reason is Reason.NONE
    assert refused(screen(guard, mooncake(**{key: ...}), owner="r2"))


@pytest.mark.parametrize("url", ["10.0.0.1:8998", 1, ["http://h"], "http://u@h:1", "ftp://h:1"])
def test_mooncake_peers_are_urls(url):
    """`addr + "/query"` is outside every try."""
    assert refused(screen(build("MooncakeConnector"), mooncake(remote_bootstrap_addr=url)))
    assert refused(
        screen(build("MooncakeConnector"), mooncake(remote_bootstrap_addr="http://169.254.169.254")),
        Reason.PEER_DENIED,
    )


def test_mooncake_asserts_on_roles_and_so_do_we():
    """A pure producer loads nothing, a pure consumer hands nothing off."""
    handoff = {"do_remote_decode": True, "transfer_id": "x"}

    assert refused(screen(build("MooncakeConnector", consumer=False), mooncake()))
    screened = screen(build("MooncakeConnector", producer=False), handoff)
    assert refused(screened)
    assert screened.ask is Ask.HANDOFF
    for roles in ({}, {"producer": False}):
        assert screen(build("MooncakeConnector", **roles), mooncake()).reason is Reason.NONE
    for roles in ({}, {"consumer": False}):
        assert screen(build("MooncakeConnector", **roles), handoff).reason is Reason.NONE


def test_mooncake_prefill_needs_a_transfer_id():
    """Without it nothing is sent, and decode waits for good."""
    assert refused(screen(build("MooncakeConnector"), {"do_remote_decode": True}))


def test_mooncake_prefill_keeps_one_request_a_transfer():
    """Its sender forgets the blocks of the first when a second comes under the same id (`n: 3`)."""
    guard = build("MooncakeConnector", consumer=False)
    params = {"do_remote_decode": True, "transfer_id": "x"}
    for _ in range(2):
        assert screen(guard, params, owner="r1").reason is Reason.NONE
    second = screen(guard, params, owner="r2")
    assert (second.reason, second.params, second.ask) == (Reason.HANDOFF_REUSED, None, Ask.HANDOFF)
    assert screen(guard, params | {"transfer_id": "y"}, owner="r2").reason is Reason.NONE


READ = {"read_mode": True}


def test_moriio_read_mode_needs_blocks_and_an_address():
    """Else it runs on KV that nobody wrote."""

    def guard():
        return build("MoRIIOConnector", producer=False, extra_config=READ)

    assert guard().profile.loads_unasked is not None
    assert screen(guard(), moriio()).reason is Reason.NONE
    for key in ("remote_block_ids", "remote_engine_id", "remote_host", "remote_notify_port"):
        screened = screen(guard(), moriio(**{key: ...}))
        assert refused(screened)
        assert screened.ask is not Ask.LOAD
    assert screen(guard(), moriio(), prompt_tokens=300).tell


ZMQ = "host:10.0.0.9,handshake:6301,notify:61005"
ROUTED = f"cmpl-___prefill_addr_{ZMQ}___decode_addr_{ZMQ}_" + "0" * 32


@pytest.mark.parametrize("mode", [READ, {}])
def test_moriio_peers_may_stand_in_the_request_id(mode):
    """vLLM's router writes them there, and so could a client."""
    no_address = dict.fromkeys(("remote_host", "remote_handshake_port", "remote_notify_port"), ...)

    def ask(owner, **settings):
        guard = build("MoRIIOConnector", producer=False, extra_config=mode, **settings)
        return screen(guard, moriio(**no_address), owner=owner)

    assert ask(ROUTED).peer.host == "10.0.0.9"
    assert refused(ask(ROUTED, allow_peers=("10.0.0.1",)), Reason.PEER_DENIED)
    assert refused(ask(ROUTED.replace("10.0.0.9", "169.254.169.254")), Reason.PEER_DENIED)
    assert refused(ask(ROUTED.replace("handshake", "x")))
    assert refused(ask(ROUTED.replace("6301", "99999")), Reason.PEER_DENIED)
    assert refused(ask("cmpl-1"))


def test_moriio_checks_every_pod():
    """`remote_hosts` are contacted like `remote_host`."""
    guard = build("MoRIIOConnector", extra_config=READ)

    assert refused(screen(guard, moriio(remote_hosts=["10.0.0.2", "169.254.1.1"])), Reason.PEER_DENIED)
    assert refused(screen(guard, moriio(remote_hosts=["10.0.0.2", 1])))
    assert refused(screen(guard, moriio(remote_hosts=["h"] * 100_000)))
    assert screen(guard, moriio(remote_hosts=["10.0.0.2"])).reason is Reason.NONE


@pytest.mark.parametrize("key", ["remote_dp_rank", "remote_dp_size", "remote_dp_size_local"])
def test_moriio_ranks_are_integers(key):
    """`int()` of anything else ends the engine."""
    assert refused(screen(build("MoRIIOConnector", extra_config=READ), moriio(**{key: "x"})))
    assert key not in screen(build("MoRIIOConnector", extra_config=READ), moriio(**{key: None})).params


def test_moriio_write_prefill_subscripts_two_keys():
    """Which may be null, but not absent (moriio_common.py `add_new_req`)."""
    handoff = {
        "do_remote_decode": True,
        "remote_host": "10.0.0.2",
        "remote_handshake_port": 1,
        "remote_notify_port": 2,
    }
    nulls = {"remote_engine_id": None, "remote_block_ids": None}
    guard = build("MoRIIOConnector", consumer=False)

    assert refused(screen(guard, handoff))
    assert screen(guard, {**handoff, **nulls}).reason is Reason.NONE
    assert refused(screen(guard, {**handoff, **nulls, "remote_host": "0.0.0.0"}), Reason.PEER_DENIED)


SPEC = {"req_id": "r", "receiver_host": "10.0.0.2", "receiver_init_port": [1, 2], "receiver_alloc_port": 3}


def test_lmcache_reads_no_flags_and_may_repeat():
    """Its keys are no hand-offs."""
    guard = build("LMCacheConnectorV1")

    for owner in ("r1", "r2"):
        screened = screen(guard, {"lmcache.tag": "x", "ret_first_tok": True}, owner=owner)
        assert screened.params == {"lmcache.tag": "x", "ret_first_tok": True}
        assert (screened.reason, screened.ask) == (Reason.PARAMS_NOT_REMOTE, Ask.NOTHING)
        assert screen(guard, {"disagg_spec": SPEC}, owner=owner).ask is Ask.HANDOFF


@pytest.mark.parametrize(
    "spec",
    [
        1,
        "x",
        [],
        {},
        {**SPEC, "receiver_host": 1},
        {**SPEC, "receiver_init_port": "1"},
        {**SPEC, "req_id": []},
        {k: v for k, v in SPEC.items() if k != "req_id"},
    ],
)
def test_lmcache_subscripts_its_spec(spec):
    """A key it lacks ends the engine."""
    assert refused(screen(build("LMCacheConnectorV1"), {"disagg_spec": spec}))
    assert "disagg_spec" not in screen(build("LMCacheConnectorV1"), {"disagg_spec": None, "x": 1}).params


def test_lmcache_names_a_peer():
    """Its receiver is contacted."""
    spec = {**SPEC, "receiver_host": "169.254.169.254"}

    assert refused(screen(build("LMCacheConnectorV1"), {"disagg_spec": spec}), Reason.PEER_DENIED)


@pytest.mark.parametrize(
    ("name", "key"),
    [("LMCacheConnectorV1", "ret_first_tok"), ("LMCacheMPConnector", "num_lmcache_extra_cached_tokens")],
)
def test_what_is_fatal_without_output_is_left_out_for_an_aborted_request(name, key):
    """`_output_token_ids[0]` of a request that generated nothing."""
    guard = build(name)
    params = {key: True, "x": 1}

    assert guard.for_finish(params, has_output=True) is params
    assert guard.for_finish(params, has_output=False) == {"x": 1}
    assert guard.for_finish(None, has_output=False) is None


SOURCE = {"kv_request_id": "r", "remote_host": "10.0.0.2", "remote_port": 5}


@pytest.mark.parametrize("record", ["remote_prefiller", "remote_kv_source"])
def test_offloading_names_peers_in_records(record):
    """Its P2P tier reads sub-dicts."""
    guard = build("OffloadingConnector")

    for owner in ("r1", "r2"):
        assert screen(guard, {record: SOURCE}, owner=owner).peer.host == "10.0.0.2"
    for change in (
        {"remote_host": "0.0.0.0"},
        {"remote_port": "5"},
        {"kv_request_id": []},
        {"kv_request_id": None},
    ):
        assert screen(guard, {record: {**SOURCE, **change}}).params is None
    assert refused(screen(guard, {record: "x"}))
    assert refused(screen(guard, {"remote_decoder": {"kv_request_id": []}}))
    assert screen(guard, {"remote_decoder": {"kv_request_id": "r"}}).ask is Ask.HANDOFF


def test_an_unknown_connectors_params_are_only_looked_at():
    """Whatever they are, it may know what to do with them."""
    params = {"do_remote_prefill": True, "_x": object()}

    assert screen(build("my.module:Connector"), params).params is params
    assert screen(build("my.module:Connector"), params).ask is Ask.LOAD


def test_every_child_of_multi_must_be_satisfied():
    """Each one sees the same dict, and each one may end the engine."""
    guard = build("MultiConnector", children=["NixlConnector", "MooncakeConnector"])

    assert refused(screen(guard, nixl()))
    assert refused(screen(guard, mooncake()))
    both = {**mooncake(), **nixl()}
    assert screen(guard, both).reason is Reason.NONE
    assert refused(screen(guard, {**both, "transfer_id": "other"}, owner="r2"), Reason.HANDOFF_REUSED)
    # A claim on one of the two hand-offs must not be left behind by a request that got neither.
    assert (
        screen(guard, {**both, "transfer_id": "other", "remote_request_id": "o"}, owner="r3").reason
        is Reason.NONE
    )


def test_details_are_short_printable_and_name_no_strange_keys():
    """They go into log lines."""
    for params in (
        nixl(**{"evil\n" * 100: "\ud800"}),
        nixl(remote_host="\n\x1b[31m" * 50),
        {"remote_host": "x"},
    ):
        detail = screen(build(), params).detail
        assert 0 < len(detail) <= 128
        assert detail.isascii()
        assert detail.isprintable()
        assert "evil" not in detail


def test_two_groups_without_a_layout_are_only_checked_for_their_number():
    """What kind of groups they are is not known then."""
    guard = build(groups=2)

    assert screen(guard, nixl(remote_block_ids=[[1, 2], [3]])).reason is Reason.NONE
    assert refused(screen(guard, nixl(remote_block_ids=[[1, 2]])))
