"""The hand-off from the API server to the engine: attaches what the entrypoint knows to an engine request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shim.connector.recover import EC_PARAMS, KV_PARAMS, KV_SHIM, Attached, copied
from shim.entrypoint.counters import count
from shim.entrypoint.middleware import Reply, Unreadable, current_request
from shim.telemetry.catalog import EntrypointEvent
from shim.verdict import Endpoint, HandoffReason, Source

if TYPE_CHECKING:
    from shim.entrypoint.middleware import HttpRequest

ID_LIMIT = 128


@dataclass(slots=True)
class Server:
    """What the hand-off has to know of the server it runs in; settled at start-up."""

    has_connector: bool = True


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
    attached = _describe(engine_request, before, http)
    _note(engine_request, before.get(KV_PARAMS, attached.kv), http)
    engine_request.sampling_params = copied(sampling, {**before, KV_SHIM: attached})


def _note(engine_request: Any, params: Any, http: HttpRequest | None) -> None:
    """Count what only the API server can see of an engine request."""
    endpoint = Endpoint.OTHER if http is None else http.endpoint
    if getattr(engine_request, "abort_immediately", False):
        count(EntrypointEvent.REJECTED_BEFORE_ENGINE, endpoint)
    if params is not None and not server.has_connector:
        count(EntrypointEvent.NO_CONNECTOR, endpoint)
    if http is not None and isinstance(params, dict) and params.get("do_remote_decode") is True:
        http.reply = http.reply or Reply()


def _describe(engine_request: Any, extra_args: dict[str, Any], http: HttpRequest | None) -> Attached:
    external_id = str(getattr(engine_request, "external_req_id", None) or engine_request.request_id)
    is_child = not engine_request.request_id.startswith(external_id)  # parallel_sampling.py: "<index>_<id>"
    streamed = getattr(engine_request.sampling_params.output_kind, "name", "") != "FINAL_ONLY"
    if http is None:
        return Attached(
            external_id=external_id[:ID_LIMIT],
            streamed=streamed,
            siblings=HandoffReason.N_GT_1 if is_child else HandoffReason.NONE,
        )
    first = http.owner in {"", engine_request.request_id}  # a streaming session comes again with its id
    if not first:
        http.siblings += 1
        kv, ec, asked, unreadable = None, None, False, False
    else:
        kv, ec, asked, unreadable = _recover(http, extra_args)
        http.owner = engine_request.request_id
        http.handed = http.handed or bool(extra_args.get(KV_PARAMS) or kv)
        http.forget()
    return Attached(
        endpoint=http.endpoint,
        source=Source.BODY if kv is not None else Source.NONE,
        kv=kv,
        ec=ec,
        asked=asked,
        unreadable=unreadable,
        sibling=http.siblings if http.handed and not first else 0,
        siblings=_siblings(http, is_child=is_child, first=first),
        traceparent=http.traceparent(),
        tracestate=http.tracestate(),
        external_id=external_id[:ID_LIMIT],
        streamed=streamed,
    )


def _siblings(http: HttpRequest, *, is_child: bool, first: bool) -> HandoffReason:
    if is_child:
        return HandoffReason.N_GT_1
    # Elsewhere a further engine request is a follow-up (beam step, tool call), not another prompt.
    is_list = not first and http.endpoint is Endpoint.COMPLETIONS
    return HandoffReason.PROMPT_LIST if is_list else HandoffReason.NONE


def _recover(http: HttpRequest, extra_args: dict[str, Any]) -> tuple[Any, Any, bool, bool]:
    """Params of the body that the engine lacks: `kv`, `ec`, whether `kv` was asked for, and unreadable."""
    kv = ec = None
    asked = unreadable = False
    if extra_args.get(KV_PARAMS) is None and http.has_key(KV_PARAMS):
        asked = True
        try:
            kv = http.value(KV_PARAMS)
        except Unreadable:
            unreadable = True
    if extra_args.get(EC_PARAMS) is None:
        try:
            ec = http.value(EC_PARAMS)
        except Unreadable:
            ec = None  # the encoder cache is recomputed; nothing of ours screens it
    return kv, ec, asked, unreadable
