"""`normalize_prefill` and the real Mooncake scheduler, which hands off only what ended by length (#46008)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from scheduling import STOP_TOKEN, Steps, make_config, make_request, make_scheduler
from test_ledger_wrapped import counted, finish
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from shim import plugin

PROMPT = list(range(8, 108))
EOS = 3
HANDOFF = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"}
STOPPED, LENGTH = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED


@dataclass(slots=True)
class Prefill:
    """A Mooncake prefill engine whose model says `token` next, bare or with the shim around it."""

    steps: Steps
    free: int

    @classmethod
    def bare(cls, token: int = STOP_TOKEN) -> Prefill:
        """vLLM's own connector."""
        return cls._of(make_config("MooncakeConnector", role="kv_producer"), token)

    @classmethod
    def wrapped(cls, token: int = STOP_TOKEN, **settings: Any) -> Prefill:
        """The shim, with these settings."""
        plugin.install()
        extra = json.dumps({"shim": {"connector": "MooncakeConnector", **settings}})
        return cls._of(make_config("shim", role="kv_producer", extra=extra), token)

    @classmethod
    def _of(cls, config: Any, token: int) -> Prefill:
        steps = Steps(make_scheduler(config))
        steps.token = token
        made = cls(steps, 0)
        made.free = made.pool()
        return made

    def pool(self) -> int:
        """KV blocks that nobody holds."""
        return self.steps.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def prefill(self, request: Request) -> list[Any]:
        """Run it to its end; the connector's metadata of each step until the one after."""
        self.steps.add(request)
        metas = [self.steps.step().kv_connector_metadata for _ in range(4)]
        assert request.is_finished()
        return metas


def asked(**changes: Any) -> Request:
    """A prefill as a router asks for it: one token, and a `transfer_id` of the router's."""
    return make_request("p", PROMPT, **{"max_tokens": 1, "params": dict(HANDOFF), **changes})


def ends_with_eos(request: Request) -> Request:
    """The same with an EOS token in place of the caller's stop token."""
    request.sampling_params.stop_token_ids = []
    request.sampling_params._eos_token_id = EOS
    return request


def sent(metas: list[Any]) -> list[str]:
    """Transfer ids whose blocks the worker was told to send."""
    return [
        transfer_id
        for meta in metas
        for transfer_id, blocks in meta.reqs_to_send.values()
        if any(len(group) for group in blocks)
    ]


def refused(metas: list[Any]) -> set[str]:
    """Transfer ids that the worker was told to forget."""
    return set().union(*(meta.reqs_not_processed for meta in metas))


@pytest.mark.parametrize("eos", [False, True])
def test_mooncake_alone_hands_off_nothing_that_stopped(eos: bool) -> None:
    """The defect itself: decode would wait for a transfer that prefill has forgotten."""
    engine = Prefill.bare(EOS if eos else STOP_TOKEN)
    request = ends_with_eos(asked()) if eos else asked()
    metas = engine.prefill(request)
    assert request.status is STOPPED
    assert sent(metas) == []
    assert refused(metas) == {"xfer-1"}
    assert engine.pool() == engine.free


def test_without_the_setting_the_shim_leaves_it_and_says_why() -> None:
    """The default changes nothing of what the inner connector does."""
    engine = Prefill.wrapped()
    request = asked()
    metas = engine.prefill(request)
    assert request.status is STOPPED
    assert (sent(metas), refused(metas)) == ([], {"xfer-1"})
    assert counted(engine.steps, "handoffs|") == {"handoffs|missing|finished_stop": 1}
    assert counted(engine.steps, "requests|") == {"requests|prefill|none": 1}


@pytest.mark.parametrize("eos", [False, True])
def test_with_the_setting_the_prefill_ends_by_length_and_hands_off(eos: bool) -> None:
    """Its one token is thrown away, so how it ends is nobody's business but the connector's."""
    engine = Prefill.wrapped(EOS if eos else STOP_TOKEN, normalize_prefill=True)
    request = ends_with_eos(asked()) if eos else asked()
    metas = engine.prefill(request)
    assert request.status is LENGTH
    assert list(request.output_token_ids) == [EOS if eos else STOP_TOKEN]
    assert (sent(metas), refused(metas)) == (["xfer-1"], set())
    assert engine.pool() < engine.free, "the blocks wait for their reader"
    engine.steps.step(KVConnectorOutput(finished_sending={"p"}))
    finish(engine.steps)
    assert engine.pool() == engine.free
    assert counted(engine.steps, "handoffs|") == {"handoffs|issued|none": 1}
    assert counted(engine.steps, "handoffs_closed|") == {"handoffs_closed|unknown": 1}


def test_the_callers_sampling_params_are_not_changed() -> None:
    """They may be shared by other requests of the same caller."""
    engine = Prefill.wrapped(normalize_prefill=True)
    request = asked()
    theirs = request.sampling_params
    engine.prefill(request)
    assert theirs.stop_token_ids == [STOP_TOKEN]
    assert request.sampling_params is not theirs


@pytest.mark.parametrize(
    "changes",
    [{"max_tokens": 4}, {"params": None}, {"params": {**HANDOFF, "transfer_id": ""}}],
    ids=["more than one token", "no params", "refused params"],
)
def test_a_request_that_is_no_prefill_for_another_server_still_stops(changes: dict[str, Any]) -> None:
    """Its output is what the caller reads."""
    engine = Prefill.wrapped(normalize_prefill=True)
    request = asked(**changes)
    metas = engine.prefill(request)
    assert request.status is STOPPED
    assert sent(metas) == []
    assert engine.pool() == engine.free
