"""The policy: what is refused, what is bounded, and that a fault of ours refuses nobody."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from shim.config import ExpectRemote, read_settings
from shim.entrypoint import counters, handoff
from shim.entrypoint import policy as policies
from shim.entrypoint.middleware import HttpRequest, RequestContext, current_request
from shim.entrypoint.policy import Policy, RefusedError
from shim.telemetry.catalog import EntrypointEvent
from shim.verdict import Endpoint, Reason

GOOD = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}


class Kind(Enum):
    """vLLM's RequestOutputKind."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class Sampling:
    """Stands in for vLLM's SamplingParams."""

    extra_args: dict[str, Any] | None = None
    output_kind: Kind = Kind.DELTA
    n: int = 1


@dataclass
class Output:
    """Stands in for vLLM's RequestOutput."""

    text: str
    finished: bool


def policy(expect: ExpectRemote = ExpectRemote.ALWAYS, **section: Any) -> Policy:
    """A decode server's policy over NIXL, as it is installed."""
    config = SimpleNamespace(
        kv_connector="NixlConnector",
        kv_connector_extra_config={},
        kv_role="kv_consumer",
        is_kv_producer=False,
        is_kv_consumer=True,
        engine_id="d",
    )
    return Policy(read_settings({"shim": {"expect_remote": expect, **section}}), config)


def http(body: dict[str, Any] | None = None, **headers: str) -> HttpRequest:
    """A request on a generating route."""
    listed = [(name.encode(), value.encode()) for name, value in headers.items()]
    request = HttpRequest({"path": "/v1/completions", "headers": listed})
    request.remember(json.dumps(body or {}).encode())
    return request


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (None, Reason.PARAMS_MISSING),
        ({}, Reason.PARAMS_EMPTY),
        ({"x": 1}, Reason.PARAMS_NOT_REMOTE),
        ({"do_remote_prefill": True}, Reason.PARAMS_INVALID),
        ({**GOOD, "remote_host": "169.254.169.254"}, Reason.PEER_DENIED),
        (GOOD, None),
    ],
)
def test_what_can_be_known_is_refused(params: Any, reason: Reason | None) -> None:
    """`refuse` names each fault the API server can see, wherever the params are; a good hand-off passes."""
    refuse = policy(on_local_prefill="refuse")
    extra = None if params is None else {"kv_transfer_params": params}
    assert refuse.refuses(http(), Sampling(extra), 100) is reason
    assert refuse.refuses(http({"kv_transfer_params": params}), Sampling(), 100) is reason


def test_an_opinion_claims_nothing() -> None:
    """Single use is the engine's to judge: a thousand requests leave no claim and no breaker here."""
    refuse = policy(on_local_prefill="refuse")
    for number in range(1000):
        params = {**GOOD, "remote_request_id": f"r{number}"}
        assert refuse.refuses(http(), Sampling({"kv_transfer_params": params}), 40) is None
    assert len(refuse.guard.claims) == 0
    assert len(refuse.guard.breakers) == 0


def test_good_hand_offs_may_come_again() -> None:
    """Whoever owned a hand-off here, another request's is as good: the engine says which may read."""
    refuse = policy(on_local_prefill="refuse")
    for request_id in ("a", "b", "c"):
        assert refuse.guard.screen(request_id, dict(GOOD), prompt_tokens=40).reason is Reason.NONE


def test_allowing_is_the_default() -> None:
    """Nothing is refused unless the operator says so."""
    assert policy().refuses(http(), Sampling(), 10**6) is None


@pytest.mark.parametrize(("length", "refused"), [(100, False), (101, True), (None, False)])
def test_short_prompts_may_be_prefilled_here(length: int | None, refused: bool) -> None:
    """A number bounds the prompt; one of unknown length is not refused."""
    bounded = policy(on_local_prefill=100)
    assert (bounded.refuses(http(), Sampling(), length) is not None) is refused


def test_what_is_no_fault_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trusted marks, servers that expect nothing, further engine requests, and no HTTP request at all."""
    marked = policy(on_local_prefill="refuse")
    settings = read_settings({"shim": {"trusted_router_marks": ["kept=local"]}})
    monkeypatch.setattr(handoff.server, "settings", settings)
    assert marked.refuses(http({"kept": 1}), Sampling(), 100) is None
    assert marked.refuses(http(), Sampling(), 100) is Reason.PARAMS_MISSING
    assert policy(ExpectRemote.NEVER, on_local_prefill="refuse").refuses(http(), Sampling(), 9) is None
    assert policy(ExpectRemote.AUTO, on_local_prefill="refuse").refuses(http(), Sampling(), 9) is None
    further = http()
    further.owner = "first"
    assert marked.refuses(further, Sampling(), 100) is None
    marked.check(None, Sampling(), [1, 2])


def test_a_fault_of_ours_refuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy throws: the request goes on, and the fault is counted."""
    refuse, request = policy(on_local_prefill="refuse"), http()
    with pytest.raises(RefusedError):
        refuse.check(request, Sampling(), None)

    def boom(*_: object) -> None:
        raise RuntimeError

    counted = []
    monkeypatch.setattr(Policy, "refuses", boom)
    monkeypatch.setattr(counters, "count", lambda *event: counted.append(event))
    untouched = http()
    refuse.check(untouched, Sampling(), None)
    assert untouched.refused is None
    assert counted == [(EntrypointEvent.HOOK_ERROR, Endpoint.COMPLETIONS)]


def test_a_fault_of_ours_bounds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for the params throws: the request goes on as vLLM made it."""

    def boom(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(policies, "waits_for_load", boom)
    assert policy(load_timeout=1.0).bounds(http(), Sampling()) is False


def llm(behaviour: Any) -> Any:
    """A class like AsyncLLM, whose `generate` does as told and records what it was given."""

    class Llm:
        def __init__(self) -> None:
            self.seen: list[Any] = []
            self.aborted = 0

        async def generate(
            self, prompt: Any, sampling_params: Any, request_id: str, **_: Any
        ) -> AsyncIterator[str]:
            self.seen.append(sampling_params.extra_args)
            try:
                async for output in behaviour(len(self.seen)):
                    yield output
            except asyncio.CancelledError:
                self.aborted += 1
                raise

    return Llm


async def slow_once(attempt: int) -> AsyncIterator[str]:
    """The first try waits for a peer that never answers."""
    if attempt == 1:
        await asyncio.sleep(60)
    for word in ("a", "b"):
        yield word


def run(made: Any, extra: dict[str, Any] | None, request: HttpRequest | None = None) -> list[str]:
    """All outputs of one generation, inside this HTTP request."""

    async def collect() -> list[str]:
        from shim.entrypoint import middleware

        token = middleware._current.set(request)
        try:
            return [out async for out in made.generate({"prompt_token_ids": [1]}, Sampling(extra), "r")]
        finally:
            middleware._current.reset(token)

    return asyncio.run(collect())


def test_a_load_that_never_ends_is_given_up_and_done_here() -> None:
    """After `load_timeout` the first try is cancelled, and the second has no params; nothing was sent twice."""
    cls = llm(slow_once)
    policies.install(cls, policy(load_timeout=0.05))
    made, request = cls(), http()
    assert run(made, {"kv_transfer_params": GOOD, "keep": 1}, request) == ["a", "b"]
    assert made.seen == [{"kv_transfer_params": GOOD, "keep": 1}, {"keep": 1}]
    assert (made.aborted, request.timed_out) == (1, True)


@pytest.mark.parametrize("n", [1, 2])
def test_a_whole_reply_may_take_longer_than_the_load(n: int) -> None:
    """A final-only reply shows nothing before its end: what is bounded is its load, and it comes as asked."""
    kinds: list[Kind] = []

    class Llm:
        async def generate(
            self, prompt: Any, sampling_params: Sampling, request_id: str, **_: Any
        ) -> AsyncIterator[Output]:
            kinds.append(sampling_params.output_kind)
            if sampling_params.output_kind is not Kind.FINAL_ONLY:
                yield Output("a", finished=False)
            await asyncio.sleep(0.2)
            yield Output("ab", finished=True)

    policies.install(Llm, policy(load_timeout=0.05))
    asked = Sampling({"kv_transfer_params": GOOD}, Kind.FINAL_ONLY, n)

    async def collect() -> list[Output]:
        return [out async for out in Llm().generate({"prompt_token_ids": [1]}, asked, "r")]

    assert asyncio.run(collect()) == [Output("ab", finished=True)]
    # With several children each would come out by itself, so they are not bounded.
    assert kinds == [Kind.CUMULATIVE if n == 1 else Kind.FINAL_ONLY]
    assert asked.output_kind is Kind.FINAL_ONLY


def test_only_loads_are_bounded() -> None:
    """A request that waits for no peer may take as long as it takes."""

    async def slow(_: int) -> AsyncIterator[str]:
        await asyncio.sleep(0.15)
        yield "a"

    cls = llm(slow)
    policies.install(cls, policy(load_timeout=0.05))
    made = cls()
    assert run(made, None, http()) == ["a"]
    assert len(made.seen) == 1


def test_a_reply_that_began_is_never_begun_again() -> None:
    """The bound is on the first output; what comes slowly after it is no wait for KV."""

    async def dripping(_: int) -> AsyncIterator[str]:
        yield "a"
        await asyncio.sleep(0.15)
        yield "b"

    cls = llm(dripping)
    policies.install(cls, policy(load_timeout=0.05))
    made = cls()
    assert run(made, {"kv_transfer_params": GOOD}, http()) == ["a", "b"]
    assert len(made.seen) == 1


def serve(app: Any) -> list[dict[str, Any]]:
    """One request through the middleware; the ASGI messages that went out."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    asyncio.run(RequestContext(app)({"type": "http", "path": "/v1/completions", "headers": []}, receive, send))
    return sent


@pytest.mark.parametrize("streams", [False, True])
def test_a_refusal_is_a_503_that_says_why(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a stream, whose 200 had already begun: its start is held back until its first body."""
    monkeypatch.setattr(RequestContext, "gated", True)
    refuse = policy(on_local_prefill="refuse")

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if streams:
            await send(start)
        with pytest.raises(RefusedError, match="params_missing"):
            refuse.check(current_request(), Sampling(), [1])
        if not streams:
            await send(start)
        await send({"type": "http.response.body", "body": b"data: error", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    start, body = serve(app)
    assert start["status"] == 503
    assert (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["reason"] == "params_missing"


def test_an_allowed_reply_passes_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate delays the start, and changes nothing."""
    monkeypatch.setattr(RequestContext, "gated", True)
    messages = [
        {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]},
        {"type": "http.response.body", "body": b"1", "more_body": True},
        {"type": "http.response.body", "body": b"2"},
    ]

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    assert serve(app) == messages
