"""The shim's half of a connector in the scheduler: one object that the mixin's hooks call into.

Here stands the package's one broad `except`: the engine's busy loop has no guard per request, so a fault of
the shim would end every request on the server. Screening fails closed; everything else is left undone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from shim.connector.admission import Admitted
from shim.connector.recover import is_cleanup, put_params
from shim.telemetry import catalog
from shim.telemetry.catalog import Hook, key
from shim.telemetry.faults import FAULTS, PASSED_ON
from shim.telemetry.tally import keys_of
from shim.verdict import Facts, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from shim.connector.admission import Admission
    from shim.connector.ends import NixlEnds
    from shim.connector.issue import Answer, Issuer
    from shim.connector.observe import Observe
    from shim.connector.retries import Retries
    from shim.telemetry.tally import Tally

T = TypeVar("T")
_PARAMS = keys_of(catalog.PARAMS)
_STAMPS = keys_of(catalog.STAMPS)
_AGE = key(catalog.HANDOFF_AGE_SECONDS)
AGE_LIMIT = 3600.0
"""Seconds; an older hand-off's age is a clock's fault, not an age."""


class SchedulerHalf:
    """Admission before the inner connector, observation after it; nothing here raises.

    vLLM's clean-ups of what its API server rejected are screened, since their params reach the inner's finish
    hook; they generate nothing, so nothing else is told of them.

    Args:
        admission: decides on a request's params.
        observe: turns hook calls into the ledger's events.
        issuer: stamps hand-offs.
        tally: the metrics sink, which also counts faults.
        ends: how hand-offs end, where the connector's workers tell; else None.
        retries: which failed loads nobody read.
    """

    def __init__(
        self,
        admission: Admission,
        observe: Observe,
        issuer: Issuer,
        tally: Tally,
        ends: NixlEnds | None,
        retries: Retries,
    ) -> None:
        self._admission = admission
        self._observe = observe
        self._issuer = issuer
        self._ends = ends
        self._retries = retries
        self.tally = tally
        self.ledger = observe.ledger
        self._live: dict[str, Admitted] = {}

    def admit(self, request: Any) -> None:
        """Settle what the inner connector may see of `request`; on any fault of ours, no params at all."""
        try:
            admitted = self._admission.admit(request)
        except Exception as error:  # noqa: BLE001  # fails closed: see the module's docstring
            self._fault(Hook.SCREEN, error)
            admitted = Admitted(Facts(reason=Reason.SHIM_ERROR), local=True)
            self._contain(Hook.SCREEN, _take_params_away, request)
        self._live[request.request_id] = admitted
        if not is_cleanup(request):
            self._contain(Hook.ADMIT, self._admitted, request, admitted)

    def admit_unseen(self, request: Any) -> None:
        """Admit a request that a hook brings without `on_new_request` having been called for it."""
        if request.request_id not in self._live:
            self.admit(request)

    def matched(
        self, request: Any, local_tokens: int, answer: tuple[int | None, bool]
    ) -> tuple[int | None, bool]:
        """The answer that the scheduler gets to `get_num_new_matched_tokens`."""
        admitted = self._live.get(request.request_id)
        spent = self._contain(Hook.MATCH, self._admission.spent, request)
        if admitted is None or admitted.local or spent:
            answer = (0, False)
        self._contain(Hook.MATCH, self._observe.matched, request, local_tokens, answer)
        return answer

    def allocated(self, request: Any, external_tokens: int) -> None:
        """Blocks were allocated."""
        self._contain(Hook.ALLOC, self._observe.allocated, request, external_tokens)

    def scheduled(self, scheduler_output: Any) -> None:
        """A step was scheduled."""
        self._contain(Hook.STEP, self._observe.scheduled, scheduler_output)

    def output(self, connector_output: Any) -> None:
        """The workers reported loads and sends."""
        if self._ends is not None:
            self._contain(Hook.OUTPUT, self._ends.see, connector_output)
        self._contain(Hook.OUTPUT, self._retries.see, connector_output)
        self._contain(Hook.OUTPUT, self._observe.output, connector_output)

    def finishing(self, request: Any) -> None:
        """Before the inner's finish hook: take away what it could not survive."""
        self.admit_unseen(request)
        self._contain(Hook.FINISH, self._admission.finishing, request)

    def finished(self, request: Any, answer: Answer) -> Answer:
        """A request ended; keeps nothing of it. Gives the inner's answer, with a stamp in its hand-off.

        An inner whose one finish hook calls the other comes here twice.
        """
        admitted = self._live.pop(request.request_id, None)
        if admitted is None or is_cleanup(request):
            return answer
        if self._ends is not None and answer[0] and answer[1]:
            self._contain(Hook.FINISH, self._ends.issued, request.request_id)
        self._contain(Hook.FINISH, self._observe.finished, request, answer)
        stamped = self._contain(Hook.FINISH, self._issuer.stamped, answer, request.request_id, admitted.prompt)
        return answer if stamped is None else stamped

    def step_done(self) -> None:
        """A step's output was processed."""
        self._contain(Hook.STATS, self._observe.step_done)

    def inner_failed(self, error: Exception) -> None:
        """The inner connector raised; its exception passes on, this only counts it and says where."""
        self.tally.error(Hook.INNER)
        FAULTS.say("a hook", error, PASSED_ON)

    def _admitted(self, request: Any, admitted: Admitted) -> None:
        facts, tally = admitted.facts, self.tally
        tally.add(_PARAMS.get((facts.source, facts.endpoint), ""))  # a forged pair counts as dropped
        if admitted.stamp is not None:
            tally.add(_STAMPS[admitted.stamp,])
        if admitted.issued_at and 0 <= (age := time.time() - admitted.issued_at) <= AGE_LIMIT:
            tally.sample(_AGE, age)
        self._observe.admitted(request, facts)

    def _contain(self, hook: Hook, fn: Callable[..., T], *args: Any) -> T | None:
        try:
            return fn(*args)
        except Exception as error:  # noqa: BLE001  # see the module's docstring
            self._fault(hook, error)
            return None

    def _fault(self, hook: Hook, error: Exception) -> None:
        self.tally.error(hook)
        FAULTS.say(hook, error)


def _take_params_away(request: Any) -> None:
    request.kv_transfer_params = None
    put_params(request, None)
