"""A router that sends decode the same hand-off again after a load that failed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from handoffs import BLOCK, PROMPT, moriio, nixl

from shim.config import Settings
from shim.connector.claims import Claims
from shim.connector.guard import Guard
from shim.connector.profiles import profile_for
from shim.connector.retries import CAPACITY, Retries
from shim.verdict import REASON_CLASS, Ask, Facts, Load, LoadResult, PeerKey, Reason, ReasonClass

PEER = PeerKey("10.0.0.1", 5600, "e")


def guard(name="NixlConnector", **kwargs):
    """A decode server's."""
    return Guard(
        profile_for(name),
        Settings(),
        group_count=1,
        block_size=BLOCK,
        is_producer=False,
        is_consumer=True,
        stamp_key=b"",
        **kwargs,
    )


def ended(result, request_id="first", peer=PEER):
    """How the first request's load ended."""
    return Load(request_id, Facts(ask=Ask.LOAD, peer=peer), result, 40, 0, 0.0, 1.0)


def report(failed_loads):
    """A step's output, with what the workers said together."""
    return SimpleNamespace(kv_connector_stats=SimpleNamespace(failed_loads=failed_loads, data={}))


def ask(screening, request_id, params=None, **kwargs):
    """The reason a request is given, and what the connector sees of its params."""
    screened = screening.screen(
        request_id, nixl() if params is None else params, prompt_tokens=PROMPT, **kwargs
    )
    return screened.reason, screened.params


def test_a_load_that_failed_unread_may_be_tried_again():
    """Prefill still has the KV, and plain vLLM pulls it; each try has its own claim."""
    one = guard()
    retries = Retries(one.claims, 1)
    for request_id in ("first", "second", "third"):
        assert ask(one, request_id) == (Reason.NONE, nixl())
        assert ask(one, "meanwhile") == (Reason.HANDOFF_REUSED, None)
        retries.load_ended(ended(LoadResult.FAILED, request_id))


@pytest.mark.parametrize("result", [LoadResult.LOADED, LoadResult.ABORTED])
def test_what_was_read_or_given_up_is_not_given_back(result):
    """The first reader has, or may have, told prefill to free it."""
    one = guard()
    ask(one, "first")
    Retries(one.claims, 1).load_ended(ended(result))
    assert ask(one, "second") == (Reason.HANDOFF_REUSED, None)


@pytest.mark.parametrize(
    ("name", "params", "result", "peer"),
    [
        ("NixlConnector", nixl(), LoadResult.PARTIAL, PEER),
        ("NixlConnector", nixl(tp_size=2), LoadResult.FAILED, PEER),
        ("NixlConnector", nixl(pp_size=2), LoadResult.FAILED, PEER),
        ("NixlConnector", nixl(dcp_size=2), LoadResult.FAILED, PEER),
        ("NixlPushConnector", nixl(tp_size=1), LoadResult.FAILED, PEER),
        ("MoRIIOConnector", moriio(), LoadResult.FAILED, PEER),
    ],
)
def test_a_failure_that_may_have_been_read_is_the_operators(name, params, result, peer):
    """No second load, and no client to blame: it has to alert."""
    one = guard(name, extra_config={"read_mode": True})
    assert ask(one, "first", dict(params))[0] is Reason.NONE
    Retries(one.claims, 1).load_ended(ended(result, peer=peer))
    assert ask(one, "second", dict(params)) == (Reason.LOAD_FAILED, None)
    assert REASON_CLASS[Reason.LOAD_FAILED] is ReasonClass.OPERATOR


def test_another_childs_failed_load_says_nothing_of_the_hand_off():
    """A `MultiConnector`'s CPU tier failed: its loads name no peer."""
    one = guard()
    ask(one, "first")
    Retries(one.claims, 1).load_ended(ended(LoadResult.FAILED, peer=None))
    assert ask(one, "second") == (Reason.HANDOFF_REUSED, None)


@pytest.mark.parametrize("early", [False, True])
def test_all_workers_must_have_failed(early):
    """One that read has told prefill so; their reports come before or after the load's end."""
    one = guard(tp_size=2)
    params = nixl(tp_size=2)
    retries = Retries(one.claims, 2)
    ask(one, "first", dict(params))
    retries.see(report({"first": 1}))
    if early:
        retries.see(report({"first": 1}))
    retries.load_ended(ended(LoadResult.FAILED))
    if not early:
        assert ask(one, "second", dict(params)) == (Reason.LOAD_FAILED, None)
        retries.see(report({"first": 1}))
    assert ask(one, "third", dict(params)) == (Reason.NONE, params)


def test_what_never_completes_is_forgotten():
    """A load that half of the workers read would else be remembered for good."""
    retries = Retries(Claims(float), 2)
    for i in range(2 * CAPACITY):
        retries.see(report({str(i): 1}))
    assert len(retries._failed) == CAPACITY


def test_a_clean_up_frees_only_what_no_request_ever_had():
    """vLLM sends one after the 500: prefill must keep the KV for the retry, and the retry its claim."""
    one = guard()
    ask(one, "first")
    assert ask(one, "clean-up", cleanup=True)[1] is None
    Retries(one.claims, 1).load_ended(ended(LoadResult.FAILED))
    assert ask(one, "clean-up", cleanup=True)[1] is None
    assert ask(one, "second") == (Reason.NONE, nixl())
    rejected = nixl(remote_request_id="cmpl-rejected")
    assert ask(one, "clean-up 2", dict(rejected), cleanup=True) == (Reason.NONE, rejected)
