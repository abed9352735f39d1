"""What happens when the engine admits a request: recover its params, screen them, settle the facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from shim import trace_context
from shim.config import ExpectRemote
from shim.connector.recover import Attached, copied, is_cleanup, put_params, read_attached
from shim.verdict import ABSENT, Ask, Facts, HandoffReason, Reason, Source

if TYPE_CHECKING:
    from shim.connector.guard import Guard, Screened
    from shim.stamp import Prompt
    from shim.telemetry.catalog import StampResult


_TRIED = "a router's mark says that it tried a prefill server"


class Admitted(Struct, frozen=True, gc=False):
    """What was decided about a request.

    Attributes:
        facts: for the ledger.
        local: the inner connector must be kept from loading for it.
        prompt: the digest that its hand-off's stamp is to carry, on prefill.
        stamp: what checking its hand-off's stamp gave, on decode.
        issued_at: when that hand-off was issued (Unix seconds; 0.0 = not known).
    """

    facts: Facts
    local: bool
    prompt: Prompt | None = None
    stamp: StampResult | None = None
    issued_at: float = 0.0


class Admission:
    """Decides once per request, before the inner connector sees it.

    Args:
        guard: the screening rules of the inner connector.
        expect: when missing params are a fault on this server.
        producer: `kv_role` is `kv_producer`: every request is a prefill, with or without params.
        normalize: have prefills of one token end by length, for connectors that issue nothing on `stop`.
    """

    def __init__(self, guard: Guard, expect: ExpectRemote, *, producer: bool, normalize: bool = False) -> None:
        self._guard = guard
        self._expect = expect
        self._producer = producer
        self._normalize = normalize and not guard.profile.issues_on_stop
        self._loads_unasked = guard.profile.loads_unasked is not None

    def admit(self, request: Any) -> Admitted:
        """Recover and screen `request`'s params, and write back what the inner connector may see.

        Args:
            request: vLLM's `Request`, in `on_new_request`, before anything else reads its params.
        """
        sampling = request.sampling_params
        extra_args = None if sampling is None else sampling.extra_args
        attached = _traced(read_attached(extra_args), request)
        params, source = request.kv_transfer_params, Source.EXTRA_ARGS
        if params is None:
            params, source = attached.kv, attached.source
        prompt = attached.prompt
        screened = self._guard.screen(
            request.request_id,
            params,
            prompt_tokens=request.num_prompt_tokens,
            external_id=attached.external_id,
            # Children of `n > 1` and of prompt lists are told by the claim table: it knows who reads.
            sibling=attached.sibling > 0 and attached.siblings is HandoffReason.NONE,
            prompt=prompt,
            cleanup=is_cleanup(request),
        )
        reason = self._reason(screened, attached, given=params is not None)
        put_params(request, screened.params, attached.ec)
        handoff = screened.ask is Ask.HANDOFF and screened.reason is Reason.NONE
        if self._normalize and handoff and request.max_tokens == 1:
            request.sampling_params = _ending_by_length(request.sampling_params)
        return Admitted(
            facts=self._facts(screened, attached, source, reason),
            local=screened.tell or (self._loads_unasked and screened.ask is not Ask.LOAD),
            prompt=prompt if screened.ask is Ask.HANDOFF else None,
            stamp=screened.stamp,
            issued_at=screened.issued_at,
        )

    def spent(self, request: Any) -> bool:
        """Whether the inner already queued the load that `request`'s params ask for."""
        return self._guard.spent(request.kv_transfer_params)

    def finishing(self, request: Any) -> None:
        """Take away, before the inner's finish hook, what it could not survive without an output token."""
        params = request.kv_transfer_params
        left = self._guard.for_finish(params, has_output=request.num_output_tokens > 0)
        if left is not params:
            put_params(request, left)

    def _reason(self, screened: Screened, attached: Attached, *, given: bool) -> Reason:
        if attached.timed_out:
            return Reason.LOAD_TIMEOUT
        if attached.sibling and screened.reason in ABSENT:
            if attached.siblings is not HandoffReason.NONE:
                return Reason.HANDOFF_REUSED  # as if all had come with the params that one of them took
            # Beam steps come without params, and there are many: one fault an HTTP request.
            return Reason.UNSUPPORTED_MODE if attached.sibling == 1 else Reason.NOT_DISAGGREGATED
        return fault_reason(
            screened.reason,
            ExpectRemote.ALWAYS if self._producer else self._expect,
            asked=given or attached.asked,
            mark=attached.mark,
            unreadable=attached.unreadable,
        )

    def _facts(self, screened: Screened, attached: Attached, source: Source, reason: Reason) -> Facts:
        return Facts(
            # A producer's requests are prefill work also when their params got lost; its ledger says which.
            ask=Ask.HANDOFF if self._producer and screened.ask is Ask.NOTHING else screened.ask,
            reason=reason,
            source=source,
            endpoint=attached.endpoint,
            external_id=attached.external_id,
            traceparent=attached.traceparent,
            tracestate=attached.tracestate,
            linked_traceparent=screened.linked_traceparent,
            peer=screened.peer,
            peer_request_id=screened.peer_request_id,
            streamed=attached.streamed,
            siblings=attached.siblings,
            detail=screened.detail or (_TRIED if attached.mark == "tried" else ""),
        )


def fault_reason(
    screened: Reason, expect: ExpectRemote, *, asked: bool, mark: str, unreadable: bool = False
) -> Reason:
    """What the reason that screening gave means on this server.

    Args:
        screened: the guard's reason.
        expect: when missing params are a fault.
        asked: there are params, or a body key for them, even null or empty.
        mark: what a trusted router mark says: `tried`, `local`, or nothing.
        unreadable: the body has params that no engine could be sent.
    """
    if unreadable:
        return Reason.PARAMS_INVALID
    if screened not in ABSENT:
        return screened
    if mark == "local":
        return Reason.ROUTER_BYPASS
    expected = expect is ExpectRemote.ALWAYS or (expect is ExpectRemote.AUTO and (asked or mark == "tried"))
    return screened if expected else Reason.NOT_DISAGGREGATED


def _traced(attached: Attached, request: Any) -> Attached:
    """The trace that the engine request itself names comes first (gRPC, Dynamo, Ray: no HTTP here)."""
    parent, state = trace_context.read(request.trace_headers)
    return structs.replace(attached, traceparent=parent, tracestate=state) if parent else attached


def _ending_by_length(sampling: Any) -> Any:
    """A copy that no EOS or stop token ends: a prefill's one token is thrown away (vLLM #46008).

    `check_stop` (v1/core/sched/utils.py) reads these two before it looks at the length.
    """
    clone = copied(sampling, sampling.extra_args)
    clone.stop_token_ids = []
    clone._eos_token_id = None  # noqa: SLF001  # vLLM's way to say ignore_eos
    return clone
