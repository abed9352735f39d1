"""An observer for tests that keeps what it is told, checked against the catalogue."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shim.telemetry.catalog import HANDOFFS, HANDOFFS_CLOSED, LOAD_WAIT_SECONDS, PROMPT_TOKENS, REQUESTS

if TYPE_CHECKING:
    from shim.verdict import Handoff, Load, Reason, TokenKind, Verdict


class Recording:
    """Keeps every event, and refuses label values that the catalogue does not list."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.counted: Counter[tuple[TokenKind, Reason]] = Counter()
        self.starts: list[float] = []
        self.loads: list[Load] = []
        self.handoffs: list[Handoff] = []
        self.closed: list[Handoff] = []
        self.oldests: list[tuple[float, float]] = []

    def verdict(self, verdict: Verdict) -> None:
        if (verdict.outcome, verdict.reason) not in REQUESTS.series:
            msg = f"verdict {verdict.outcome}/{verdict.reason} is not in the catalogue"
            raise AssertionError(msg)
        self.verdicts.append(verdict)

    def tokens(self, kind: TokenKind, reason: Reason, count: int) -> None:
        if (kind, reason) not in PROMPT_TOKENS.series or count <= 0:
            msg = f"{count} tokens {kind}/{reason} are not in the catalogue"
            raise AssertionError(msg)
        self.counted[kind, reason] += count

    def load_started(self, started_at: float) -> None:
        self.starts.append(started_at)

    def load_ended(self, load: Load) -> None:
        assert (load.result,) in LOAD_WAIT_SECONDS.series
        assert 0 <= load.loaded_tokens <= load.expected_tokens
        self.loads.append(load)

    def handoff(self, handoff: Handoff) -> None:
        assert (handoff.result, handoff.reason) in HANDOFFS.series
        self.handoffs.append(handoff)

    def handoff_closed(self, handoff: Handoff) -> None:
        assert (handoff.end,) in HANDOFFS_CLOSED.series
        self.closed.append(handoff)

    def oldest(self, load_started_at: float, handoff_issued_at: float) -> None:
        pair = load_started_at, handoff_issued_at
        assert not self.oldests or self.oldests[-1] != pair, "sent without a change"
        self.oldests.append(pair)
