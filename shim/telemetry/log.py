"""The log sink: a WARNING for faults that says what to do, seldom, and a DEBUG line for each decision.

Strings that a client chose stand last in a line, in quotes and `printable`, so that none can pass for another
field. Imports no vLLM; vLLM configures only loggers under `vllm.`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from shim.telemetry.advice import ADVICE, RUNBOOK
from shim.telemetry.text import printable
from shim.verdict import REASON_CLASS, Observer, Reason, ReasonClass

if TYPE_CHECKING:
    from collections.abc import Callable

    from shim.verdict import Facts, Handoff, Verdict

LOGGER: Final = "vllm.kv_shim"
QUIET_SECONDS: Final = 30.0
"""After a WARNING, further ones of the same reason are only counted for this long."""


_FAULTS = frozenset({ReasonClass.OPERATOR, ReasonClass.CLIENT})
_WARNING = (
    "kv_shim: %s, reason %s: %s. What to do: %s (%s#%s). prompt_tokens=%d computed=%d loaded=%d connector=%s "
    'skipped=%d endpoint=%s detail="%s" peer="%s" request="%s"'
)


class LogObserver(Observer):
    """An `Observer` that writes log lines.

    Args:
        connector: the inner connector's configured name.
        clock: seconds; only differences count.
    """

    def __init__(self, connector: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._connector = printable(connector)
        self._clock = clock
        self._logger = logging.getLogger(LOGGER)
        self._warned_at: dict[Reason, float] = {}
        self._skipped: dict[Reason, int] = {}

    def verdict(self, verdict: Verdict) -> None:
        """One request got its verdict: a DEBUG line, and for a fault, if none was written lately, a WARNING."""
        reason = verdict.reason
        if REASON_CLASS[reason] in _FAULTS:
            self._warn(verdict)
        if self._logger.isEnabledFor(logging.DEBUG):
            facts = verdict.facts
            self._logger.debug(
                "kv_shim: verdict outcome=%s reason=%s source=%s endpoint=%s prompt_tokens=%d expected=%d "
                'loaded=%d computed=%d detail="%s" peer="%s" request="%s"',
                verdict.outcome.value,
                reason.value,
                facts.source.value,
                facts.endpoint.value,
                verdict.prompt_tokens,
                verdict.expected_tokens,
                verdict.loaded_tokens,
                verdict.computed_tokens,
                printable(facts.detail),
                _peer(facts),
                _request(facts, verdict.request_id),
            )

    def handoff(self, handoff: Handoff) -> None:
        """A prefill request finished: a DEBUG line."""
        if self._logger.isEnabledFor(logging.DEBUG):
            self._logger.debug(
                'kv_shim: hand-off result=%s reason=%s prompt_tokens=%d request="%s"',
                handoff.result.value,
                handoff.reason.value,
                handoff.prompt_tokens,
                _request(handoff.facts, handoff.request_id),
            )

    def _warn(self, verdict: Verdict) -> None:
        reason = verdict.reason
        now = self._clock()
        if 0 <= now - self._warned_at.get(reason, float("-inf")) < QUIET_SECONDS:
            self._skipped[reason] = self._skipped.get(reason, 0) + 1
            return
        self._warned_at[reason] = now
        advice = ADVICE[reason]
        self._logger.warning(
            _WARNING,
            verdict.outcome.value,
            reason.value,
            advice.found,
            advice.do,
            RUNBOOK,
            reason.value,
            verdict.prompt_tokens,
            verdict.computed_tokens,
            verdict.loaded_tokens,
            self._connector,
            self._skipped.pop(reason, 0),
            verdict.facts.endpoint.value,
            printable(verdict.facts.detail),
            _peer(verdict.facts),
            _request(verdict.facts, verdict.request_id),
        )


def _request(facts: Facts, request_id: str) -> str:
    return printable(facts.external_id or request_id)


def _peer(facts: Facts) -> str:
    return f"{printable(facts.peer.host)}:{facts.peer.port}" if facts.peer else ""
