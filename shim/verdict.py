"""What the shim says about a request: outcomes, reasons, and the records that sinks receive.

Everything here is closed: each enum bounds a label, and `REASON_CLASS` says who has to act.
Pure Python; imports neither vLLM nor torch.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping


class Outcome(StrEnum):
    """How one engine request got its prompt's KV."""

    REMOTE = "remote"
    PARTIAL = "partial"
    LOCAL_PREFILL = "local_prefill"
    LOCAL_INTENDED = "local_intended"
    FAILED = "failed"
    ABORTED = "aborted"
    PREFILL = "prefill"


class ReasonClass(StrEnum):
    """Who has to act on a reason."""

    OPERATOR = "operator"
    CLIENT = "client"
    INTENDED = "intended"
    NEUTRAL = "neutral"


class Reason(StrEnum):
    """Why a request was not simply served from remote KV."""

    PARAMS_MISSING = "params_missing"
    PARAMS_EMPTY = "params_empty"
    PARAMS_NOT_REMOTE = "params_not_remote"
    PEER_UNAVAILABLE = "peer_unavailable"
    HANDOFF_EXPIRED = "handoff_expired"
    NO_MATCH = "no_match"
    PARTIAL_MATCH = "partial_match"
    LOAD_FAILED = "load_failed"
    LOAD_TIMEOUT = "load_timeout"
    SHIM_ERROR = "shim_error"
    OTHER = "other"

    PARAMS_INVALID = "params_invalid"
    PEER_DENIED = "peer_denied"
    HANDOFF_REUSED = "handoff_reused"
    HANDOFF_MISMATCH = "handoff_mismatch"
    UNSUPPORTED_MODE = "unsupported_mode"

    ROUTER_BYPASS = "router_bypass"
    BELOW_THRESHOLD = "below_threshold"
    LOCAL_CACHE = "local_cache"
    NOT_DISAGGREGATED = "not_disaggregated"

    NONE = "none"
    PREEMPTED = "preempted"
    TAIL = "tail"


_OPERATOR, _CLIENT, _INTENDED, _NEUTRAL = ReasonClass
REASON_CLASS: Mapping[Reason, ReasonClass] = MappingProxyType(
    {
        Reason.PARAMS_MISSING: _OPERATOR,
        Reason.PARAMS_EMPTY: _OPERATOR,
        Reason.PARAMS_NOT_REMOTE: _OPERATOR,
        Reason.PEER_UNAVAILABLE: _OPERATOR,
        Reason.HANDOFF_EXPIRED: _OPERATOR,
        Reason.NO_MATCH: _OPERATOR,
        Reason.PARTIAL_MATCH: _OPERATOR,
        Reason.LOAD_FAILED: _OPERATOR,
        Reason.LOAD_TIMEOUT: _OPERATOR,
        Reason.SHIM_ERROR: _OPERATOR,
        Reason.OTHER: _OPERATOR,
        Reason.PARAMS_INVALID: _CLIENT,
        Reason.PEER_DENIED: _CLIENT,
        Reason.HANDOFF_REUSED: _CLIENT,
        Reason.HANDOFF_MISMATCH: _CLIENT,
        Reason.UNSUPPORTED_MODE: _CLIENT,
        Reason.ROUTER_BYPASS: _INTENDED,
        Reason.BELOW_THRESHOLD: _INTENDED,
        Reason.LOCAL_CACHE: _INTENDED,
        Reason.NOT_DISAGGREGATED: _INTENDED,
        Reason.NONE: _NEUTRAL,
        Reason.PREEMPTED: _NEUTRAL,
        Reason.TAIL: _NEUTRAL,
    }
)

ABSENT = frozenset({Reason.PARAMS_MISSING, Reason.PARAMS_EMPTY, Reason.PARAMS_NOT_REMOTE})
"""Reasons that are a fault only where a hand-off was to be expected."""


def reasons_of(*classes: ReasonClass) -> tuple[Reason, ...]:
    """The reasons of these classes, in the order of the table."""
    return tuple(reason for reason, cls in REASON_CLASS.items() if cls in classes)


class TokenKind(StrEnum):
    """Why a prompt token was computed here; the kinds partition all of them."""

    FAULT = "fault"
    INTENDED = "intended"
    TAIL = "tail"
    RECOMPUTED = "recomputed"
    PREFILL = "prefill"


class Source(StrEnum):
    """Where the transfer params came from."""

    EXTRA_ARGS = "extra_args"
    BODY = "body"
    HEADER = "header"
    NONE = "none"


class Endpoint(StrEnum):
    """The route that made the engine request; `ENGINE` = none, `OTHER` = a route not listed."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    GENERATE = "/inference/v1/generate"
    ENGINE = "engine"
    OTHER = "other"


class LoadResult(StrEnum):
    """How a wait for remote KV ended."""

    LOADED = "loaded"
    PARTIAL = "partial"
    FAILED = "failed"
    ABORTED = "aborted"


class HandoffResult(StrEnum):
    """Whether a prefill server's finished request came with a hand-off."""

    ISSUED = "issued"
    MISSING = "missing"


class HandoffReason(StrEnum):
    """Why a prefill server issued no hand-off."""

    NONE = "none"
    PARAMS_MISSING = "params_missing"
    FINISHED_STOP = "finished_stop"
    STREAMED = "streamed"
    N_GT_1 = "n_gt_1"
    PROMPT_LIST = "prompt_list"
    SHORT_PROMPT = "short_prompt"
    ABORTED = "aborted"
    ERROR = "error"
    CONNECTOR_RETURNS_NONE = "connector_returns_none"
    OTHER = "other"


class HandoffEnd(StrEnum):
    """What became of an issued hand-off."""

    READ = "read"
    EXPIRED = "expired"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class Ask(StrEnum):
    """What a request's params ask this engine for, as read after screening."""

    NOTHING = "nothing"  # no params, or params that ask for no transfer
    LOAD = "load"  # decode: pull the prompt's KV (do_remote_prefill)
    HANDOFF = "handoff"  # prefill: keep the KV for a decode server (do_remote_decode)


class PeerKey(NamedTuple):
    """What a breaker stands for. A peer that restarts gets a new engine id, and so a new breaker."""

    host: str
    port: int
    engine_id: str


class Facts(Struct, frozen=True, gc=False):
    """What is known of a request when the engine admits it; settled before the first event.

    `reason` is the verdict's reason as far as admission can tell: why the request asks for no
    load (`params_missing`, `router_bypass`, …) or why its params were taken away
    (`params_invalid`, …); `NONE` for a request that asks for a load or a hand-off and may have it.
    """

    ask: Ask = Ask.NOTHING
    reason: Reason = Reason.NONE
    source: Source = Source.NONE
    endpoint: Endpoint = Endpoint.ENGINE
    external_id: str = ""  # the id as seen outside, for spans and log lines; hostile
    traceparent: str = ""  # the caller's W3C context, "" if none; syntax already checked
    tracestate: str = ""
    linked_traceparent: str = ""  # the prefill span's context, from the stamp
    peer: PeerKey | None = None  # screened; None if no peer is contacted
    peer_request_id: str = ""
    streamed: bool = False
    siblings: HandoffReason = HandoffReason.NONE  # N_GT_1 or PROMPT_LIST if one of several
    detail: str = ""  # what screening found, for the log; names only keys that the profile knows


class Verdict(Struct, frozen=True, gc=False):
    """One per engine request. Token counts are prompt tokens; times are Unix seconds."""

    request_id: str
    outcome: Outcome
    reason: Reason
    facts: Facts
    prompt_tokens: int
    expected_tokens: int  # asked of the peer
    loaded_tokens: int
    computed_tokens: int  # prompt tokens computed here up to the verdict
    admitted_at: float
    decided_at: float  # when it was settled that (part of) the prompt is computed here
    first_scheduled_at: float | None
    completed_at: float

    @property
    def is_local_fault(self) -> bool:
        """Whether the prompt was computed here, whole, though it should not have been."""
        return self.outcome is Outcome.LOCAL_PREFILL


class Load(Struct, frozen=True, gc=False):
    """One finished wait for remote KV; its facts name a peer only if that is where the KV came from."""

    request_id: str
    facts: Facts
    result: LoadResult
    expected_tokens: int
    loaded_tokens: int
    started_at: float
    ended_at: float
    prompt_tokens: int = 0


class Handoff(Struct, frozen=True, gc=False):
    """A prefill server's hand-off, at the end of the request and, if issued, once more at its own end."""

    request_id: str
    facts: Facts
    result: HandoffResult
    reason: HandoffReason
    prompt_tokens: int
    issued_at: float
    end: HandoffEnd | None = None
    ended_at: float | None = None


class Observer:
    """A sink of the ledger: metrics, spans or log lines; deaf to the events that it does not override."""

    def verdict(self, verdict: Verdict) -> None:
        """One request got its verdict."""

    def tokens(self, kind: TokenKind, reason: Reason, count: int) -> None:
        """`count` prompt tokens were computed here, for this reason."""

    def load_started(self, started_at: float) -> None:
        """A request began to wait for remote KV."""

    def load_ended(self, load: Load) -> None:
        """A wait for remote KV ended."""

    def handoff(self, handoff: Handoff) -> None:
        """A prefill request finished, with or without a hand-off."""

    def handoff_closed(self, handoff: Handoff) -> None:
        """An issued hand-off was read, expired or dropped."""

    def oldest(self, load_started_at: float, handoff_issued_at: float) -> None:
        """The start of the oldest load and hand-off in flight changed; 0.0 = none in flight."""
