"""The hand-off from the API server to the engine: attaches what the entrypoint knows to an engine request."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from opentelemetry import trace

from shim import stamp, trace_context
from shim.config import Settings
from shim.connector.recover import (
    EC_PARAMS,
    KV_PARAMS,
    KV_SHIM,
    NOTHING_ATTACHED,
    Attached,
    copied,
    is_cleanup,
    is_set,
)
from shim.entrypoint.adapter import fingerprint
from shim.entrypoint.counters import count
from shim.entrypoint.middleware import Unreadable, current_request
from shim.telemetry.catalog import EntrypointEvent
from shim.verdict import Endpoint, HandoffReason, Source

if TYPE_CHECKING:
    from shim.entrypoint.middleware import HttpRequest

ID_LIMIT = 128
_BEAM = re.compile(r"-beam-\d+\Z")
"""How vLLM names the steps of a beam search (generate/beam_search/online.py)."""
_NAMED_BY_CLIENT = tuple(
    f'"{key}"'.encode() for key in ("uuid", "mm_hashes", "multi_modal_uuids", "image_embeds", "audio_embeds")
)
"""Body keys by which a client names multimodal items itself, or gives what an encoder made of them: their
identifiers are then no hashes of the content, though they may look so (multimodal/processing/inputs.py)."""


@dataclass(slots=True)
class Server:
    """What the hand-off has to know of the server it runs in; settled at start-up.

    Attributes:
        has_connector: there is one to hand params to.
        silent: its hand-offs come without params, so that no reply of prefill's owes any (Mooncake).
        hashing: what hashes of multimodal items depend on here besides their content.
        settings: the operator's.
    """

    has_connector: bool = True
    silent: bool = False
    hashing: str = ""
    settings: Settings = field(default_factory=Settings)


server = Server()


def attach(engine_request: Any) -> None:
    """Put `kv_shim` into an `EngineCoreRequest`'s `extra_args`, in place of whatever a client wrote there.

    Recovers params from the HTTP body only when the engine's own are missing, and only for the first engine
    request that an HTTP request makes; the others (`n > 1`, prompt lists, beam steps, tool follow-ups) are
    marked as its siblings. Children share `SamplingParams`, so those are copied.

    Args:
        engine_request: vLLM's `EngineCoreRequest`, on its way through `EngineCoreClient.add_request_async`.
    """
    sampling = engine_request.sampling_params
    if sampling is None:  # pooling: no extra_args, no transfer
        return
    before: dict[str, Any] = sampling.extra_args or {}
    if isinstance(before.get(KV_SHIM), Attached):
        return  # a client class that calls another's add_request_async
    http = current_request()
    if is_cleanup(engine_request):  # vLLM wrote its extra_args; nothing of it is told but that it came
        count(EntrypointEvent.REJECTED_BEFORE_ENGINE, Endpoint.OTHER if http is None else http.endpoint)
        engine_request.sampling_params = copied(sampling, {**before, KV_SHIM: NOTHING_ATTACHED})
        return
    hashed = engine_request.mm_features and http is not None and not http.names_items(_NAMED_BY_CLIENT)
    attached = _describe(engine_request, before, http)
    params = attached.kv if before.get(KV_PARAMS) is None else before[KV_PARAMS]
    _note(params, http)
    prompt = _digest(engine_request, params, hashing=server.hashing if hashed else "")
    if prompt is not None:
        attached = msgspec.structs.replace(attached, prompt=prompt)
    engine_request.sampling_params = copied(sampling, {**before, KV_SHIM: attached})


def strip(engine_request: Any) -> None:
    """Take away what a client wrote in `kv_shim`'s place, where `attach` did not come to it."""
    sampling = engine_request.sampling_params
    before = None if sampling is None else sampling.extra_args
    if isinstance(before, dict) and KV_SHIM in before and not isinstance(before[KV_SHIM], Attached):
        rest = {name: value for name, value in before.items() if name != KV_SHIM}
        engine_request.sampling_params = copied(sampling, rest or None)


def _digest(engine_request: Any, params: Any, *, hashing: str) -> stamp.Prompt | None:
    """The prompt's digest, for the stamp that prefill makes or decode checks; one pass, in this process.

    Args:
        engine_request: vLLM's `EngineCoreRequest`.
        params: its transfer params, recovered or its own.
        hashing: what the items' hashes depend on besides their content; empty if the client named the items.
    """
    if not isinstance(params, dict) or getattr(engine_request, "prompt_embeds", None) is not None:
        return None
    tokens = engine_request.prompt_token_ids
    if is_set(params, "do_remote_decode"):
        k = len(tokens or ())
    elif (covered := stamp.covered(params.get(stamp.KEY))) is not None:
        k = covered
    else:
        return None
    items = engine_request.mm_features or ()
    lora, salt = engine_request.lora_request, engine_request.cache_salt
    return stamp.digest(
        tokens,
        k,
        # `identifier` may begin with the adapter's name (v1/engine/input_processor.py).
        items=[(each.mm_position.offset, each.mm_hash or each.identifier) for each in items],
        hashing=hashing,
        adapter="" if lora is None else fingerprint(lora.lora_path),
        names=[f"{kind} {name}" for kind, name in (("lora", lora and lora.lora_name), ("salt", salt)) if name],
    )


def _note(params: Any, http: HttpRequest | None) -> None:
    """Count what only the API server can see of an engine request."""
    if params is not None and not server.has_connector:
        count(EntrypointEvent.NO_CONNECTOR, Endpoint.OTHER if http is None else http.endpoint)
    if http is not None and is_set(params, "do_remote_decode") and not server.silent:
        http.reply.owes = True


def _describe(engine_request: Any, extra_args: dict[str, Any], http: HttpRequest | None) -> Attached:
    external_id = str(getattr(engine_request, "external_req_id", None) or engine_request.request_id)
    is_child = not engine_request.request_id.startswith(external_id)  # parallel_sampling.py: "<index>_<id>"
    streamed = getattr(engine_request.sampling_params.output_kind, "name", "") != "FINAL_ONLY"
    parent, state = _trace(http)
    if http is None:
        return Attached(
            traceparent=parent,
            tracestate=state,
            external_id=external_id[:ID_LIMIT],
            streamed=streamed,
            siblings=HandoffReason.N_GT_1 if is_child else HandoffReason.NONE,
        )
    first = http.owner in {"", engine_request.request_id}  # a streaming session comes again with its id
    if first:
        found = recovered(http, extra_args)
        http.owner = engine_request.request_id
        http.handed = http.handed or bool(extra_args.get(KV_PARAMS) or found.kv)
        http.forget()
    else:
        found = Recovered()
        http.siblings += 1
    return Attached(
        endpoint=http.endpoint,
        source=found.source,
        kv=found.kv,
        ec=found.ec,
        asked=found.asked,
        unreadable=found.unreadable,
        mark=http.mark,
        timed_out=http.timed_out,
        sibling=http.siblings if http.handed and not first else 0,
        siblings=_siblings(http, external_id, is_child=is_child, first=first),
        traceparent=parent,
        tracestate=state,
        external_id=external_id[:ID_LIMIT],
        streamed=streamed,
    )


def _trace(http: HttpRequest | None) -> tuple[str, str]:
    """The current span's context (FastAPI instrumented, Ray), else the HTTP caller's."""
    here = trace_context.of_span(trace.get_current_span().get_span_context())
    return here if here[0] or http is None else http.trace()


def _siblings(http: HttpRequest, external_id: str, *, is_child: bool, first: bool) -> HandoffReason:
    if is_child:
        return HandoffReason.N_GT_1
    # Elsewhere a further engine request is a follow-up (tool call), not another prompt; beam steps always are.
    is_list = not first and http.endpoint is Endpoint.COMPLETIONS and not _BEAM.search(external_id)
    return HandoffReason.PROMPT_LIST if is_list else HandoffReason.NONE


@dataclass(slots=True)
class Recovered:
    """Params of the HTTP request that the engine lacks; see `Attached` for the fields."""

    kv: Any = None
    ec: Any = None
    source: Source = Source.NONE
    asked: bool = False
    unreadable: bool = False


def recovered(http: HttpRequest, extra_args: dict[str, Any]) -> Recovered:
    """What the HTTP request has that the engine request lacks; also settles what its marks say."""
    http.mark = http.mark or _mark(http)
    found = Recovered()
    if extra_args.get(KV_PARAMS) is None:
        found.asked = http.has_key(KV_PARAMS)
        try:
            found.kv, found.source = http.value(KV_PARAMS), Source.BODY
            header = server.settings.params_header
            if found.kv is None and header is not None:
                found.kv, found.source = http.header_value(header), Source.HEADER
        except Unreadable:
            found.unreadable = True
        if found.kv is None:
            found.source = Source.NONE
    if extra_args.get(EC_PARAMS) is None:
        try:
            found.ec = http.value(EC_PARAMS)
        except Unreadable:
            found.ec = None  # the encoder cache is recomputed; nothing of ours screens it
    return found


def _mark(http: HttpRequest) -> str:
    """What a trusted router mark says: `local` on purpose, `tried`, or nothing."""
    found = ""
    for spec in server.settings.trusted_router_marks:
        name, _, meaning = spec.partition("=")
        kind, colon, header = name.partition(":")
        there = http.header(header.lower()) is not None if colon and kind == "header" else http.has_key(name)
        if there and meaning == "local":
            return "local"
        found = "tried" if there else found
    return found
