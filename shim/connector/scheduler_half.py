"""The shim's half of a connector in the scheduler: one object that the mixin's hooks call into.

Here stands the package's one broad `except`: the engine's busy loop has no guard per request, so a fault of
the shim would end every request on the server. Screening fails closed; everything else is left undone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

from shim.connector.recover import put_params
from shim.telemetry import catalog
from shim.telemetry.catalog import Hook, key
from shim.verdict import Facts, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from shim.connector.admission import Admission
    from shim.connector.observe import Observe
    from shim.telemetry.tally import Payload, Tally

T = TypeVar("T")
logger = logging.getLogger("vllm.kv_shim")


class SchedulerHalf:
    """Admission before the inner connector, observation after it; nothing here raises.

    Args:
        admission: decides on a request's params.
        observe: turns hook calls into the ledger's events.
        tally: the metrics sink, which also counts faults.
    """

    def __init__(self, admission: Admission, observe: Observe, tally: Tally) -> None:
        self._admission = admission
        self._observe = observe
        self.tally = tally
        self._seen: set[str] = set()
        self._local: set[str] = set()

    def admit(self, request: Any) -> None:
        """Settle what the inner connector may see of `request`; on any fault of ours, no params at all."""
        try:
            admitted = self._admission.admit(request)
            facts = admitted.facts
            if admitted.local:
                self._local.add(request.request_id)
        except Exception:  # noqa: BLE001  # fails closed: see the module's docstring
            self._fault(Hook.SCREEN)
            facts = Facts(reason=Reason.SHIM_ERROR)
            self._contain(Hook.SCREEN, _take_params_away, request)
        self._seen.add(request.request_id)
        self._contain(Hook.ADMIT, self._admitted, request, facts)

    def admit_unseen(self, request: Any) -> None:
        """Admit a request that a hook brings without `on_new_request` having been called for it."""
        if request.request_id not in self._seen:
            self.admit(request)

    def matched(
        self, request: Any, local_tokens: int, answer: tuple[int | None, bool]
    ) -> tuple[int | None, bool]:
        """The answer that the scheduler gets to `get_num_new_matched_tokens`."""
        if request.request_id in self._local:
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
        self._contain(Hook.OUTPUT, self._observe.output, connector_output)

    def finished(self, request: Any, answer: tuple[bool, dict[str, Any] | None]) -> None:
        """A request ended; keeps nothing of it. An inner whose one finish hook calls the other comes twice."""
        if request.request_id not in self._seen:
            return
        self._contain(Hook.FINISH, self._observe.finished, request, answer)
        self._seen.discard(request.request_id)
        self._local.discard(request.request_id)

    def take(self) -> Payload | None:
        """What the step that was just processed has to report."""
        self._contain(Hook.STATS, self._observe.step_done)
        return self.tally.take()

    def inner_failed(self) -> None:
        """The inner connector raised; its exception passes on, this only counts it."""
        self.tally.error(Hook.INNER)

    def _admitted(self, request: Any, facts: Facts) -> None:
        self.tally.add(key(catalog.PARAMS, facts.source, facts.endpoint))
        self._observe.admitted(request, facts)

    def _contain(self, hook: Hook, fn: Callable[..., T], *args: Any) -> T | None:
        try:
            return fn(*args)
        except Exception:  # noqa: BLE001  # see the module's docstring
            self._fault(hook)
            return None

    def _fault(self, hook: Hook) -> None:
        self.tally.error(hook)
        logger.error("kv_shim: a fault of the shim's in %s was contained; please report it", hook)


def _take_params_away(request: Any) -> None:
    request.kv_transfer_params = None
    put_params(request, None)
