"""The entrypoint: what is recovered from an HTTP request, for which engine request, and what is not."""

import asyncio
import copy
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from opentelemetry import context, trace
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from shim import stamp
from shim.config import read_settings
from shim.connector.recover import NOTHING_ATTACHED, Attached, put_params, read_attached
from shim.entrypoint import handoff
from shim.entrypoint.handoff import _note, attach, server, strip
from shim.entrypoint.middleware import (
    PARAMS_BYTES_LIMIT,
    HttpRequest,
    Reply,
    RequestContext,
    Unreadable,
    current_request,
    endpoint_of,
)
from shim.telemetry.catalog import EntrypointEvent
from shim.verdict import Endpoint, HandoffReason, Source

TRACE = "a" * 32 + "-" + "b" * 16
HANDOFF = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 5600}


@dataclass
class Sampling:
    """Stands in for vLLM's SamplingParams, which unit tests can't import."""

    extra_args: dict[str, Any] | None = None
    output_kind: Any = None


@dataclass
class EngineRequest:
    """Stands in for vLLM's EngineCoreRequest."""

    request_id: str
    sampling_params: Sampling | None = field(default_factory=Sampling)
    external_req_id: str | None = None
    prompt_token_ids: list[int] | None = None
    mm_features: Any = None
    lora_request: Any = None
    cache_salt: str | None = None
    abort_immediately: bool = False


def serve(
    body: bytes | list[bytes],
    *engine_requests: EngineRequest,
    path: str = "/inference/v1/generate",
    headers: dict[str, str] | None = None,
) -> list[Attached]:
    """Run one HTTP request through the middleware, whose application makes these engine requests."""

    async def run() -> None:
        chunks = [body] if isinstance(body, bytes) else body
        messages = [
            {"type": "http.request", "body": chunk, "more_body": index < len(chunks) - 1}
            for index, chunk in enumerate(chunks)
        ]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            raise AssertionError(message)

        async def app(_scope: Any, receive: Any, _send: Any) -> None:
            while (await receive())["more_body"]:
                pass
            for request in engine_requests:
                await asyncio.create_task(asyncio.to_thread(attach, request))

        scope = {
            "type": "http",
            "path": path,
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
        }
        await RequestContext(app)(scope, receive, send)
        assert current_request() is None

    asyncio.run(run())
    return [
        read_attached(request.sampling_params.extra_args)
        for request in engine_requests
        if request.sampling_params
    ]


def body(**fields: Any) -> bytes:
    """A request body."""
    return json.dumps({"model": "m", **fields}).encode()


def test_params_the_route_dropped_are_recovered() -> None:
    """vLLM #42644: the body has params, the engine has none, so they travel beside."""
    [attached] = serve(body(kv_transfer_params=HANDOFF), EngineRequest("cmpl-1-x", external_req_id="cmpl-1"))
    assert (attached.kv, attached.source, attached.endpoint) == (HANDOFF, Source.BODY, Endpoint.GENERATE)
    assert attached.external_id == "cmpl-1"


def test_a_clean_up_is_counted_as_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own engine request for what it rejected is no generation: it is described as none."""
    counted = []
    monkeypatch.setattr(handoff, "count", lambda *event: counted.append(event))
    monkeypatch.setattr(server, "has_connector", False)
    cleanup = EngineRequest(
        "cmpl-1", Sampling({"kv_transfer_params": HANDOFF}), prompt_token_ids=[0], abort_immediately=True
    )
    (attached,) = serve(b"{}", cleanup, path="/v1/completions")
    assert attached == NOTHING_ATTACHED
    assert cleanup.sampling_params.extra_args["kv_transfer_params"] is HANDOFF
    assert counted == [(EntrypointEvent.REJECTED_BEFORE_ENGINE, Endpoint.COMPLETIONS)]


def test_params_the_engine_has_stay_as_they_are() -> None:
    """What reached the engine is never overruled by the body."""
    request = EngineRequest("a", Sampling({"kv_transfer_params": {"do_remote_decode": True}}))
    [attached] = serve(body(kv_transfer_params=HANDOFF), request)
    assert (attached.kv, attached.source, attached.asked) == (None, Source.NONE, False)
    assert request.sampling_params is not None
    assert request.sampling_params.extra_args is not None
    assert request.sampling_params.extra_args["kv_transfer_params"] == {"do_remote_decode": True}


@pytest.mark.parametrize(
    ("value", "kv", "source"), [({}, {}, Source.BODY), (None, None, Source.NONE), ("x", "x", Source.BODY)]
)
def test_empty_is_not_missing(value: object, kv: object, source: Source) -> None:
    """`{}` passes as `{}`, null is missing, and both say that somebody asked."""
    [attached] = serve(body(kv_transfer_params=value), EngineRequest("a"))
    assert (attached.kv, attached.source, attached.asked) == (kv, source, True)


def test_encoder_params_are_recovered_too() -> None:
    """`ec_transfer_params` gets lost the same way."""
    [attached] = serve(body(ec_transfer_params={"hash": {"peer": 1}}), EngineRequest("a"))
    assert attached.ec == {"hash": {"peer": 1}}
    assert attached.kv is None


def test_only_the_first_engine_request_gets_the_handoff() -> None:
    """`n > 1` and prompt lists: one hand-off, one reader; the rest are marked."""
    children = [EngineRequest(f"{i}_cmpl-1-x", external_req_id="cmpl-1") for i in range(3)]
    first, second, third = serve(body(kv_transfer_params=HANDOFF), *children)
    assert (first.kv, first.sibling, first.siblings) == (HANDOFF, 0, HandoffReason.N_GT_1)
    assert [(c.kv, c.sibling, c.siblings) for c in (second, third)] == [
        (None, 1, HandoffReason.N_GT_1),
        (None, 2, HandoffReason.N_GT_1),
    ]
    prompts = [EngineRequest(f"cmpl-1-{i}-x", external_req_id=f"cmpl-1-{i}") for i in range(2)]
    again = copy.deepcopy(prompts)
    _, other = serve(body(kv_transfer_params=HANDOFF), *prompts, path="/v1/completions")
    assert (other.sibling, other.siblings) == (1, HandoffReason.PROMPT_LIST)
    _, step = serve(body(kv_transfer_params=HANDOFF), *again, path="/v1/chat/completions")
    assert (step.sibling, step.siblings) == (1, HandoffReason.NONE)


def test_without_a_handoff_there_are_no_siblings_of_one() -> None:
    """A prompt list whose params were lost is two requests that miss their params."""
    prompts = [EngineRequest(f"cmpl-1-{i}-x", external_req_id=f"cmpl-1-{i}") for i in range(2)]
    _, other = serve(body(), *prompts, path="/v1/completions")
    assert other.sibling == 0


def test_shared_sampling_params_are_copied() -> None:
    """Children share one SamplingParams: what one gets, the others must not see."""
    shared = Sampling({"top": 1})
    children = [EngineRequest("0_a-x", shared, "a"), EngineRequest("1_a-x", shared, "a")]
    before = copy.deepcopy(shared)
    serve(body(kv_transfer_params=HANDOFF), *children)
    assert shared == before
    assert children[0].sampling_params is not children[1].sampling_params


def test_a_client_cannot_write_the_metadata() -> None:
    """`kv_shim` in extra_args is always overwritten."""
    forged = EngineRequest("a", Sampling({"kv_shim": {"kv": HANDOFF, "source": "header"}}))
    [attached] = serve(body(), forged)
    assert (attached.kv, attached.source) == (None, Source.NONE)


def test_the_body_is_not_parsed_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, or params already there: the body's bytes are looked at, never decoded."""

    def forbidden(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("shim.entrypoint.middleware._fields", forbidden)
    [attached] = serve(body(prompt="kv_transfer"), EngineRequest("a"))
    assert attached.kv is None
    request = EngineRequest("a", Sampling({"kv_transfer_params": {}}))
    serve(body(kv_transfer_params=HANDOFF), request)


def test_a_body_in_pieces_is_one_body() -> None:
    """Streamed and 10 MB bodies work, also when the key straddles two chunks."""
    whole = body(prompt="x" * 10_000_000, kv_transfer_params=HANDOFF)
    cut = whole.index(b"kv_transfer") + 5
    [attached] = serve([whole[:1000], b"", whole[1000:cut], whole[cut:]], EngineRequest("a"))
    assert attached.kv == HANDOFF


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"not json kv",
        b'"kv_transfer_params"',
        b'["kv_transfer_params"]',
        b'{"kv_transfer_params": ',
        b"\xff" * 9,
    ],
)
def test_a_body_that_is_no_json_is_left_to_vllm(junk: bytes) -> None:
    """The shim finds nothing and says nothing."""
    [attached] = serve(junk, EngineRequest("a"))
    assert (attached.kv, attached.asked, attached.unreadable) == (None, False, False)


def test_a_body_python_would_take_is_read_the_same_way() -> None:
    """NaN is no JSON, but vLLM takes it."""
    [attached] = serve(b'{"x": NaN, "kv_transfer_params": {"do_remote_prefill": true}}', EngineRequest("a"))
    assert attached.kv == {"do_remote_prefill": True}


@pytest.mark.parametrize(
    "value",
    [b"1" * 30, b"[" * 5000 + b"]" * 5000, b'"' + b"x" * (PARAMS_BYTES_LIMIT + 1) + b'"'],
    ids=["65-bit", "deep", "large"],
)
def test_params_no_engine_could_be_sent_are_marked(value: bytes) -> None:
    """What vLLM could not encode must not reach its encoder."""
    [attached] = serve(b'{"kv_transfer_params": {"a": ' + value + b"}}", EngineRequest("a"))
    assert attached.kv is None
    assert attached.unreadable or value.startswith(b"[")  # so deep that not even the body is read


LONG_PROMPT = {**HANDOFF, "prompt_token_ids": [100_000] * 200_000}


def test_a_prompts_ids_in_the_params_are_no_part_of_what_is_bounded() -> None:
    """Routers put up to 200,000 prompt ids into the params: they are dropped, and the hand-off is recovered."""
    [attached] = serve(body(kv_transfer_params=LONG_PROMPT), EngineRequest("a"))
    assert (attached.kv, attached.source, attached.unreadable) == (HANDOFF, Source.BODY, False)


def test_a_prompts_ids_are_dropped_from_json_only_python_reads_too() -> None:
    """NaN elsewhere in the body changes nothing of that."""
    sent = body(kv_transfer_params=LONG_PROMPT, temperature=float("nan"))
    [attached] = serve(sent, EngineRequest("a"))
    assert (attached.kv, attached.unreadable) == (HANDOFF, False)


def test_params_beside_a_prompts_ids_are_bounded_as_ever() -> None:
    """What is left without the ids may not be larger than the bound, and params that are no object stay."""
    large = {"prompt_token_ids": [1], "x": "x" * PARAMS_BYTES_LIMIT}
    [attached] = serve(body(kv_transfer_params=large), EngineRequest("a"))
    assert (attached.kv, attached.unreadable) == (None, True)
    [attached] = serve(body(kv_transfer_params=["prompt_token_ids"]), EngineRequest("a"))
    assert attached.kv == ["prompt_token_ids"]


def test_unreadable_names_the_key() -> None:
    """The finding says which field."""
    assert str(Unreadable("kv_transfer_params")) == "kv_transfer_params"


@pytest.mark.parametrize(
    ("path", "root", "endpoint"),
    [
        ("/v1/completions", "", Endpoint.COMPLETIONS),
        ("/v1/chat/completions/", "", Endpoint.CHAT),
        ("/api/v1/responses", "/api", Endpoint.RESPONSES),
        ("/v1/messages", "", Endpoint.MESSAGES),
        ("/v2/chat", "", Endpoint.OTHER),
        ("/v1/completions\r\nx", "", Endpoint.OTHER),
        ("engine", "", Endpoint.OTHER),
        ("other", "", Endpoint.OTHER),
    ],
)
def test_endpoints_are_a_closed_set(path: str, root: str, endpoint: Endpoint) -> None:
    """Whatever path a client asks for, the label is one of ours."""
    assert endpoint_of({"path": path, "root_path": root}) is endpoint


def test_trace_context_is_carried_only_when_well_formed() -> None:
    """The caller's context travels in-band, also where vLLM drops it; junk does not."""
    good = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    [attached] = serve(body(), EngineRequest("a"), headers={"traceparent": good, "tracestate": "v=1"})
    assert (attached.traceparent, attached.tracestate) == (good, "v=1")
    [attached] = serve(body(), EngineRequest("a"), headers={"traceparent": "00-xyz", "tracestate": "é" * 600})
    assert (attached.traceparent, attached.tracestate) == ("", "")


def test_a_tracestate_in_parts_is_one() -> None:
    """A header may be sent several times (W3C Trace Context, 2.3)."""
    headers = [
        (b"traceparent", b"01-" + TRACE.encode() + b"-01-x"),
        (b"tracestate", b"a=1"),
        (b"tracestate", b"b=2"),
    ]
    request = HttpRequest({"type": "http", "path": "/", "headers": headers})
    assert request.trace() == (f"00-{TRACE}-01", "a=1,b=2")


def test_the_current_span_is_a_nearer_parent_than_the_callers_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where FastAPI is instrumented, or Ray has a span, that is what the caller's trace leads to."""
    inside = SpanContext(int("c" * 32, 16), int("d" * 16, 16), False, TraceFlags(1), TraceState([("k", "v")]))
    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(inside)))
    try:
        [attached] = serve(body(), EngineRequest("a"), headers={"traceparent": f"00-{TRACE}-01"})
        without_http = EngineRequest("b")
        attach(without_http)
    finally:
        context.detach(token)
    assert without_http.sampling_params is not None
    for found in (attached, read_attached(without_http.sampling_params.extra_args)):
        assert (found.traceparent, found.tracestate) == (f"00-{'c' * 32}-{'d' * 16}-01", "k=v")


def test_an_engine_request_without_http_is_told_apart() -> None:
    """Embedded use: no route, nothing recovered, and pooling requests are left alone."""
    request = EngineRequest("x" * 10**6)
    attach(request)
    assert request.sampling_params is not None
    attached = read_attached(request.sampling_params.extra_args)
    assert attached.endpoint is Endpoint.ENGINE
    assert len(attached.external_id) <= 128
    pooling = EngineRequest("a", None)
    attach(pooling)
    assert pooling.sampling_params is None


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        "x",
        {"endpoint": "/etc/passwd"},
        {"traceparent": "00-\r\n"},
        {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01\n"},
        {"mark": "tried\n"},
        {"external_id": "x" * 10_000},
        {"unknown": 1},
        {"sibling": -1},
        {"mark": "evil"},
    ],
)
def test_forged_metadata_counts_as_none(raw: object) -> None:
    """The connector reads `kv_shim` typed and bounded; anything else was not attached."""
    assert read_attached({"kv_shim": raw}) == NOTHING_ATTACHED


def test_metadata_survives_the_wire() -> None:
    """EngineCore gets msgpack-decoded dicts."""
    attached = Attached(endpoint=Endpoint.CHAT, kv=HANDOFF, source=Source.BODY, sibling=2, mark="tried")
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode({"kv_shim": attached}))
    assert isinstance(wire["kv_shim"], dict)
    assert read_attached(wire) == attached


def test_params_are_put_in_both_places() -> None:
    """LMCache reads `extra_args`, NIXL `request.kv_transfer_params`: both agree, and ours is gone."""

    @dataclass
    class Request:
        sampling_params: Sampling
        kv_transfer_params: Any = None
        ec_transfer_params: Any = None

    shared = {"kv_shim": {}, "keep": 1}
    request = Request(Sampling(shared))
    put_params(request, HANDOFF, {"e": 1})
    assert request.kv_transfer_params is HANDOFF
    assert request.sampling_params.extra_args == {
        "keep": 1,
        "kv_transfer_params": HANDOFF,
        "ec_transfer_params": {"e": 1},
    }
    assert request.sampling_params.extra_args["kv_transfer_params"] is HANDOFF
    assert shared == {"kv_shim": {}, "keep": 1}
    put_params(request, None)
    assert request.kv_transfer_params is None
    assert request.sampling_params.extra_args == {"keep": 1, "ec_transfer_params": {"e": 1}}


@pytest.mark.parametrize(
    ("chunks", "lacks"),
    [
        ([b'{"id":1,"kv_transfer_params":{"do_remote_prefill":true}}'], False),
        ([b'{"kv_transfer_', b'params" : { "do', b'_remote":1}}'], False),
        ([b'{"kv_transfer_params":null}'], True),
        ([b'{"kv_transfer_params":{}}'], True),
        ([b'{"id":1}', b""], True),
    ],
)
def test_a_reply_without_a_handoff_is_seen(chunks: list[bytes], lacks: bool) -> None:
    """null, `{}` and no field are told from a hand-off, also where the bytes come in pieces."""
    reply = Reply()
    reply.owes = True
    assert not reply.lacks_handoff({"type": "http.response.start", "status": 200})
    found = [
        reply.lacks_handoff({"type": "http.response.body", "body": c, "more_body": i < len(chunks) - 1})
        for i, c in enumerate(chunks)
    ]
    assert any(found) is lacks


def test_a_refused_reply_owes_no_handoff() -> None:
    """A 400 is vLLM's own answer and no missing hand-off."""
    reply = Reply()
    reply.owes = True
    reply.lacks_handoff({"type": "http.response.start", "status": 400})
    assert not reply.lacks_handoff({"type": "http.response.body", "body": b"{}"})


@pytest.mark.parametrize("silent", [False, True])
def test_only_a_connector_that_returns_params_owes_them(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's hand-offs come without, so its replies are not looked through."""
    monkeypatch.setattr(server, "silent", silent)
    http = HttpRequest({"type": "http", "path": "/v1/completions"})
    _note({"do_remote_decode": True}, http)
    assert http.reply.owes is not silent


def test_a_streams_reply_has_begun_before_its_engine_request() -> None:
    """Starlette sends the start first; what the reply owes is known only then."""
    reply = Reply()
    assert not reply.lacks_handoff({"type": "http.response.start", "status": 200})
    reply.owes = True
    assert not reply.lacks_handoff({"type": "http.response.body", "body": b"data: {}", "more_body": True})
    assert reply.lacks_handoff({"type": "http.response.body", "body": b"data: [DONE]"})


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make these the server's settings."""

    def use(**section: Any) -> None:
        monkeypatch.setattr(server, "settings", read_settings({"shim": section}))

    return use


def test_a_header_is_no_source_unless_opted_in(settings: Any) -> None:
    """Any client can send a header: only a named one, with an allow-list, and only where the body has none."""
    headers = {"x-kv-params": json.dumps(HANDOFF)}
    [attached] = serve(body(), EngineRequest("a"), headers=headers)
    assert (attached.kv, attached.source) == (None, Source.NONE)
    settings(params_header="X-KV-Params", allow_peers=["10.0.0.0/8"])
    [attached] = serve(body(), EngineRequest("a"), headers=headers)
    assert (attached.kv, attached.source) == (HANDOFF, Source.HEADER)
    [attached] = serve(body(kv_transfer_params={"b": 1}), EngineRequest("a"), headers=headers)
    assert (attached.kv, attached.source) == ({"b": 1}, Source.BODY)
    [attached] = serve(body(), EngineRequest("a"), headers={"x-kv-params": "{"})
    assert (attached.kv, attached.source, attached.unreadable) == (None, Source.NONE, True)


def test_a_prompts_ids_in_a_header_are_dropped_too(settings: Any) -> None:
    """A hand-off in a header is recovered as one in a body is."""
    settings(params_header="X-KV", allow_peers=["10.0.0.0/8"])
    [attached] = serve(body(), EngineRequest("a"), headers={"x-kv": json.dumps(LONG_PROMPT)})
    assert (attached.kv, attached.source) == (HANDOFF, Source.HEADER)


def test_router_marks_count_only_if_trusted(settings: Any) -> None:
    """llm-d #1461: a router's header without params says that it tried; another may say local on purpose."""
    headers = {"x-prefiller-host-port": "10.0.0.1:8000"}
    [attached] = serve(body(), EngineRequest("a"), headers=headers)
    assert attached.mark == ""
    settings(trusted_router_marks=["header:X-Prefiller-Host-Port", "kept_local=local"])
    [attached] = serve(body(), EngineRequest("a"), headers=headers)
    assert attached.mark == "tried"
    [attached] = serve(body(kept_local=True), EngineRequest("a"), headers=headers)
    assert attached.mark == "local"
    first, second = serve(body(), EngineRequest("a"), EngineRequest("b"), headers=headers)
    assert (first.mark, second.mark) == ("tried", "tried")


@pytest.mark.parametrize(
    "sent",
    [
        b'{"keep": 1, "prompt": "x", "y": NaN}',
        b'\xef\xbb\xbf{"keep": 1, "prompt": "x"}',
        b'{"keep": 1, "prompt": "x", "stop": "\\ud83d"}',
    ],
)
def test_a_mark_is_seen_in_whatever_json_vllm_takes(sent: bytes, settings: Any) -> None:
    """Python's json takes NaN, lone surrogates and a byte order mark."""
    settings(trusted_router_marks=["keep=local"])
    [attached] = serve(sent, EngineRequest("a"))
    assert attached.mark == "local"


def test_a_forged_kv_shim_goes_also_where_attaching_fails() -> None:
    """Clients can write it; only ours may reach the engine."""
    forged = EngineRequest("a", Sampling({"kv_shim": {"mark": "local"}, "keep": 1}))
    strip(forged)
    assert forged.sampling_params is not None
    assert forged.sampling_params.extra_args == {"keep": 1}
    alone = EngineRequest("a", Sampling({"kv_shim": {}}))
    strip(alone)
    assert alone.sampling_params is not None
    assert alone.sampling_params.extra_args is None


def test_a_beams_steps_are_follow_ups_and_no_list_of_prompts() -> None:
    """Also on completions, where several engine requests of one HTTP request usually are a list."""
    names = ["x-beam-0", "x-beam-1", "x-1"]
    requests = [EngineRequest(name, external_req_id=name) for name in names]
    found = serve(body(kv_transfer_params=HANDOFF), *requests, path="/v1/completions")
    assert [(one.sibling, one.siblings) for one in found] == [
        (0, HandoffReason.NONE),
        (1, HandoffReason.NONE),
        (2, HandoffReason.PROMPT_LIST),
    ]


def test_prompts_are_digested_where_a_stamp_is_made_or_checked() -> None:
    """Prefill's digest covers its whole prompt, decode's what the stamp covers; both agree, others get none."""
    tokens = list(range(50))
    asking = Sampling({"kv_transfer_params": {"do_remote_decode": True}})
    [prefill] = serve(body(), EngineRequest("p", asking, prompt_token_ids=tokens))
    assert prefill.prompt is not None
    assert prefill.prompt.k == 50
    made = stamp.encode(stamp.make(prefill.prompt, issued=1.0, lease=30.0))
    stamped = {**HANDOFF, stamp.KEY: made}
    [decode] = serve(body(kv_transfer_params=stamped), EngineRequest("d", prompt_token_ids=[*tokens, 7]))
    assert decode.prompt == prefill.prompt
    salted = EngineRequest("d", prompt_token_ids=tokens, cache_salt="s")
    [other] = serve(body(kv_transfer_params=stamped), salted)
    assert other.prompt is not None
    assert other.prompt.digest == prefill.prompt.digest
    assert other.prompt.names != prefill.prompt.names
    [plain] = serve(body(kv_transfer_params=HANDOFF), EngineRequest("d", prompt_token_ids=tokens))
    assert plain.prompt is None


def test_a_request_that_starts_inside_another_is_its_own() -> None:
    """A pipelined request inherits its predecessor's context, and must not be taken for it."""
    bodies = {"outer": body(kv_transfer_params={"a": 1}), "inner": body(kv_transfer_params={"b": 2})}
    seen: list[Any] = []

    async def request(name: str) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": bodies[name]}

        async def send(_message: Any) -> None:
            if name == "outer":
                await asyncio.create_task(request("inner"))

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "http.response.start", "status": 200})
            made = EngineRequest(name)
            attach(made)
            assert made.sampling_params is not None
            seen.append(read_attached(made.sampling_params.extra_args).kv)

        await RequestContext(RequestContext(app))({"type": "http", "path": "/x", "headers": []}, receive, send)

    asyncio.run(request("outer"))
    assert seen == [{"b": 2}, {"a": 1}]


def item(identifier: str, mm_hash: str | None = None) -> Any:
    """Stands in for vLLM's MultiModalFeatureSpec."""
    return SimpleNamespace(identifier=identifier, mm_hash=mm_hash, mm_position=SimpleNamespace(offset=3))


@pytest.mark.parametrize(
    ("feature", "fields", "known"),
    [
        (item("a" * 64), {}, True),
        (item("alice:" + "a" * 64, "a" * 64), {}, True),
        (item("cat.png"), {}, False),
        (item("renderer0-mm-7-image-0"), {}, False),
        (item("a" * 64), {"messages": [{"content": [{"uuid": "cat.png"}]}]}, False),
        (item("a" * 64), {"features": {"mm_hashes": {}}}, False),
    ],
)
def test_only_hashes_of_the_content_count_as_content(
    monkeypatch: pytest.MonkeyPatch, feature: Any, fields: dict[str, Any], *, known: bool
) -> None:
    """What a client or a counter names is a name: two servers may call one picture differently."""
    monkeypatch.setattr(server, "hashing", "0.32.0 blake3 model")
    asking = [Sampling({"kv_transfer_params": {"do_remote_decode": True}}) for _ in range(2)]
    requests = [
        EngineRequest(name, each, prompt_token_ids=list(range(9)), mm_features=[feature])
        for name, each in zip("pq", asking, strict=True)
    ]
    for attached in serve(body(**fields), *requests):
        assert attached.prompt is not None
        assert (bool(attached.prompt.content), bool(attached.prompt.names)) == (known, not known)


def test_a_picture_without_an_http_request_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows then who named it."""
    monkeypatch.setattr(server, "hashing", "0.32.0 blake3 model")
    request = EngineRequest(
        "p",
        Sampling({"kv_transfer_params": {"do_remote_decode": True}}),
        prompt_token_ids=list(range(9)),
        mm_features=[item("a" * 64)],
    )
    attach(request)
    assert request.sampling_params is not None
    prompt = read_attached(request.sampling_params.extra_args).prompt
    assert prompt is not None
    assert not prompt.content
