"""The ledger against a plain model of a scheduler, and against noise, driven by hypothesis."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from recording import Recording

from shim.ledger import Ending, Ledger
from shim.verdict import (
    REASON_CLASS,
    Ask,
    Facts,
    HandoffEnd,
    HandoffReason,
    Outcome,
    Reason,
    ReasonClass,
)

GRANULE = 4
ANY_FACTS = st.builds(Facts, ask=st.sampled_from(Ask), reason=st.sampled_from(Reason))
ENDINGS = st.sampled_from(Ending)
SIZES = st.integers(1, 40)


@dataclass
class Modelled:
    """What the model knows of one request; positions are prompt tokens."""

    facts: Facts
    prompt: int
    state: str = "waiting"  # waiting, parked, running, complete, decoding
    position: int = 0
    local: int = 0
    external: int = 0
    loaded: int = 0
    failed: bool = False
    load_open: bool = False  # a synchronous load's step is in flight
    preempted: bool = False
    refused: bool = False
    start: int | None = None
    computed: int = 0
    step: int = -1
    pending: set[int] = field(default_factory=set)


def expected(request: Modelled) -> tuple[Outcome, Reason]:  # noqa: PLR0911  # a table reads best flat
    """TELEMETRY.md's verdict for a prompt that is complete and was never preempted."""
    facts, rest = request.facts, request.prompt - (request.start or 0)
    if facts.ask is Ask.HANDOFF:
        return Outcome.PREFILL, Reason.NONE
    group = REASON_CLASS[facts.reason]
    wished = facts.ask is Ask.LOAD and facts.reason is Reason.NONE
    if request.failed and (wished or group is ReasonClass.INTENDED):
        return (Outcome.PARTIAL if request.loaded else Outcome.LOCAL_PREFILL), Reason.LOAD_FAILED
    if request.loaded and rest <= GRANULE and not request.failed:
        return Outcome.REMOTE, Reason.NONE
    if group is ReasonClass.INTENDED:
        return Outcome.LOCAL_INTENDED, facts.reason
    if not wished:
        known = group is not ReasonClass.NEUTRAL and facts.reason is not Reason.PARTIAL_MATCH
        return Outcome.LOCAL_PREFILL, facts.reason if known else Reason.OTHER
    if request.loaded:
        return Outcome.PARTIAL, Reason.PARTIAL_MATCH
    if rest <= GRANULE:
        return Outcome.LOCAL_INTENDED, Reason.LOCAL_CACHE if request.start else Reason.BELOW_THRESHOLD
    return Outcome.LOCAL_PREFILL, Reason.UNSUPPORTED_MODE if request.refused else Reason.NO_MATCH


class Scheduling(RuleBasedStateMachine):
    """A scheduler with steps in flight, as vLLM calls its connector; every verdict is foretold."""

    @initialize(depth=st.integers(1, 3))
    def begin(self, depth: int) -> None:
        self.seen = Recording()
        self.time = 0.0
        self.ledger = Ledger([self.seen], backoff=1, granule=GRANULE, clock=self.tick)
        self.depth = depth
        self.requests: dict[str, Modelled] = {}
        self.foretold: dict[str, tuple[Outcome, Reason] | None] = {}
        self.computed = 0
        self.steps: deque[tuple[int, list[str]]] = deque()
        self.built = 0
        self.lost: set[str] = set()
        self.issued: set[str] = set()

    def tick(self) -> float:
        self.time += 1
        return self.time

    def pick(self, data: st.DataObject, *states: str) -> str | None:
        ids = sorted(key for key, request in self.requests.items() if request.state in states)
        return data.draw(st.sampled_from(ids)) if ids else None

    def foretell(self, request_id: str, verdict: tuple[Outcome, Reason]) -> None:
        if request_id not in self.foretold:
            self.foretold[request_id] = None if self.requests[request_id].preempted else verdict

    @rule(facts=ANY_FACTS, prompt=SIZES)
    def admit(self, facts: Facts, prompt: int) -> None:
        request_id = f"r{len(self.foretold) + len(self.requests)}-{self.time}"
        self.requests[request_id] = Modelled(facts, prompt)
        self.ledger.admitted(request_id, prompt, facts)

    @rule(data=st.data())
    def undecided(self, data: st.DataObject) -> None:
        """The connector can't tell yet, or blocks are short after it told."""
        request_id = self.pick(data, "waiting")
        if request_id:
            answer = data.draw(st.one_of(st.none(), st.just(0)))
            self.ledger.asked(request_id, answer, 0, asynchronous=data.draw(st.booleans()))
            self.requests[request_id].refused = False

    @rule(data=st.data(), refuse=st.booleans(), asynchronous=st.booleans())
    def allocate(self, data: st.DataObject, refuse: bool, asynchronous: bool) -> None:
        request_id = self.pick(data, "waiting")
        if request_id is None:
            return
        request = self.requests[request_id]
        request.local = data.draw(st.integers(0, request.prompt - 1))
        most = request.prompt - request.local - (0 if asynchronous else 1)
        offered = data.draw(st.integers(0, most))
        request.external = 0 if refuse else offered
        self.ledger.asked(request_id, offered, request.local, asynchronous and offered > 0)
        self.ledger.allocated(request_id, request.external)
        request.position = request.local + request.external
        request.start = None
        request.refused = refuse and offered > 0
        request.step = self.built
        if request.external:
            request.loaded, request.failed = request.external, False
            request.state = "parked" if asynchronous else "running"
            request.load_open = not asynchronous
        else:
            request.state = "running"

    @rule(data=st.data(), share=st.one_of(st.none(), st.floats(0, 0.99)))
    def load_ends(self, data: st.DataObject, share: float | None) -> None:
        """An asynchronous load ends; `share` of it was good."""
        request_id = self.pick(data, "parked")
        if request_id is None:
            return
        request = self.requests[request_id]
        if share is not None:
            valid = int(request.position * share)
            self.ledger.load_failed(request_id, valid)
            self._fail(request, valid)
        self.ledger.loaded(request_id)
        if request.position == request.prompt:
            request.start = request.position
            self.foretell(request_id, expected(request))
        if request.position == 0:
            request.state = "waiting"
            return
        request.position = min(request.position, request.prompt - 1)
        request.state, request.step = "running", self.built
        self.ledger.allocated(request_id, 0)

    def _fail(self, request: Modelled, valid: int) -> None:
        request.failed = True
        request.loaded = max(0, valid - request.local)
        request.position = valid

    @precondition(lambda self: len(self.steps) < self.depth)
    @rule(data=st.data())
    def build_step(self, data: st.DataObject) -> None:
        self.ledger.preempted(self.lost)
        self.lost = set()
        chunks = []
        running = {key for key, request in self.requests.items() if request.state == "running"}
        assert set(self.ledger.open) == running
        for request_id in sorted(running):
            request = self.requests[request_id]
            count = data.draw(st.integers(0, request.prompt + 2))
            if not count:
                continue
            start, request.position = request.position, request.position + count
            if request.start is None:
                request.start = start
            new = min(request.position, request.prompt) - start
            self.computed += max(0, new)
            self.ledger.scheduled(request_id, start, count, request.prompt)
            chunks.append(request_id)
            request.pending.add(self.built)
            if request.position >= request.prompt:
                request.state = "complete"
        self.steps.append((self.built, chunks))
        self.ledger.step_scheduled()
        self.built += 1

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def step_ends(self, data: st.DataObject) -> None:
        step, chunks = self.steps.popleft()
        for request_id in chunks:
            request = self.requests.get(request_id)
            if request is None or step not in request.pending:
                continue
            request.pending.discard(step)
            if request.load_open and request.state in {"running", "complete"}:
                if data.draw(st.booleans()):
                    valid = data.draw(st.integers(0, request.local + request.external - 1))
                    self.ledger.load_failed(request_id, valid)
                    self._fail(request, valid)
                    request.pending.clear()
                    request.state, request.start = "running", valid
                request.load_open = False
            if request.state == "complete" and not request.pending:
                request.state = "decoding"
                self.foretell(request_id, expected(request))
        self.ledger.step_done()

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Named when the next step is built; here at once or, after a reset, not before the next ask."""
        request_id = self.pick(data, "running", "complete", "decoding")
        if request_id is None or self.requests[request_id].step == self.built:
            return
        request = self.requests[request_id]
        request.preempted = True
        request.state, request.position, request.load_open = "waiting", 0, False
        request.pending.clear()
        if data.draw(st.booleans()):
            self.ledger.preempted([request_id])
        else:
            self.lost.add(request_id)
            self.ledger.asked(request_id, None, 0, asynchronous=False)

    @rule(data=st.data(), how=ENDINGS, handoff=st.one_of(st.none(), st.sampled_from(HandoffReason)))
    def end(self, data: st.DataObject, how: Ending, handoff: HandoffReason | None) -> None:
        states = ["waiting", "parked", "running", "complete", "decoding"]
        if how in {Ending.STOPPED, Ending.LENGTH}:
            states = ["decoding"]
        request_id = self.pick(data, *states)
        if request_id is None:
            return
        request = self.requests[request_id]
        if how is Ending.ABORTED:
            self.foretell(request_id, (Outcome.ABORTED, Reason.NONE))
        elif how is Ending.ERROR:
            parked = request.state == "parked"
            self.foretell(request_id, (Outcome.FAILED, Reason.LOAD_FAILED if parked else Reason.OTHER))
        self.ledger.finished(request_id, how, handoff=handoff)
        del self.requests[request_id]
        if handoff is HandoffReason.NONE:
            self.issued.add(request_id)

    @precondition(lambda self: self.issued)
    @rule(data=st.data(), end=st.sampled_from(HandoffEnd))
    def close_handoff(self, data: st.DataObject, end: HandoffEnd) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.issued)))
        self.issued.remove(request_id)
        self.ledger.handoff_closed(request_id, end)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "seen"):
            return
        given = {verdict.request_id: (verdict.outcome, verdict.reason) for verdict in self.seen.verdicts}
        assert len(given) == len(self.seen.verdicts), "a second verdict"
        assert given.keys() == self.foretold.keys()
        for request_id, verdict in self.foretold.items():
            assert verdict is None or given[request_id] == verdict, request_id
        assert len(self.ledger) == len(self.requests) + len(self.issued)
        assert len(self.seen.starts) - len(self.seen.loads) == len(self.ledger.loading_ids)
        if not self.ledger.loading_ids:
            assert sum(self.seen.counted.values()) == self.computed

    def teardown(self) -> None:
        if not hasattr(self, "seen"):
            return
        for request_id in tuple(self.requests):
            self.foretell(request_id, (Outcome.ABORTED, Reason.NONE))
            self.ledger.finished(request_id, Ending.ABORTED)
            del self.requests[request_id]
        for request_id in self.issued:
            self.ledger.handoff_closed(request_id, HandoffEnd.UNKNOWN)
        self.issued = set()
        self.agrees()
        sizes = [len(value) for value in vars(self.ledger).values() if hasattr(value, "clear")]
        assert not any(sizes)


IDS = st.sampled_from(["a", "b", "c"])
COUNTS = st.integers(0, 50)


class Noise(RuleBasedStateMachine):
    """Events of three ids in any order with any numbers: sums hold, labels are known, nothing is raised."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Recording()
        self.time = 0.0
        self.ledger = Ledger([self.seen], backoff=1, granule=GRANULE, clock=self.tick, load_timeout=9)
        self.admissions = 0
        self.handoffs: Counter[bool] = Counter()
        self.computed = 0
        self.alive: set[str] = set()

    def tick(self) -> float:
        self.time += 1
        return self.time

    @rule(request_id=IDS, prompt=COUNTS, facts=ANY_FACTS)
    def admitted(self, request_id: str, prompt: int, facts: Facts) -> None:
        self.admissions += 1
        self.alive.add(request_id)
        self.ledger.admitted(request_id, prompt, facts)

    @rule(request_id=IDS, external=st.one_of(st.none(), COUNTS), local=COUNTS, asynchronous=st.booleans())
    def asked(self, request_id: str, external: int | None, local: int, asynchronous: bool) -> None:
        self.ledger.asked(request_id, external, local, asynchronous)

    @rule(request_id=IDS, external=COUNTS)
    def allocated(self, request_id: str, external: int) -> None:
        self.ledger.allocated(request_id, external)

    @rule(request_id=IDS, start=COUNTS, count=SIZES, prompt=COUNTS)
    def scheduled(self, request_id: str, start: int, count: int, prompt: int) -> None:
        self.ledger.scheduled(request_id, start, count, prompt)
        if request_id in self.alive:
            self.computed += max(0, min(start + count, prompt) - start)

    @rule()
    def step_scheduled(self) -> None:
        self.ledger.step_scheduled()

    @rule()
    def step_done(self) -> None:
        self.ledger.step_done()

    @rule(request_ids=st.sets(IDS))
    def preempted(self, request_ids: set[str]) -> None:
        self.ledger.preempted(request_ids)

    @rule(request_id=IDS)
    def loaded(self, request_id: str) -> None:
        self.ledger.loaded(request_id)

    @rule(request_id=IDS, valid=COUNTS)
    def load_failed(self, request_id: str, valid: int) -> None:
        self.ledger.load_failed(request_id, valid)

    @rule(
        request_id=IDS,
        how=ENDINGS,
        handoff=st.one_of(st.none(), st.sampled_from(HandoffReason)),
        pinned=st.booleans(),
    )
    def finished(self, request_id: str, how: Ending, handoff: HandoffReason | None, pinned: bool) -> None:
        self.ledger.finished(request_id, how, handoff=handoff, pinned=pinned)
        self.alive.discard(request_id)

    @rule(request_id=IDS, end=st.sampled_from(HandoffEnd))
    def handoff_closed(self, request_id: str, end: HandoffEnd) -> None:
        self.ledger.handoff_closed(request_id, end)

    def teardown(self) -> None:
        for request_id in ("a", "b", "c"):
            self.ledger.finished(request_id, Ending.ABORTED)
            self.ledger.handoff_closed(request_id, HandoffEnd.UNKNOWN)
        assert len(self.seen.verdicts) == self.admissions
        assert sum(self.seen.counted.values()) == self.computed
        assert len(self.seen.starts) == len(self.seen.loads)
        assert len([h for h in self.seen.handoffs if h.result == "issued"]) == len(self.seen.closed)
        assert not self.seen.oldests or self.seen.oldests[-1] == (0.0, 0.0)
        sizes = [len(value) for value in vars(self.ledger).values() if hasattr(value, "clear")]
        assert not any(sizes)


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestNoise = Noise.TestCase
TestNoise.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
