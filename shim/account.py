"""Owns one live request's account: what is known of it, and the cause its computed prompt tokens have."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from shim.telemetry.catalog import PROMPT_TOKENS, REQUESTS
from shim.verdict import REASON_CLASS, Ask, Outcome, Reason, ReasonClass, TokenKind

if TYPE_CHECKING:
    from shim.verdict import Facts


class Ending(StrEnum):
    """How a request ended; the terminal part of vLLM's `RequestStatus` (v1/request.py), folded."""

    STOPPED = "stopped"
    LENGTH = "length"
    ABORTED = "aborted"  # by the client, by a stop string, or never taken up
    ERROR = "error"


class Cause(NamedTuple):
    """What a request's verdict will be, and what its computed prompt tokens count as."""

    outcome: Outcome
    reason: Reason
    kind: TokenKind
    token_reason: Reason


_REQUESTS = frozenset(REQUESTS.series)
_TOKENS = frozenset(PROMPT_TOKENS.series)


def cause_of(outcome: Outcome, reason: Reason) -> Cause:
    """The cause for an outcome; a pair that the catalogue does not know becomes `other`, a fault."""
    if (outcome, reason) not in _REQUESTS:
        known = (outcome, Reason.OTHER) in _REQUESTS
        outcome, reason = (outcome if known else Outcome.LOCAL_PREFILL), Reason.OTHER
    if outcome is Outcome.REMOTE:
        return Cause(outcome, reason, TokenKind.TAIL, Reason.TAIL)
    if outcome is Outcome.PREFILL:
        return Cause(outcome, reason, TokenKind.PREFILL, Reason.NONE)
    kind = TokenKind.INTENDED if outcome is Outcome.LOCAL_INTENDED else TokenKind.FAULT
    return Cause(outcome, reason, kind, reason if (kind, reason) in _TOKENS else Reason.OTHER)


LATER_INPUT = cause_of(Outcome.LOCAL_INTENDED, Reason.NOT_DISAGGREGATED)
"""A streaming session's later input was never prefilled elsewhere."""


class Account:
    """One live request. Positions and counts are prompt tokens, times Unix seconds."""

    __slots__ = (
        "admitted_at",
        "allocated_in",
        "answer",
        "asynchronous",
        "cause",
        "computed",
        "decided_at",
        "expected",
        "facts",
        "failed",
        "first_at",
        "from_peer",
        "held",
        "judged",
        "load_at",
        "loaded",
        "local",
        "lost",
        "overridden",
        "position",
        "prompt",
    )

    def __init__(self, prompt: int, facts: Facts, now: float) -> None:
        self.facts = facts
        self.prompt = prompt
        self.admitted_at = now
        self.decided_at = now
        self.first_at: float | None = None
        self.answer: int | None = None  # the connector's last answer, until an allocation uses it
        self.asynchronous = False
        self.local = 0  # the local prefix hit at the last answer
        self.expected = 0
        self.loaded = 0  # as booked by the scheduler until the load ends
        self.overridden = False  # the connector offered tokens and the scheduler took none
        self.failed = False  # the last load failed, wholly or in part
        self.from_peer = True  # the last load was made by the connector whose peer the params name
        self.load_at: float | None = None  # start of the load in flight
        self.position = 0  # how far KV is here or booked, counted from the prompt's start
        self.lost = 0  # how far it was here before a preemption
        self.allocated_in = -1  # the step in which blocks were last given
        self.held = 0  # computed beside a load whose end is not known
        self.computed = 0
        self.cause: Cause | None = None
        self.judged: int | None = None  # the prompt's length at the verdict

    def settle(self, start: int, limit: int) -> Cause:
        """The cause; settled now if it is not yet.

        Args:
            start: where the computed rest of the prompt begins.
            limit: how much every decode may compute and still count as remote.
        """
        if self.cause is None:
            short = self.prompt - start <= limit
            self.cause = self._served(short=short) or self._local(short=short, cached=start > 0)
        return self.cause

    def decide(self, now: float) -> None:
        """Note when it was settled what is computed here; without a wish for a load it was at admission."""
        if self.cause is None and self.facts.ask is Ask.LOAD and self.facts.reason is Reason.NONE:
            self.decided_at = now

    def fail(self, valid: int, now: float) -> None:
        """Only the KV up to position `valid` is right."""
        self.failed = True
        self.loaded = min(self.loaded, max(0, valid - self.local))
        self.position = min(self.position, valid)
        self.cause = None
        self.decide(now)

    def lose(self) -> None:
        """All KV is gone."""
        self.lost = max(self.lost, min(self.position, self.prompt))
        self.position = 0

    def _blameless(self) -> bool:
        """Whether admission found nothing wrong."""
        reason = self.facts.reason
        if reason is Reason.NONE:
            return self.facts.ask is not Ask.NOTHING  # else admission owes a reason
        return REASON_CLASS[reason] is ReasonClass.INTENDED

    def _served(self, *, short: bool) -> Cause | None:
        """The cause if a load or the kind of work decides it."""
        if self.facts.ask is Ask.HANDOFF:
            return cause_of(Outcome.PREFILL, Reason.NONE)
        if self.failed:
            if not self._blameless():
                return None
            return cause_of(Outcome.PARTIAL if self.loaded else Outcome.LOCAL_PREFILL, Reason.LOAD_FAILED)
        return cause_of(Outcome.REMOTE, Reason.NONE) if self.loaded and short else None

    def _local(self, *, short: bool, cached: bool) -> Cause:
        """The cause of work that no load spared: admission's reason, else what the match says."""
        given = self.facts.reason
        if given is not Reason.NONE or not self._blameless():
            intended = self._blameless()
            outcome = Outcome.LOCAL_INTENDED if intended else Outcome.LOCAL_PREFILL
            return cause_of(outcome, Reason.OTHER if given is Reason.NONE else given)
        if self.loaded:
            return cause_of(Outcome.PARTIAL, Reason.PARTIAL_MATCH)
        if short:
            reason = Reason.LOCAL_CACHE if cached else Reason.BELOW_THRESHOLD
            return cause_of(Outcome.LOCAL_INTENDED, reason)
        # Offered but not taken: prompt_logprobs have the prompt computed (vLLM 0.32 scheduler.py:983).
        return cause_of(Outcome.LOCAL_PREFILL, Reason.UNSUPPORTED_MODE if self.overridden else Reason.NO_MATCH)
