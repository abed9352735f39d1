"""The hand-off from the API server to the engine: attaches what the entrypoint knows to an engine request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shim.connector.recover import EC_PARAMS, KV_PARAMS, KV_SHIM, Attached, copied
from shim.entrypoint.middleware import Unreadable, current_request
from shim.verdict import HandoffReason, Source

if TYPE_CHECKING:
    from shim.entrypoint.middleware import HttpRequest

ID_LIMIT = 128


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
    attached = _describe(engine_request, before, current_request())
    engine_request.sampling_params = copied(sampling, {**before, KV_SHIM: attached})


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
    if first:
        http.owner = engine_request.request_id
    else:
        http.siblings += 1
    kv, ec, asked, unreadable = _recover(http, extra_args) if first else (None, None, False, False)
    attached = Attached(
        endpoint=http.endpoint,
        source=Source.BODY if kv is not None else Source.NONE,
        kv=kv,
        ec=ec,
        asked=asked,
        unreadable=unreadable,
        sibling=http.siblings if not first else 0,
        siblings=_siblings(is_child=is_child, first=first),
        traceparent=http.traceparent(),
        tracestate=http.tracestate(),
        external_id=external_id[:ID_LIMIT],
        streamed=streamed,
    )
    if first:
        http.forget()
    return attached


def _siblings(*, is_child: bool, first: bool) -> HandoffReason:
    if is_child:
        return HandoffReason.N_GT_1
    return HandoffReason.NONE if first else HandoffReason.PROMPT_LIST


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
