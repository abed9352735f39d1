"""Turns the connector's scheduler-side hooks into the ledger's events, for vLLM 0.28.0 to 0.32.0.

Reads plain attributes of vLLM's objects and imports nothing of vLLM. May raise on objects that are none of
vLLM's; the caller contains that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shim.ledger import Ending, Ledger
from shim.verdict import (
    ABSENT,
    REASON_CLASS,
    Ask,
    Facts,
    HandoffEnd,
    HandoffReason,
    Reason,
    ReasonClass,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shim.connector.children import Loader

# Names of vLLM's RequestStatus (v1/request.py); any other is an end before the prompt's.
_ENDINGS = {
    "FINISHED_STOPPED": Ending.STOPPED,
    "FINISHED_REPETITION": Ending.STOPPED,
    "FINISHED_LENGTH_CAPPED": Ending.LENGTH,
    "FINISHED_ERROR": Ending.ERROR,
}


class Observe:
    """The ledger's eyes; one object in the scheduler, called after the inner connector.

    Args:
        ledger: receives the events.
        handoff_ends: how an issued hand-off ended, by request id, where the connector's worker half knows;
            asked once, when the connector lets go of the blocks. Without it the end is `unknown`.
        silent_handoffs: whether the connector hands off by keeping the blocks alone and returns no params
            (Mooncake: the router makes them up).
        loader_of: the connector that makes a request's load, by request id.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        handoff_ends: Callable[[str], HandoffEnd] | None = None,
        silent_handoffs: bool = False,
        loader_of: Callable[[str], Loader | None] = lambda _: None,
    ) -> None:
        self.ledger = ledger
        self._loader_of = loader_of
        self._handoff_ends = handoff_ends
        self._silent = silent_handoffs
        self._requests: dict[str, tuple[Any, Facts]] = {}

    def admitted(self, request: Any, facts: Facts) -> None:
        """`on_new_request`: once per request; a streaming session's later inputs do not come here."""
        self.ledger.admitted(request.request_id, request.num_prompt_tokens, facts)
        self._requests[request.request_id] = request, facts  # last: who is not in here has no account yet

    def matched(self, request: Any, local_tokens: int, answer: tuple[int | None, bool]) -> None:
        """`get_num_new_matched_tokens`, with the answer that the scheduler gets."""
        self._known(request)
        external, asynchronous = answer
        self.ledger.asked(request.request_id, external, local_tokens, asynchronous)

    def allocated(self, request: Any, external_tokens: int) -> None:
        """`update_state_after_alloc`."""
        self._known(request)
        loader = self._loader_of(request.request_id) if external_tokens > 0 else None
        self.ledger.allocated(
            request.request_id, external_tokens, from_peer=loader is not None and loader.from_peer
        )

    def scheduled(self, scheduler_output: Any) -> None:
        """`build_connector_meta`, which comes before `num_computed_tokens` is advanced for the step.

        Without requests in prefill the cost is flat, however many decode.
        """
        ledger = self.ledger
        try:
            if scheduler_output.preempted_req_ids:
                ledger.preempted(scheduler_output.preempted_req_ids)
            counts = scheduler_output.num_scheduled_tokens
            for request_id in tuple(ledger.open):
                count = counts.get(request_id)
                if count:
                    request = self._requests[request_id][0]
                    ledger.scheduled(request_id, request.num_computed_tokens, count, request.num_prompt_tokens)
        finally:
            ledger.step_scheduled()  # whatever happened: its output will come

    def output(self, connector_output: Any) -> None:
        """`update_connector_output`, which comes after the scheduler has cut failed loads short."""
        ledger = self.ledger
        # Delete the default when 0.28 is dropped.
        for request_id in getattr(connector_output, "failed_recving", None) or ():
            if request_id in self._requests:
                self._set_back(request_id)
        if connector_output.invalid_block_ids:  # rare, and vLLM has just walked all running requests' blocks
            for request_id in self._requests:
                self._set_back(request_id)
        for request_id in connector_output.finished_recving or ():
            ledger.loaded(request_id)
        for request_id in connector_output.finished_sending or ():
            end = HandoffEnd.UNKNOWN if self._handoff_ends is None else self._handoff_ends(request_id)
            ledger.handoff_closed(request_id, end)

    def step_done(self) -> None:
        """`get_kv_connector_stats` of the scheduler's half: once per `update_from_output`, near its end."""
        self.ledger.step_done()

    def finished(self, request: Any, answer: tuple[bool, dict[str, Any] | None]) -> None:
        """`request_finished` or `request_finished_all_groups`, with the inner connector's answer."""
        self._known(request)
        request_id = request.request_id
        how = _ENDINGS.get(request.status.name, Ending.ABORTED)
        by_load = how is Ending.ERROR and self._set_back(request_id)
        _, facts = self._requests.pop(request_id)
        pinned, params = answer
        issued = bool(params) or (pinned and self._silent)
        handoff = None
        try:
            handoff = self._handoff(request, facts, how, issued=issued)
        finally:
            # Whatever happened: an account that stays open would cost every later step.
            self.ledger.finished(request_id, how, by_load=by_load, handoff=handoff, pinned=pinned)

    def _known(self, request: Any) -> None:
        """Admit a request whose admission was lost to a fault of the shim; every request gets a verdict."""
        if request.request_id not in self._requests:
            self.admitted(request, Facts(reason=Reason.SHIM_ERROR))

    def _set_back(self, request_id: str) -> bool:
        """Whether the scheduler set a request back behind KV that a failed load did not bring."""
        request = self._requests[request_id][0]
        # A preemption sets back as well, and is told when the next step is built.
        if request.status.name == "PREEMPTED":
            return False
        return self.ledger.load_failed(request_id, request.num_computed_tokens)

    def _handoff(self, request: Any, facts: Facts, how: Ending, *, issued: bool) -> HandoffReason | None:
        """Why a prefill request came without a hand-off; `NONE` = it came with one, None = none was due."""
        if facts.ask is not Ask.HANDOFF or REASON_CLASS[facts.reason] is ReasonClass.INTENDED:
            return None
        if how is Ending.ERROR:
            return HandoffReason.ERROR
        if how is Ending.ABORTED:  # vLLM then drops what the connector returned (scheduler.py, finish_requests)
            return HandoffReason.ABORTED
        if issued:
            return HandoffReason.NONE
        reasons = (
            (facts.reason in ABSENT, HandoffReason.PARAMS_MISSING),
            (facts.siblings is not HandoffReason.NONE, facts.siblings),
            (facts.reason is not Reason.NONE, HandoffReason.OTHER),
            (request.num_prompt_tokens < self.ledger.granule, HandoffReason.SHORT_PROMPT),
            (how is Ending.STOPPED, HandoffReason.FINISHED_STOP),
            (facts.streamed, HandoffReason.STREAMED),
        )
        return next((reason for holds, reason in reasons if holds), HandoffReason.CONNECTOR_RETURNS_NONE)
