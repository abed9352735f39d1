"""The spans sink: what became of a request's KV, in the caller's own trace.

Each span has explicit times and, but for the hand-off's, whose context travels to decode, is made when what
it tells has ended, through the plain OpenTelemetry API; where it goes is `provider`'s to know.
Nothing here blocks or reads a clock. Imports no vLLM.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shim import trace_context
from shim.telemetry.provider import Tracers
from shim.telemetry.text import printable
from shim.verdict import HandoffEnd, HandoffResult, LoadResult, Observer, Outcome, PeerKey, Reason

if TYPE_CHECKING:
    from shim.verdict import Facts, Handoff, Load, Verdict

    Attributes = dict[str, str | int | float]


class SpanName(StrEnum):
    """The spans there are."""

    LOAD = "kv_transfer.load"
    LOCAL_PREFILL = "kv_transfer.local_prefill"
    HANDOFF = "kv_transfer.handoff"


REQUEST_ID: Final = "gen_ai.request.id"
MODEL: Final = "gen_ai.request.model"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
ERROR_TYPE: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
CONNECTOR: Final = "vllm.kv_transfer.connector"
ROLE: Final = "vllm.kv_transfer.role"
OUTCOME: Final = "vllm.kv_transfer.outcome"
REASON: Final = "vllm.kv_transfer.reason"
SOURCE: Final = "vllm.kv_transfer.source"
ENDPOINT: Final = "vllm.kv_transfer.endpoint"
TOKENS_EXPECTED: Final = "vllm.kv_transfer.tokens.expected"
TOKENS_LOADED: Final = "vllm.kv_transfer.tokens.loaded"
TOKENS_COMPUTED: Final = "vllm.kv_transfer.tokens.computed"
WAIT_SECONDS: Final = "vllm.kv_transfer.wait_seconds"
REMOTE_ENGINE_ID: Final = "vllm.kv_transfer.remote.engine_id"
REMOTE_REQUEST_ID: Final = "vllm.kv_transfer.remote.request_id"

ATTRIBUTES: Final = (
    REQUEST_ID,
    MODEL,
    INPUT_TOKENS,
    ERROR_TYPE,
    SERVER_ADDRESS,
    SERVER_PORT,
    CONNECTOR,
    ROLE,
    OUTCOME,
    REASON,
    SOURCE,
    ENDPOINT,
    TOKENS_EXPECTED,
    TOKENS_LOADED,
    TOKENS_COMPUTED,
    WAIT_SECONDS,
    REMOTE_ENGINE_ID,
    REMOTE_REQUEST_ID,
)
"""Every attribute that a span may have; one whose value is not known is left out."""

_NOBODY = PeerKey("", 0, "")
_LOST = frozenset({LoadResult.FAILED, LoadResult.PARTIAL})
_LOCAL = frozenset({Outcome.LOCAL_PREFILL, Outcome.PARTIAL})
_PROPAGATOR = TraceContextTextMapPropagator()


class SpanObserver(Observer):
    """An `Observer` that makes spans.

    `vllm.kv_transfer.outcome` is how the thing a span is about ended: a `LoadResult`, an `Outcome`, a
    `HandoffEnd`; `wait_seconds` how long decode waited for its KV, or prefill kept it for the reader.

    Args:
        connector: the inner connector's configured name.
        role: `kv_role`.
        model: the served model's name.
        tracer_provider: where spans go; without it, as `shim.telemetry.provider` finds it.
    """

    def __init__(
        self, connector: str, role: str, model: str, tracer_provider: trace.TracerProvider | None = None
    ) -> None:
        self._tracers = Tracers(tracer_provider)
        self._server: Attributes = {
            MODEL: printable(model),
            CONNECTOR: printable(connector),
            ROLE: printable(role),
        }
        self._issued: dict[str, trace.Span] = {}  # as many as there are hand-offs in flight

    def verdict(self, verdict: Verdict) -> None:
        """One request got its verdict."""
        if verdict.outcome in _LOCAL:
            self._tracers.send(self._local_prefill, verdict, verdict.completed_at)

    def load_ended(self, load: Load) -> None:
        """A wait for remote KV ended."""
        self._tracers.send(self._load, load, load.ended_at)

    def handoff_closed(self, handoff: Handoff) -> None:
        """An issued hand-off was read, expired or dropped."""
        self._tracers.send(self._handoff, handoff, handoff.ended_at or handoff.issued_at)

    def handoff(self, handoff: Handoff) -> None:
        """A prefill request finished; the span of a hand-off begins now, so that its context can travel."""
        if handoff.result is HandoffResult.ISSUED:
            self._tracers.send(self._issue, handoff, handoff.issued_at)

    def context_of(self, request_id: str) -> str:
        """The W3C traceparent of an issued hand-off's span, for the stamp; empty if nobody records."""
        span = self._issued.get(request_id)
        if span is None or not span.get_span_context().is_valid:
            return ""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
        return carrier.get("traceparent", "")

    def _local_prefill(self, tracer: trace.Tracer, verdict: Verdict) -> None:
        span = _start(tracer, SpanName.LOCAL_PREFILL, SpanKind.INTERNAL, verdict.facts, verdict.decided_at)
        if span.is_recording():
            span.set_attributes(
                self._of_request(verdict.facts, verdict.request_id, verdict.prompt_tokens)
                | {
                    OUTCOME: verdict.outcome.value,
                    REASON: verdict.reason.value,
                    TOKENS_EXPECTED: verdict.expected_tokens,
                    TOKENS_LOADED: verdict.loaded_tokens,
                    TOKENS_COMPUTED: verdict.computed_tokens,
                }
            )
        span.end(_nanoseconds(max(verdict.decided_at, verdict.completed_at)))

    def _load(self, tracer: trace.Tracer, load: Load) -> None:
        facts = load.facts
        linked = trace.get_current_span(parent_of(facts.linked_traceparent)).get_span_context()
        links = [Link(linked)] if linked.is_valid else None
        span = _start(tracer, SpanName.LOAD, SpanKind.CLIENT, facts, load.started_at, links)
        if span.is_recording():
            span.set_attributes(
                self._of_request(facts, load.request_id, load.prompt_tokens)
                | {
                    OUTCOME: load.result.value,
                    REASON: (Reason.LOAD_FAILED if load.result in _LOST else Reason.NONE).value,
                    TOKENS_EXPECTED: load.expected_tokens,
                    TOKENS_LOADED: load.loaded_tokens,
                    WAIT_SECONDS: max(0.0, load.ended_at - load.started_at),
                }
            )
            if load.result is LoadResult.FAILED:
                _fail(span, Reason.LOAD_FAILED)
        span.end(_nanoseconds(max(load.started_at, load.ended_at)))

    def _issue(self, tracer: trace.Tracer, handoff: Handoff) -> None:
        self._issued[handoff.request_id] = _start(
            tracer, SpanName.HANDOFF, SpanKind.INTERNAL, handoff.facts, handoff.issued_at
        )

    def _handoff(self, tracer: trace.Tracer, handoff: Handoff) -> None:
        ended_at = max(handoff.issued_at, handoff.ended_at or handoff.issued_at)
        expired = handoff.end is HandoffEnd.EXPIRED
        if handoff.request_id not in self._issued:  # issued before anybody recorded
            self._issue(tracer, handoff)
        span = self._issued.pop(handoff.request_id)
        if span.is_recording():
            span.set_attributes(
                self._of_request(handoff.facts, handoff.request_id, handoff.prompt_tokens)
                | {
                    OUTCOME: (handoff.end or HandoffEnd.UNKNOWN).value,
                    REASON: (Reason.HANDOFF_EXPIRED if expired else Reason.NONE).value,
                    WAIT_SECONDS: ended_at - handoff.issued_at,
                }
            )
            if expired:
                _fail(span, Reason.HANDOFF_EXPIRED)
        span.end(_nanoseconds(ended_at))

    def _of_request(self, facts: Facts, request_id: str, prompt_tokens: int) -> Attributes:
        """The attributes that every span has, and those of the peer as far as it is known."""
        attributes = self._server | {
            REQUEST_ID: printable(facts.external_id or request_id),
            SOURCE: facts.source.value,
            ENDPOINT: facts.endpoint.value,
        }
        peer = facts.peer or _NOBODY
        known: Attributes = {
            INPUT_TOKENS: prompt_tokens,
            SERVER_ADDRESS: printable(peer.host),
            SERVER_PORT: peer.port,
            REMOTE_ENGINE_ID: printable(peer.engine_id),
            REMOTE_REQUEST_ID: printable(facts.peer_request_id),
        }
        return attributes | {name: value for name, value in known.items() if value}


def parent_of(traceparent: str, tracestate: str = "") -> Context:
    """The W3C context in a request's facts; empty, so that the span is a root, if it is absent or malformed."""
    parent, state = trace_context.read({"traceparent": traceparent, "tracestate": tracestate})
    return _PROPAGATOR.extract({"traceparent": parent, "tracestate": state}, Context())


def _start(
    tracer: trace.Tracer,
    name: SpanName,
    kind: SpanKind,
    facts: Facts,
    started_at: float,
    links: list[Link] | None = None,
) -> trace.Span:
    return tracer.start_span(
        name.value,
        context=parent_of(facts.traceparent, facts.tracestate),
        kind=kind,
        links=links,
        start_time=_nanoseconds(started_at),
    )


def _fail(span: trace.Span, reason: Reason) -> None:
    span.set_attribute(ERROR_TYPE, reason.value)
    span.set_status(Status(StatusCode.ERROR))


def _nanoseconds(unix_seconds: float) -> int:
    return round(unix_seconds * 1e6) * 1000  # a float holds no finer time of these years
