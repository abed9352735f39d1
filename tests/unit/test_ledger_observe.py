"""What `Observe` reads of vLLM's objects, with plain stand-ins: cost, and reports that concern nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from recording import Recording

from shim.connector.observe import Observe
from shim.ledger import Ledger
from shim.verdict import Ask, Facts, Reason

MISSING = Facts(reason=Reason.PARAMS_MISSING)


class Untouchable(dict[str, int]):
    """A step's counts that nobody may look at."""

    def __getattribute__(self, name: str) -> Any:
        msg = f"looked at num_scheduled_tokens.{name}"
        raise AssertionError(msg)


def request(request_id: str = "a", status: str = "RUNNING", **fields: int) -> Any:
    """As much of a vLLM Request as is read."""
    numbers = {"num_prompt_tokens": 100, "num_computed_tokens": 0} | fields
    return SimpleNamespace(request_id=request_id, status=SimpleNamespace(name=status), **numbers)


def observed(seen: Recording) -> Observe:
    """An observer of an empty ledger."""
    return Observe(Ledger([seen], backoff=1, granule=16))


def prefilled(observe: Observe, one: Any) -> None:
    """Bring a request to where it decodes."""
    observe.admitted(one, MISSING)
    observe.matched(one, 0, (0, False))
    observe.allocated(one, 0)
    counts = {one.request_id: 100}
    observe.scheduled(SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens=counts))
    one.num_computed_tokens = 100
    observe.step_done()


def test_a_step_of_decodes_alone_costs_the_same_at_any_size() -> None:
    """Nothing of the batch is looked at while no request is in prefill, however many wait or decode."""
    seen = Recording()
    observe = observed(seen)
    for number in range(50):
        prefilled(observe, request(f"decoding-{number}"))
        observe.admitted(request(f"waiting-{number}"), MISSING)
        parked = request(f"parked-{number}")
        observe.admitted(parked, Facts(ask=Ask.LOAD))
        observe.matched(parked, 0, (100, True))
        observe.allocated(parked, 100)
    observe.scheduled(SimpleNamespace(preempted_req_ids=set(), num_scheduled_tokens=Untouchable()))
    observe.step_done()
    assert len(seen.verdicts) == 50


def test_the_start_of_a_chunk_is_read_before_vllm_advances_it() -> None:
    """`build_connector_meta` comes before `_update_after_schedule`; the prompt's length is read each time."""
    seen = Recording()
    observe = observed(seen)
    one = request(num_prompt_tokens=120)
    observe.admitted(one, MISSING)
    one.num_prompt_tokens = 100  # a prefill server's truncation (nixl/base_scheduler.py)
    observe.matched(one, 0, (0, False))
    observe.allocated(one, 0)
    for start in (0, 64):
        one.num_computed_tokens = start
        observe.scheduled(SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={"a": 64}))
        observe.step_done()
    assert sum(seen.counted.values()) == 100
    assert len(seen.verdicts) == 1


def test_reports_of_ids_that_are_gone_concern_nobody() -> None:
    """Workers report after requests ended; 0.28.0 has no `failed_recving`."""
    seen = Recording()
    observe = observed(seen)
    old = SimpleNamespace(invalid_block_ids={1}, finished_recving={"x"}, finished_sending={"y"})
    observe.output(old)
    new = SimpleNamespace(
        invalid_block_ids=set(), failed_recving={"x"}, finished_recving=None, finished_sending=None
    )
    observe.output(new)
    assert (seen.verdicts, seen.loads, seen.closed) == ([], [], [])


def test_a_preempted_request_is_not_taken_for_a_failed_load() -> None:
    """A reset sets requests back too, and another's load may fail before the next step tells of it."""
    seen = Recording()
    observe = observed(seen)
    one = request()
    prefilled(observe, one)
    one.num_computed_tokens, one.status.name = 0, "PREEMPTED"
    observe.output(SimpleNamespace(invalid_block_ids={9}, finished_recving=None, finished_sending=None))
    observe.matched(one, 0, (0, False))
    observe.allocated(one, 0)
    observe.scheduled(SimpleNamespace(preempted_req_ids={"a"}, num_scheduled_tokens={"a": 100}))
    assert dict(seen.counted) == {("fault", "params_missing"): 100, ("recomputed", "preempted"): 100}


def test_a_whole_load_that_was_promoted_is_not_taken_for_a_failed_one() -> None:
    """vLLM sets it back by the token it computes once more, while another's load may just have failed."""
    seen = Recording()
    observe = observed(seen)
    one = request(status="WAITING_FOR_REMOTE_KVS")
    observe.admitted(one, Facts(ask=Ask.LOAD))
    observe.matched(one, 0, (100, True))
    observe.allocated(one, 100)
    observe.output(SimpleNamespace(invalid_block_ids=set(), finished_recving={"a"}, finished_sending=None))
    one.num_computed_tokens, one.status.name = 99, "WAITING"
    observe.output(SimpleNamespace(invalid_block_ids={9}, finished_recving=None, finished_sending=None))
    observe.allocated(one, 0)
    observe.scheduled(SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={"a": 1}))
    assert dict(seen.counted) == {("tail", "tail"): 1}


def test_an_unknown_status_is_an_end_before_the_prompts() -> None:
    """A status that a later vLLM adds is counted as aborted rather than as served."""
    seen = Recording()
    observe = observed(seen)
    one = request(status="FINISHED_SOMEHOW")
    observe.admitted(one, MISSING)
    observe.finished(one, (False, None))
    assert [(v.outcome, v.reason) for v in seen.verdicts] == [("aborted", "none")]


def test_a_request_that_only_its_end_tells_of_gets_its_verdict() -> None:
    """Its admission was lost to a fault of the shim."""
    seen = Recording()
    observe = observed(seen)
    observe.finished(request(status="FINISHED_LENGTH_CAPPED"), (False, None))
    assert [(v.outcome, v.reason) for v in seen.verdicts] == [("local_prefill", "shim_error")]


def test_a_fault_in_the_hand_offs_reason_leaves_no_account_open() -> None:
    """It would cost every later step; the fault itself is the caller's to count."""
    seen = Recording()
    observe = observed(seen)
    one = request(status="FINISHED_LENGTH_CAPPED")
    observe.admitted(one, Facts(ask=Ask.HANDOFF))
    del one.num_prompt_tokens
    with pytest.raises(AttributeError):
        observe.finished(one, (False, None))
    assert len(observe.ledger) == 0
    assert len(seen.verdicts) == 1


def test_a_request_whose_admission_failed_is_admitted_by_its_next_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request gets a verdict."""
    seen = Recording()
    observe = observed(seen)
    admitted = observe.ledger.admitted
    monkeypatch.setattr(observe.ledger, "admitted", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        observe.admitted(request(), MISSING)
    monkeypatch.setattr(observe.ledger, "admitted", admitted)
    observe.matched(request(), 0, (0, False))
    observe.finished(request(status="FINISHED_ABORTED"), (False, None))
    assert [verdict.facts.reason for verdict in seen.verdicts] == [Reason.SHIM_ERROR]
