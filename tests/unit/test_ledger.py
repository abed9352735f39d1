"""The ledger, one lifecycle at a time."""

from __future__ import annotations

import tracemalloc

import pytest
from recording import Recording

from shim.account import cause_of
from shim.ledger import Ending, Ledger
from shim.telemetry.catalog import PROMPT_TOKENS, REQUESTS
from shim.verdict import (
    Ask,
    Facts,
    HandoffEnd,
    HandoffReason,
    HandoffResult,
    LoadResult,
    Outcome,
    Reason,
    TokenKind,
)

LOAD = Facts(ask=Ask.LOAD)
HANDOFF = Facts(ask=Ask.HANDOFF)
MISSING = Facts(reason=Reason.PARAMS_MISSING)


class Bench:
    """A ledger with a clock that stands until told, and shorthands for one scheduler step."""

    def __init__(self, *, granule: int = 16, load_timeout: float | None = None) -> None:
        self.now = 1000.0
        self.seen = Recording()
        self.ledger = Ledger(
            [self.seen], backoff=1, granule=granule, clock=lambda: self.now, load_timeout=load_timeout
        )

    def admit(self, facts: Facts, prompt: int = 100, request_id: str = "a") -> None:
        self.ledger.admitted(request_id, prompt, facts)

    def match(
        self, answer: int | None, *, local: int = 0, asynchronous: bool = False, request_id: str = "a"
    ) -> None:
        self.ledger.asked(request_id, answer, local, asynchronous)

    def step(self, start: int, count: int, prompt: int = 100, request_id: str = "a") -> None:
        """Schedule one chunk and process its output."""
        self.build(start, count, prompt, request_id)
        self.ledger.step_done()

    def build(self, start: int, count: int, prompt: int = 100, request_id: str = "a") -> None:
        self.ledger.scheduled(request_id, start, count, prompt)
        self.ledger.step_scheduled()

    @property
    def verdicts(self) -> list[tuple[str, str]]:
        return [(v.outcome, v.reason) for v in self.seen.verdicts]

    @property
    def tokens(self) -> dict[tuple[str, str], int]:
        return dict(self.seen.counted)


@pytest.fixture
def bench() -> Bench:
    """A ledger with the usual granule."""
    return Bench()


def test_an_asynchronous_full_load_is_remote_with_a_tail_of_one(bench: Bench) -> None:
    """The verdict falls when the last prompt token is loaded; the one recomputed token is its tail."""
    bench.admit(LOAD)
    bench.match(100, asynchronous=True)
    bench.ledger.allocated("a", 100)
    assert "a" not in bench.ledger.open
    assert bench.verdicts == []
    bench.now += 2
    bench.ledger.loaded("a")
    assert bench.verdicts == [("remote", "none")]
    bench.ledger.allocated("a", 0)
    assert "a" in bench.ledger.open
    bench.step(99, 1)
    assert "a" not in bench.ledger.open
    bench.ledger.finished("a", Ending.ABORTED)
    assert bench.verdicts == [("remote", "none")]
    assert bench.tokens == {("tail", "tail"): 1}
    (load,) = bench.seen.loads
    assert (load.result, load.loaded_tokens, load.ended_at - load.started_at) == ("loaded", 100, 2.0)
    assert len(bench.ledger) == 0


def test_a_synchronous_load_is_remote_when_its_step_is_done(bench: Bench) -> None:
    """The chunk beside a synchronous load counts, and the verdict falls, once the step's output is there."""
    bench.admit(LOAD)
    bench.match(90)
    bench.ledger.allocated("a", 90)
    bench.build(90, 10)
    assert (bench.verdicts, bench.tokens, bench.seen.loads) == ([], {}, [])
    bench.ledger.step_done()
    assert bench.verdicts == [("remote", "none")]
    assert bench.tokens == {("tail", "tail"): 10}
    assert bench.seen.loads[0].result == LoadResult.LOADED


def test_a_load_that_is_reported_beside_its_last_chunk_is_judged_once(bench: Bench) -> None:
    """No vLLM reports a synchronous load; if one does, the step's end must not judge again."""
    bench.admit(LOAD, prompt=64)
    bench.match(48)
    bench.ledger.allocated("a", 48)
    bench.build(48, 16, prompt=64)
    bench.ledger.loaded("a")
    bench.ledger.step_done()
    assert bench.verdicts == [("remote", "none")]
    assert bench.tokens == {("tail", "tail"): 16}


def test_a_partial_match_is_a_fault_for_what_is_left(bench: Bench) -> None:
    """More than a granule left to compute makes the request partial, over all its chunks."""
    bench.admit(LOAD)
    bench.match(32, local=16, asynchronous=True)
    bench.ledger.allocated("a", 32)
    bench.ledger.loaded("a")
    assert bench.verdicts == []
    bench.ledger.allocated("a", 0)
    bench.step(48, 30)
    assert bench.tokens == {("fault", "partial_match"): 30}
    bench.step(78, 22)
    assert bench.verdicts == [("partial", "partial_match")]
    assert bench.tokens == {("fault", "partial_match"): 52}
    verdict = bench.seen.verdicts[0]
    assert (verdict.expected_tokens, verdict.loaded_tokens, verdict.computed_tokens) == (32, 32, 52)


@pytest.mark.parametrize(
    ("facts", "outcome", "kind"),
    [
        (MISSING, Outcome.LOCAL_PREFILL, TokenKind.FAULT),
        (Facts(reason=Reason.ROUTER_BYPASS), Outcome.LOCAL_INTENDED, TokenKind.INTENDED),
        (Facts(ask=Ask.LOAD, reason=Reason.HANDOFF_MISMATCH), Outcome.LOCAL_PREFILL, TokenKind.FAULT),
        (Facts(ask=Ask.LOAD, reason=Reason.LOAD_TIMEOUT), Outcome.LOCAL_PREFILL, TokenKind.FAULT),
    ],
)
def test_what_admission_knew_is_the_reason(
    bench: Bench, facts: Facts, outcome: Outcome, kind: TokenKind
) -> None:
    """A request that may load nothing keeps admission's reason through a chunked prefill."""
    bench.admit(facts)
    bench.match(0)
    bench.ledger.allocated("a", 0)
    bench.step(0, 64)
    bench.step(64, 36)
    assert bench.verdicts == [(outcome, facts.reason)]
    assert bench.tokens == {(kind, facts.reason): 100}


@pytest.mark.parametrize(
    ("local", "answer", "prompt", "verdict"),
    [
        (0, 0, 100, ("local_prefill", "no_match")),
        (96, 0, 100, ("local_intended", "local_cache")),
        (0, 0, 10, ("local_intended", "below_threshold")),
        (0, 100, 100, ("local_prefill", "unsupported_mode")),
        (96, 4, 100, ("local_intended", "local_cache")),
    ],
)
def test_a_wished_load_that_took_nothing_says_why(
    bench: Bench, local: int, answer: int, prompt: int, verdict: tuple[str, str]
) -> None:
    """No match, all cached, too short, or offered but overridden by the scheduler (prompt_logprobs)."""
    bench.admit(LOAD, prompt)
    bench.match(None)
    bench.match(answer, local=local, asynchronous=True)
    bench.ledger.allocated("a", 0)
    bench.step(local, prompt - local, prompt)
    assert bench.verdicts == [verdict]
    assert sum(bench.tokens.values()) == prompt - local


def test_a_match_may_be_asked_without_limit(bench: Bench) -> None:
    """Repeated and undecided answers leave no trace but the last."""
    bench.admit(LOAD)
    for _ in range(1000):
        bench.match(None, asynchronous=True)
        bench.match(50, asynchronous=True)
    bench.match(100, asynchronous=True)
    bench.ledger.allocated("a", 100)
    bench.ledger.loaded("a")
    assert bench.verdicts == [("remote", "none")]
    assert len(bench.seen.starts) == 1


def test_an_asynchronous_load_that_fails_whole_is_prefilled_under_recompute(bench: Bench) -> None:
    """vLLM booked the tokens as remote; they count as computed here, and the wait as failed."""
    bench.admit(LOAD)
    bench.match(100, asynchronous=True)
    bench.ledger.allocated("a", 100)
    bench.ledger.load_failed("a", 0)
    bench.ledger.load_failed("a", 0)
    assert bench.seen.loads == []
    bench.ledger.loaded("a")
    bench.match(0)
    bench.ledger.allocated("a", 0)
    bench.step(0, 100)
    assert bench.verdicts == [("local_prefill", "load_failed")]
    assert bench.tokens == {("fault", "load_failed"): 100}
    assert [load.result for load in bench.seen.loads] == ["failed"]


def test_a_failed_load_that_is_retried_with_success_is_remote(bench: Bench) -> None:
    """Only the last load decides."""
    bench.admit(LOAD)
    for failing in (True, False):
        bench.match(100, asynchronous=True)
        bench.ledger.allocated("a", 100)
        if failing:
            bench.ledger.load_failed("a", 0)
        bench.ledger.loaded("a")
    assert bench.verdicts == [("remote", "none")]
    assert [load.result for load in bench.seen.loads] == ["failed", "loaded"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_load_that_fails_in_part_is_partial_under_recompute(bench: Bench, asynchronous: bool) -> None:
    """The valid prefix counts as loaded; what ran beside the failing load is a fault as well."""
    bench.admit(LOAD)
    bench.match(90, asynchronous=asynchronous)
    bench.ledger.allocated("a", 90)
    beside = 0
    if asynchronous:
        bench.ledger.load_failed("a", 32)
        bench.ledger.loaded("a")
        bench.ledger.allocated("a", 0)
    else:
        beside = 10
        bench.build(90, 10)
        bench.ledger.load_failed("a", 32)
        bench.ledger.step_done()
    assert bench.verdicts == []
    assert "a" in bench.ledger.open
    bench.step(32, 68)
    assert bench.verdicts == [("partial", "load_failed")]
    assert bench.tokens == {("fault", "load_failed"): 68 + beside}
    assert [(load.result, load.loaded_tokens) for load in bench.seen.loads] == [("partial", 32)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_load_that_fails_ends_the_request_under_fail(bench: Bench, asynchronous: bool) -> None:
    """The request ends with an error in the step that reports the failure."""
    bench.admit(LOAD)
    bench.match(90, asynchronous=asynchronous)
    bench.ledger.allocated("a", 90)
    by_load = False
    if not asynchronous:
        bench.build(90, 10)
        by_load = bench.ledger.load_failed("a", 0)
        assert by_load
    bench.ledger.finished("a", Ending.ERROR, by_load=by_load)
    bench.ledger.loaded("a")
    bench.ledger.step_done()
    assert bench.verdicts == [("failed", "load_failed")]
    assert [load.result for load in bench.seen.loads] == ["failed"]
    assert bench.tokens == ({} if asynchronous else {("fault", "load_failed"): 10})
    assert len(bench.ledger) == 0


def test_a_request_that_shares_blocks_of_anothers_failed_load_is_set_back(bench: Bench) -> None:
    """It has no load of its own; what it computed on top counts, and so does computing it again."""
    bench.admit(LOAD)
    bench.match(0, local=96)
    bench.ledger.allocated("a", 0)
    bench.build(96, 4)
    assert bench.ledger.load_failed("a", 32)
    assert not bench.ledger.load_failed("a", 32)
    bench.ledger.step_done()
    assert bench.verdicts == []
    bench.step(32, 68)
    assert bench.verdicts == [("local_prefill", "load_failed")]
    assert bench.tokens == {("intended", "local_cache"): 4, ("fault", "load_failed"): 68}


def test_an_error_of_another_kind_is_not_blamed_on_the_load(bench: Bench) -> None:
    """A grammar that fails beside a good synchronous load is `other`."""
    bench.admit(LOAD)
    bench.match(90)
    bench.ledger.allocated("a", 90)
    bench.build(90, 10)
    bench.ledger.finished("a", Ending.ERROR)
    assert bench.verdicts == [("failed", "other")]
    assert bench.seen.loads[0].result == LoadResult.LOADED


def test_with_steps_in_flight_a_verdict_waits_for_its_own_steps_output(bench: Bench) -> None:
    """Async scheduling builds the next step before the output of the last; failures undo what is pending."""
    bench.admit(LOAD)
    bench.match(50)
    bench.ledger.allocated("a", 50)
    bench.build(50, 25)
    bench.build(75, 25)
    assert "a" not in bench.ledger.open
    bench.ledger.load_failed("a", 0)
    bench.ledger.step_done()
    bench.build(0, 100)
    bench.ledger.step_done()
    assert bench.verdicts == []
    bench.ledger.step_done()
    assert bench.verdicts == [("local_prefill", "load_failed")]
    assert bench.tokens == {("fault", "load_failed"): 150}


@pytest.mark.parametrize("when", ["unscheduled", "waiting", "computing", "decoding"])
def test_an_abort_counts_unless_the_prompt_was_complete(bench: Bench, when: str) -> None:
    """Before the last prompt token's output an abort is the outcome; after it nothing changes."""
    bench.admit(LOAD)
    if when != "unscheduled":
        bench.match(50, asynchronous=True)
        bench.ledger.allocated("a", 50)
    if when in {"computing", "decoding"}:
        bench.ledger.loaded("a")
        bench.ledger.allocated("a", 0)
        bench.build(50, 50)
    if when == "decoding":
        bench.ledger.step_done()
    bench.ledger.finished("a", Ending.ABORTED)
    bench.ledger.step_done()
    expected = ("partial", "partial_match") if when == "decoding" else ("aborted", "none")
    assert bench.verdicts == [expected]
    results = [load.result for load in bench.seen.loads]
    assert results == {"unscheduled": [], "waiting": ["aborted"]}.get(when, ["loaded"])
    assert sum(bench.tokens.values()) == (50 if when in {"computing", "decoding"} else 0)
    assert len(bench.ledger) == 0


def test_an_abort_in_a_wait_as_long_as_the_timeout_is_named() -> None:
    """The entrypoint's abort after `load_timeout` can't be told from a client's but by its time."""
    bench = Bench(load_timeout=10)
    for wait in (10, 1):
        bench.admit(LOAD)
        bench.match(100, asynchronous=True)
        bench.ledger.allocated("a", 100)
        bench.now += wait
        bench.ledger.finished("a", Ending.ABORTED)
    assert bench.verdicts == [("aborted", "load_timeout"), ("aborted", "none")]


def test_a_request_that_ends_in_its_only_step_is_judged_at_its_end(bench: Bench) -> None:
    """With one token asked for, `request_finished` comes before the step is done."""
    bench.admit(MISSING)
    bench.match(0)
    bench.ledger.allocated("a", 0)
    bench.build(0, 100)
    bench.ledger.finished("a", Ending.LENGTH)
    bench.ledger.step_done()
    assert bench.verdicts == [("local_prefill", "params_missing")]


@pytest.mark.parametrize("named", [True, False])
def test_work_after_a_preemption_is_recomputed_and_never_judged_again(bench: Bench, named: bool) -> None:
    """Tokens that were here before, loaded or computed, are `recomputed`; also if only the next ask tells."""
    bench.admit(LOAD)
    bench.match(100, asynchronous=True)
    bench.ledger.allocated("a", 100)
    bench.ledger.loaded("a")
    bench.ledger.allocated("a", 0)
    bench.step(99, 1)
    if named:
        bench.ledger.preempted(["a"])
    bench.match(0, local=16)
    bench.ledger.allocated("a", 0)
    assert "a" in bench.ledger.open
    bench.ledger.preempted(["a"])  # named in the step in which it got new blocks: it is the same loss
    bench.step(16, 84)
    assert "a" not in bench.ledger.open
    assert bench.verdicts == [("remote", "none")]
    assert bench.tokens == {("tail", "tail"): 1, ("recomputed", "preempted"): 84}


def test_a_preemption_before_the_end_splits_the_tokens(bench: Bench) -> None:
    """What had not been computed before the preemption keeps its own reason."""
    bench.admit(MISSING)
    bench.match(0)
    bench.ledger.allocated("a", 0)
    bench.step(0, 64)
    bench.ledger.preempted(["a"])
    bench.match(0)
    bench.ledger.allocated("a", 0)
    bench.step(0, 100)
    assert bench.verdicts == [("local_prefill", "params_missing")]
    assert bench.tokens == {("fault", "params_missing"): 100, ("recomputed", "preempted"): 64}


def test_a_preemption_beside_a_synchronous_load_keeps_it_as_loaded(bench: Bench) -> None:
    """With a step in flight the load had been booked; the peer did its part."""
    bench.admit(LOAD)
    bench.match(90)
    bench.ledger.allocated("a", 90)
    bench.build(90, 10)
    bench.ledger.step_scheduled()
    bench.ledger.preempted(["a"])
    bench.ledger.step_done()
    bench.ledger.step_done()
    assert bench.verdicts == []
    bench.match(0)
    bench.ledger.allocated("a", 0)
    bench.step(0, 100)
    assert bench.verdicts == [("remote", "none")]
    assert bench.tokens == {("tail", "tail"): 10, ("recomputed", "preempted"): 100}


def test_a_preemption_before_anything_was_given_is_nothing(bench: Bench) -> None:
    """A request that has no blocks can lose none."""
    bench.admit(MISSING)
    bench.ledger.preempted(["a", "unknown"])
    bench.match(0)
    bench.ledger.allocated("a", 0)
    bench.step(0, 100)
    assert bench.tokens == {("fault", "params_missing"): 100}


def test_a_streaming_sessions_later_input_is_intended_and_judged_once(bench: Bench) -> None:
    """The same id grows a longer prompt without a new admission."""
    bench.admit(LOAD)
    bench.match(100, asynchronous=True)
    bench.ledger.allocated("a", 100)
    bench.ledger.loaded("a")
    bench.ledger.allocated("a", 0)
    bench.step(99, 1)
    bench.ledger.allocated("a", 0)
    bench.step(104, 46, prompt=150)
    assert "a" not in bench.ledger.open
    bench.ledger.finished("a", Ending.STOPPED)
    assert bench.verdicts == [("remote", "none")]
    assert bench.tokens == {("tail", "tail"): 1, ("intended", "not_disaggregated"): 46}


def test_draft_tokens_and_decodes_are_no_prompt_tokens(bench: Bench) -> None:
    """A chunk past the prompt's end counts up to it."""
    bench.admit(MISSING)
    bench.match(0)
    bench.ledger.allocated("a", 0)
    bench.step(0, 104)
    bench.step(100, 1)
    assert bench.tokens == {("fault", "params_missing"): 100}


def test_a_producers_work_is_prefill(bench: Bench) -> None:
    """Whatever the producer's request lacked, its tokens are its own work."""
    bench.admit(Facts(ask=Ask.HANDOFF, reason=Reason.PARAMS_MISSING))
    bench.match(0)
    bench.ledger.allocated("a", 0)
    bench.build(0, 100)
    bench.ledger.finished("a", Ending.LENGTH, handoff=HandoffReason.PARAMS_MISSING)
    assert bench.verdicts == [("prefill", "none")]
    assert bench.tokens == {("prefill", "none"): 100}
    assert [(h.result, h.reason) for h in bench.seen.handoffs] == [("missing", "params_missing")]


def test_a_cache_connectors_load_without_params_is_remote_or_rightly_local(bench: Bench) -> None:
    """Connectors that need no params load on their own; a partial hit there is no fault, a failed load is."""
    plain = Facts(reason=Reason.NOT_DISAGGREGATED)
    for external, valid in ((90, 90), (50, 50), (50, 0)):
        bench.admit(plain)
        bench.match(external)
        bench.ledger.allocated("a", external)
        bench.build(external, 100 - external)
        if valid < external:
            bench.ledger.load_failed("a", valid)
            bench.ledger.step_done()
            bench.build(valid, 100 - valid)
        bench.ledger.step_done()
        bench.ledger.finished("a", Ending.STOPPED)
    assert bench.verdicts == [
        ("remote", "none"),
        ("local_intended", "not_disaggregated"),
        ("local_prefill", "load_failed"),
    ]


def test_a_handoff_is_open_until_it_is_closed(bench: Bench) -> None:
    """Issued once, closed once; the record keeps what was known."""
    bench.admit(HANDOFF)
    bench.ledger.finished("a", Ending.LENGTH, handoff=HandoffReason.NONE)
    assert len(bench.ledger) == 1
    bench.now += 5
    for _ in range(2):
        bench.ledger.handoff_closed("a", HandoffEnd.READ)
    (closed,) = bench.seen.closed
    assert (closed.result, closed.end, closed.ended_at) == (HandoffResult.ISSUED, HandoffEnd.READ, 1005.0)
    assert len(bench.ledger) == 0


def test_a_handoff_that_pins_nothing_and_a_reused_id_close_as_unknown(bench: Bench) -> None:
    """Nothing would ever close them."""
    bench.admit(HANDOFF)
    bench.ledger.finished("a", Ending.LENGTH, handoff=HandoffReason.NONE, pinned=False)
    for _ in range(2):
        bench.admit(HANDOFF)
        bench.ledger.finished("a", Ending.LENGTH, handoff=HandoffReason.NONE)
    assert [h.end for h in bench.seen.closed] == ["unknown", "unknown"]
    assert len(bench.seen.handoffs) == 3
    assert len(bench.ledger) == 1


def test_the_oldest_starts_are_told_on_change_only(bench: Bench) -> None:
    """Only the front of each queue matters, and 0 means that nothing is in flight."""
    for at, request_id in enumerate("abc"):
        bench.now = 10.0 + at
        bench.admit(LOAD, request_id=request_id)
        bench.match(100, asynchronous=True, request_id=request_id)
        bench.ledger.allocated(request_id, 100)
    bench.ledger.loaded("b")
    bench.ledger.loaded("a")
    bench.admit(HANDOFF, request_id="p")
    bench.ledger.finished("p", Ending.LENGTH, handoff=HandoffReason.NONE)
    bench.ledger.loaded("c")
    bench.ledger.handoff_closed("p", HandoffEnd.EXPIRED)
    assert bench.seen.oldests == [(10.0, 0.0), (12.0, 0.0), (12.0, 12.0), (0.0, 12.0), (0.0, 0.0)]


def test_an_id_used_again_while_alive_ends_the_first_request(bench: Bench) -> None:
    """Both get a verdict."""
    bench.admit(LOAD)
    bench.admit(MISSING)
    bench.ledger.finished("a", Ending.STOPPED)
    assert bench.verdicts == [("aborted", "none"), ("local_prefill", "params_missing")]


def test_unknown_ids_are_ignored(bench: Bench) -> None:
    """Every event may come for a request that was never admitted or is gone."""
    ledger = bench.ledger
    ledger.asked("x", 5, 0, asynchronous=True)
    ledger.allocated("x", 5)
    ledger.scheduled("x", 0, 5, 5)
    ledger.preempted(["x"])
    ledger.loaded("x")
    ledger.load_failed("x", 0)
    ledger.finished("x", Ending.ERROR, handoff=HandoffReason.NONE)
    ledger.handoff_closed("x", HandoffEnd.READ)
    ledger.step_done()
    assert len(ledger) == 0
    assert bench.verdicts == []


def test_every_pair_of_outcome_and_reason_becomes_one_of_the_catalogue() -> None:
    """What the catalogue lacks falls back to `other`; what it has stays."""
    for outcome in Outcome:
        for reason in Reason:
            cause = cause_of(outcome, reason)
            assert (cause.outcome, cause.reason) in REQUESTS.series
            assert (cause.kind, cause.token_reason) in PROMPT_TOKENS.series
            if (outcome, reason) in REQUESTS.series:
                assert (cause.outcome, cause.reason) == (outcome, reason)
            else:
                assert cause.reason is Reason.OTHER


class Deaf:
    """An observer that keeps nothing."""

    def verdict(self, verdict: object) -> None: ...
    def tokens(self, kind: object, reason: object, count: int) -> None: ...
    def load_started(self, started_at: float) -> None: ...
    def load_ended(self, load: object) -> None: ...
    def handoff(self, handoff: object) -> None: ...
    def handoff_closed(self, handoff: object) -> None: ...
    def oldest(self, load_started_at: float, handoff_issued_at: float) -> None: ...


def _live(ledger: Ledger, number: int) -> None:
    request_id = f"request-{number}"
    ledger.admitted(request_id, 100, LOAD)
    ledger.asked(request_id, 100, 0, asynchronous=True)
    ledger.allocated(request_id, 100)
    ledger.step_scheduled()
    ledger.loaded(request_id)
    ledger.step_done()
    ledger.allocated(request_id, 0)
    ledger.scheduled(request_id, 99, 1, 100)
    ledger.step_scheduled()
    ledger.step_done()
    ledger.finished(request_id, Ending.LENGTH, handoff=HandoffReason.NONE)
    ledger.handoff_closed(request_id, HandoffEnd.READ)


def test_a_million_requests_leave_memory_flat() -> None:
    """Nothing stays of a request that is gone, in any of the ledger's containers."""
    ledger = Ledger([Deaf()], backoff=1, granule=16)
    for number in range(1_000_000):
        if number % 20:
            ledger.admitted(f"request-{number}", 100, LOAD)
            ledger.finished(f"request-{number}", Ending.ABORTED)
        else:
            _live(ledger, number)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1_000_000, 1_010_000):
            _live(ledger, number)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(ledger) == 0
    sizes = {name: len(value) for name, value in vars(ledger).items() if hasattr(value, "clear")}
    assert not any(sizes.values()), sizes
    assert grown < 10_000, "bytes held after 10,000 more requests"
