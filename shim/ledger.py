"""Owns each request's account: events in, one verdict and every computed prompt token out.

Pure Python: `shim/connector/observe.py` turns connector calls into events; sinks are `Observer`s.

*When tokens are counted.* When the step that computes them is built, under a cause settled at the first chunk
after an allocation, where it is known how much of the prompt is covered. The one exception: what runs beside
a synchronous load is held until that step's output says whether the load failed. So a request's sums are
exact at its end, and before it only those chunks are late. Only a new load or a failed one changes the cause.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from msgspec import structs

from shim.account import LATER_INPUT, Account, Ending
from shim.verdict import (
    Facts,
    Handoff,
    HandoffEnd,
    HandoffReason,
    HandoffResult,
    Load,
    LoadResult,
    Observer,
    Outcome,
    Reason,
    TokenKind,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

__all__ = ["Ending", "Ledger"]


_OF_PEER = {"peer": None, "peer_request_id": "", "linked_traceparent": ""}
"""What the facts of a load from elsewhere leave out."""


class Ledger:
    """One account per live request; every method is O(1) and ignores ids it does not know.

    Args:
        observers: sinks, called in order. What they raise passes through to the caller, who contains it.
        backoff: prompt tokens the inner connector always leaves to be computed (1 for NIXL).
        granule: tokens in one unit of transfer, usually a block.
        clock: Unix seconds.
        load_timeout: seconds after which the entrypoint aborts a request that waits for remote KV
            (`Settings.load_timeout`); an abort in a wait about as long is then counted as `load_timeout`.
    """

    def __init__(
        self,
        observers: Sequence[Observer],
        *,
        backoff: int,
        granule: int,
        clock: Callable[[], float] = time.time,
        load_timeout: float | None = None,
    ) -> None:
        self._observers = tuple(observers)
        # Every decode computes at least its last token.
        self._limit = max(backoff, granule, 1)
        self.granule = granule
        self._clock = clock
        # The API server's clock starts a little earlier, and its abort takes a little to arrive.
        self._patience = None if load_timeout is None else 0.9 * load_timeout
        self._entries: dict[str, Account] = {}
        # Requests that have blocks, wait for no load, and whose prompt is not yet wholly scheduled.
        self.open: dict[str, None] = {}
        self.steps = 0
        self.done = 0
        # OrderedDict: unlike a dict it finds its first item in O(1) after many removals at the front.
        self._loads: OrderedDict[str, float] = OrderedDict()
        self._handoffs: OrderedDict[str, Handoff] = OrderedDict()
        self.unconfirmed: OrderedDict[str, int] = OrderedDict()  # synchronous loads by step
        self.completing: OrderedDict[str, int] = OrderedDict()  # last prompt chunks by step
        self._oldest = (0.0, 0.0)

    def __len__(self) -> int:
        """Requests and hand-offs alive."""
        return len(self._entries) + len(self._handoffs)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    @property
    def loading_ids(self) -> Collection[str]:
        """Requests whose load is in flight, oldest first."""
        return self._loads.keys()

    # -- one request's way in

    def admitted(self, request_id: str, prompt_tokens: int, facts: Facts) -> None:
        """The engine took a request up. A live id used again ends its former request as aborted."""
        if request_id in self._entries:
            self.finished(request_id, Ending.ABORTED)
        self._entries[request_id] = Account(prompt_tokens, facts, self._clock())

    def asked(self, request_id: str, external: int | None, local: int, asynchronous: bool) -> None:  # noqa: FBT001  # vLLM's tuple
        """The connector answered `get_num_new_matched_tokens`; may repeat without limit, None = ask again.

        Args:
            request_id: the engine's id.
            external: prompt tokens the connector offers beyond the local ones.
            local: prompt tokens of the local, block-aligned prefix hit.
            asynchronous: whether they would be loaded between steps.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return
        # vLLM asks only while nothing is computed (scheduler.py, `num_computed_tokens == 0`):
        if entry.load_at is not None:
            self._fail(request_id, entry, 0)
            self._close_load(request_id, entry)
        elif entry.position:
            self._lose(request_id, entry)
        entry.answer = external
        entry.local = local
        entry.asynchronous = asynchronous

    def allocated(self, request_id: str, external: int, *, from_peer: bool = True) -> None:
        """The scheduler gave blocks (`update_state_after_alloc`), and books `external` tokens as loaded.

        Comes twice for an asynchronous load, the second time with 0 once it has ended.

        Args:
            request_id: the engine's id.
            external: prompt tokens to be loaded.
            from_peer: whether they come from the peer that the request's params name.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.allocated_in = self.steps
        answer, entry.answer = entry.answer, None
        asynchronous, entry.asynchronous = entry.asynchronous, False
        if entry.load_at is not None:  # blocks are given again only after it
            self._close_load(request_id, entry)
        if external <= 0:
            self.open[request_id] = None
            if answer is not None:
                entry.position = entry.local
                entry.overridden = answer > 0
                entry.decide(self._clock())
            return
        now = self._clock()
        entry.expected = entry.loaded = external
        entry.position = entry.local + external
        entry.overridden = entry.failed = False
        entry.cause = None
        entry.asynchronous = asynchronous
        entry.from_peer = from_peer
        entry.load_at = now
        entry.decide(now)
        self._loads[request_id] = now
        if asynchronous:
            self.open.pop(request_id, None)
        else:
            self.open[request_id] = None
        for observer in self._observers:
            observer.load_started(now)
        if len(self._loads) == 1:
            self._front()

    # -- steps

    def scheduled(self, request_id: str, start: int, count: int, prompt_tokens: int) -> None:
        """The step being built computes `count` tokens from position `start`; wanted for open ids only."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        if entry.load_at is not None and entry.asynchronous:  # its end was not seen
            self._close_load(request_id, entry)
        if entry.first_at is None:
            entry.first_at = self._clock()
        entry.prompt = prompt_tokens
        entry.position = start + count
        if entry.load_at is not None:
            self.unconfirmed.setdefault(request_id, self.steps + 1)
        if entry.position >= prompt_tokens:
            self.open.pop(request_id, None)
            if entry.judged is None:
                self.completing.setdefault(request_id, self.steps + 1)
        if start < prompt_tokens:
            self._compute(entry, start, min(entry.position, prompt_tokens))

    def step_scheduled(self) -> None:
        """The step is built; its output may come after later steps are built, in the same order."""
        self.steps += 1

    def step_done(self) -> None:
        """The oldest outstanding step's output was processed, load failures of that step included."""
        if self.done < self.steps:
            self.done += 1
        while self.unconfirmed:
            request_id, step = next(iter(self.unconfirmed.items()))
            if step > self.done:
                break
            self._close_load(request_id, self._entries[request_id])
        while self.completing:
            request_id, step = next(iter(self.completing.items()))
            if step > self.done:
                break
            del self.completing[request_id]
            self._judge(request_id, self._entries[request_id])

    def preempted(self, request_ids: Iterable[str]) -> None:
        """The scheduler took these requests' blocks away since it built the step before this one."""
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            # Within one step blocks are taken away before they are given; then `asked` has noticed the loss.
            if entry is not None and entry.allocated_in != self.steps:
                self._lose(request_id, entry)

    # -- loads

    def loaded(self, request_id: str) -> None:
        """An asynchronous load ended, whole or after `load_failed`."""
        entry = self._entries.get(request_id)
        if entry is None or entry.load_at is None:
            return
        self._close_load(request_id, entry)
        if entry.judged is None and not entry.failed and entry.position >= entry.prompt:
            self.completing.pop(request_id, None)
            self._judge(request_id, entry)
        # vLLM has the last token of a whole prompt computed once more (_update_waiting_for_remote_kv).
        entry.position = min(entry.position, entry.prompt - 1)

    def load_failed(self, request_id: str, valid_tokens: int) -> bool:
        """Only the KV up to position `valid_tokens` is right; may repeat.

        The load that failed may be another request's, whose blocks this one shares.

        Returns:
            Whether the request was set back by it.
        """
        entry = self._entries.get(request_id)
        if entry is None or valid_tokens >= min(entry.position, entry.prompt):
            return False
        self._fail(request_id, entry, valid_tokens)
        return True

    # -- the end

    def finished(
        self,
        request_id: str,
        how: Ending,
        *,
        by_load: bool = False,
        handoff: HandoffReason | None = None,
        pinned: bool = True,
    ) -> None:
        """A request ended; its account is closed and forgotten.

        Args:
            request_id: the engine's id.
            how: how it ended.
            by_load: whether an error is that of a load.
            handoff: None = none was due; `NONE` = issued; else why it is missing.
            pinned: whether the connector keeps the blocks of an issued one until it is read or expires.
        """
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self.open.pop(request_id, None)
        self.completing.pop(request_id, None)
        now = self._clock()
        outcome: tuple[Outcome, Reason] | None = None
        if how is Ending.ERROR:
            # Nothing else ends a waiting request with an error (scheduler.py, `failed_kv_load_req_ids`).
            by_load = by_load or (entry.load_at is not None and entry.asynchronous)
            outcome = Outcome.FAILED, Reason.LOAD_FAILED if by_load else Reason.OTHER
            if by_load:
                self._fail(request_id, entry, 0)
        elif how is Ending.ABORTED:
            waited = entry.load_at is not None and self._patience is not None
            late = waited and now - entry.admitted_at >= (self._patience or 0)
            outcome = Outcome.ABORTED, Reason.LOAD_TIMEOUT if late else Reason.NONE
        if entry.load_at is not None:
            self._close_load(request_id, entry, aborted=how is Ending.ABORTED)
        self.open.pop(request_id, None)
        if entry.judged is None:
            self._judge(request_id, entry, outcome)
        if handoff is not None:
            self._handoff(request_id, entry, handoff, now, pinned=pinned)

    def handoff_closed(self, request_id: str, end: HandoffEnd) -> None:
        """An issued hand-off was read, expired or dropped; unknown ids and repeats are ignored."""
        record = self._handoffs.pop(request_id, None)
        if record is None:
            return
        closed = structs.replace(record, end=end, ended_at=self._clock())
        for observer in self._observers:
            observer.handoff_closed(closed)
        if record.issued_at == self._oldest[1]:
            self._front()

    # -- inside

    def _compute(self, entry: Account, start: int, end: int) -> None:
        entry.computed += end - start
        fresh = max(start, min(end, entry.lost))
        later = end if entry.judged is None else max(fresh, min(end, entry.judged))
        if fresh > start:
            self._tokens(TokenKind.RECOMPUTED, Reason.PREEMPTED, fresh - start)
        if later > fresh:
            cause = entry.settle(fresh, self._limit)
            if entry.load_at is not None:
                entry.held += later - fresh
            else:
                self._tokens(cause.kind, cause.token_reason, later - fresh)
        if end > later:
            self._tokens(LATER_INPUT.kind, LATER_INPUT.token_reason, end - later)

    def _lose(self, request_id: str, entry: Account) -> None:
        """All KV is gone. A load that ran beside the lost step had been booked and nothing says it failed."""
        self.open.pop(request_id, None)
        self.completing.pop(request_id, None)
        entry.lose()
        if entry.load_at is not None:
            self._close_load(request_id, entry)

    def _fail(self, request_id: str, entry: Account, valid: int) -> None:
        entry.fail(valid, self._clock())
        self.completing.pop(request_id, None)
        if not entry.asynchronous:
            self.open[request_id] = None

    def _close_load(self, request_id: str, entry: Account, *, aborted: bool = False) -> None:
        started_at, entry.load_at = entry.load_at, None
        self._loads.pop(request_id, None)
        self.unconfirmed.pop(request_id, None)
        entry.asynchronous = False
        if aborted:
            entry.loaded = 0
            result = LoadResult.ABORTED
        elif not entry.failed:
            result = LoadResult.LOADED
        else:
            result = LoadResult.PARTIAL if entry.loaded else LoadResult.FAILED
        load = Load(
            request_id,
            entry.facts if entry.from_peer else structs.replace(entry.facts, **_OF_PEER),
            result,
            expected_tokens=entry.expected,
            loaded_tokens=entry.loaded,
            started_at=self._clock() if started_at is None else started_at,
            ended_at=self._clock(),
            prompt_tokens=entry.prompt,
        )
        held, entry.held = entry.held, 0
        if held:
            cause = entry.settle(entry.position, self._limit)
            self._tokens(cause.kind, cause.token_reason, held)
        for observer in self._observers:
            observer.load_ended(load)
        if started_at == self._oldest[0]:
            self._front()

    def _judge(self, request_id: str, entry: Account, outcome: tuple[Outcome, Reason] | None = None) -> None:
        entry.judged = entry.prompt
        if outcome is None:
            cause = entry.settle(max(entry.position, entry.lost), self._limit)
            outcome = cause.outcome, cause.reason
        verdict = Verdict(
            request_id,
            *outcome,
            entry.facts,
            prompt_tokens=entry.prompt,
            expected_tokens=entry.expected,
            loaded_tokens=entry.loaded,
            computed_tokens=entry.computed,
            admitted_at=entry.admitted_at,
            decided_at=entry.decided_at,
            first_scheduled_at=entry.first_at,
            completed_at=self._clock(),
        )
        for observer in self._observers:
            observer.verdict(verdict)

    def _handoff(
        self, request_id: str, entry: Account, reason: HandoffReason, now: float, *, pinned: bool
    ) -> None:
        issued = reason is HandoffReason.NONE
        record = Handoff(
            request_id,
            entry.facts,
            HandoffResult.ISSUED if issued else HandoffResult.MISSING,
            reason,
            prompt_tokens=entry.prompt,
            issued_at=now,
        )
        if issued:
            if request_id in self._handoffs:  # of an earlier request of this id
                self.handoff_closed(request_id, HandoffEnd.UNKNOWN)
            self._handoffs[request_id] = record
        for observer in self._observers:
            observer.handoff(record)
        if issued and not pinned:
            self.handoff_closed(request_id, HandoffEnd.UNKNOWN)
        elif len(self._handoffs) == 1:
            self._front()

    def _tokens(self, kind: TokenKind, reason: Reason, count: int) -> None:
        for observer in self._observers:
            observer.tokens(kind, reason, count)

    def _front(self) -> None:
        load = next(iter(self._loads.values()), 0.0)
        handoff = next(iter(self._handoffs.values()), None)
        oldest = (load, 0.0 if handoff is None else handoff.issued_at)
        if oldest != self._oldest:
            self._oldest = oldest
            for observer in self._observers:
                observer.oldest(*oldest)
