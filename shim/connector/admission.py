"""What happens when the engine admits a request: recover its params, screen them, settle the facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shim.config import ExpectRemote
from shim.connector.recover import Attached, put_params, read_attached
from shim.verdict import Ask, Facts, Reason, Source

if TYPE_CHECKING:
    from shim.connector.guard import Guard, Screened

ABSENT = frozenset({Reason.PARAMS_MISSING, Reason.PARAMS_EMPTY, Reason.PARAMS_NOT_REMOTE})
"""Reasons that are a fault only where a hand-off was to be expected."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request's facts, and whether the inner connector must be kept from loading for it."""

    facts: Facts
    local: bool
    detail: str = ""


class Admission:
    """Decides once per request, before the inner connector sees it.

    Args:
        guard: the screening rules of the inner connector.
        expect: when missing params are a fault on this server.
        producer: `kv_role` is `kv_producer`: every request is a prefill, with or without params.
    """

    def __init__(self, guard: Guard, expect: ExpectRemote, *, producer: bool) -> None:
        self._guard = guard
        self._expect = expect
        self._producer = producer

    def admit(self, request: Any) -> Admitted:
        """Recover and screen `request`'s params, and write back what the inner connector may see.

        Args:
            request: vLLM's `Request`, in `on_new_request`, before anything else reads its params.
        """
        sampling = request.sampling_params
        extra_args = None if sampling is None else sampling.extra_args
        attached = read_attached(extra_args)
        params, source = request.kv_transfer_params, Source.EXTRA_ARGS
        if params is None:
            params, source = attached.kv, attached.source
        screened = self._guard.screen(
            request.request_id,
            params,
            prompt_tokens=request.num_prompt_tokens,
            external_id=attached.external_id,
            sibling=attached.sibling > 0,
        )
        reason = self._reason(screened, attached, given=params is not None)
        put_params(request, screened.params, attached.ec)
        return Admitted(
            facts=self._facts(screened, attached, source, reason),
            local=screened.tell or self._guard.profile.loads_without_params and screened.ask is not Ask.LOAD,
            detail=screened.detail,
        )

    def _reason(self, screened: Screened, attached: Attached, *, given: bool) -> Reason:
        if attached.unreadable:
            return Reason.PARAMS_INVALID
        if screened.reason not in ABSENT:
            return screened.reason
        if attached.mark == "local":
            return Reason.ROUTER_BYPASS
        expected = self._expect is ExpectRemote.ALWAYS or (
            self._expect is ExpectRemote.AUTO and (given or attached.asked or attached.mark == "tried")
        )
        return screened.reason if expected or self._producer else Reason.NOT_DISAGGREGATED

    def _facts(self, screened: Screened, attached: Attached, source: Source, reason: Reason) -> Facts:
        params = screened.params or {}
        return Facts(
            # A producer's requests are prefill work also when their params got lost; its ledger says which.
            ask=Ask.HANDOFF if self._producer and screened.ask is Ask.NOTHING else screened.ask,
            reason=reason,
            source=source,
            endpoint=attached.endpoint,
            external_id=attached.external_id,
            traceparent=attached.traceparent,
            tracestate=attached.tracestate,
            peer_host=_text(params.get("remote_host")),
            peer_port=_port(params.get("remote_port")),
            peer_engine_id=_text(params.get("remote_engine_id")),
            peer_request_id=_text(params.get("remote_request_id")),
            streamed=attached.streamed,
            siblings=attached.siblings,
        )


def _text(value: object) -> str:
    return value[:128] if isinstance(value, str) else ""


def _port(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
