"""Where a request's transfer params are found: `extra_args`, else the metadata the entrypoint attached.

Clients can write `extra_args["kv_shim"]` too (through `vllm_xargs`, or past a front-end the shim does not
see), so the metadata is decoded typed, bounded, and as hostile as the params themselves.
"""

from __future__ import annotations

import copy
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shim.stamp import Prompt  # noqa: TC001  # msgspec looks it up
from shim.trace_context import Traceparent, Tracestate  # noqa: TC001  # msgspec looks them up
from shim.verdict import Endpoint, HandoffReason, Source

KV_SHIM = "kv_shim"
KV_PARAMS = "kv_transfer_params"
EC_PARAMS = "ec_transfer_params"

_Short = Annotated[str, Meta(max_length=512)]


class Attached(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the entrypoint knows of an engine request, carried in `extra_args["kv_shim"]`.

    Attributes:
        endpoint: the route that made the request.
        source: where `kv` came from: `body` or `header`; `none` if nothing was recovered.
        kv: recovered `kv_transfer_params`; any JSON value, since the body is the client's.
        ec: recovered `ec_transfer_params`.
        asked: the body has a `kv_transfer_params` key, even null or empty.
        unreadable: the body has params that no engine could be sent (too large, too deep, 65-bit ints).
        sibling: this one's number if another engine request of the same HTTP request has the params; else 0.
        siblings: `n_gt_1` or `prompt_list` for one of several engine requests that vLLM makes at once.
        mark: `tried` or `local`, by a trusted router mark; else empty.
        traceparent: W3C context of the API server's current span, else of the caller, also where vLLM drops it.
        tracestate: that context's.
        external_id: the request's id as seen outside.
        streamed: the reply is streamed.
        timed_out: the second try of a request whose load the entrypoint gave up on (`load_timeout`).
        prompt: what a stamp is made of, or checked against, where there is to be one (`shim.stamp`).
    """

    endpoint: Endpoint = Endpoint.ENGINE
    source: Source = Source.NONE
    kv: Any = None
    ec: Any = None
    asked: bool = False
    unreadable: bool = False
    sibling: Annotated[int, Meta(ge=0)] = 0
    siblings: HandoffReason = HandoffReason.NONE
    mark: Annotated[str, Meta(pattern=r"^(|tried|local)\Z")] = ""
    traceparent: Traceparent = ""
    tracestate: Tracestate = ""
    external_id: _Short = ""
    streamed: bool = False
    timed_out: bool = False
    prompt: Prompt | None = None


NOTHING_ATTACHED = Attached()


def read_attached(extra_args: object) -> Attached:
    """The metadata in a request's `extra_args`; what is missing or malformed counts as not attached."""
    raw = extra_args.get(KV_SHIM) if isinstance(extra_args, dict) else None
    if isinstance(raw, Attached):  # same process: offline use, or tests
        return raw
    if not isinstance(raw, dict):
        return NOTHING_ATTACHED
    try:
        return msgspec.convert(raw, Attached)
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError):
        return NOTHING_ATTACHED


def is_set(params: object, flag: str) -> bool:
    """Whether these params have a flag, as the guard takes it: true or 1."""
    return isinstance(params, dict) and type(value := params.get(flag)) in {bool, int} and value == 1


def is_cleanup(request: Any) -> bool:
    """Whether an engine request generates nothing: the API server's word to the connector that it rejected one.

    vLLM sends it through the engine with the rejected request's params, also after a 500 and for a client that
    left (entrypoints/generate/base/serving.py, `_with_kv_transfer_rejection_cleanup`), and aborts it at once.

    Args:
        request: vLLM's `EngineCoreRequest` or `Request`.
    """
    return bool(getattr(request, "abort_immediately", False))


def put_params(request: Any, kv: object, ec: object = None) -> None:
    """Give a vLLM `Request` these transfer params, and nothing of the shim's.

    Keeps `request.kv_transfer_params` and `sampling_params.extra_args` in step: LMCache and the hidden-states
    connector read the latter. `SamplingParams` and `extra_args` may be shared, so they are copied.
    """
    request.kv_transfer_params = kv
    if ec is not None:
        request.ec_transfer_params = ec
    sampling = request.sampling_params
    if sampling is None:
        return
    before = sampling.extra_args if isinstance(sampling.extra_args, dict) else {}
    if ec is None and KV_SHIM not in before and before.get(KV_PARAMS) is kv:
        return
    extra = {name: value for name, value in before.items() if name not in {KV_SHIM, KV_PARAMS}}
    if kv is not None:
        extra[KV_PARAMS] = kv
    if ec is not None:
        extra[EC_PARAMS] = ec
    request.sampling_params = copied(sampling, extra or None)


def copied(sampling: Any, extra_args: dict[str, Any] | None) -> Any:
    """A shallow copy of `SamplingParams` with other `extra_args`; the original may be shared by siblings."""
    clone = copy.copy(sampling)
    clone.extra_args = extra_args
    return clone
