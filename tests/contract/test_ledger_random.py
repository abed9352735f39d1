"""A thousand random schedules of vLLM's real scheduler: the ledger's sums hold in each."""

from __future__ import annotations

import os
from collections import Counter, deque
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import Script
from test_ledger_scheduler import FAILS_BY_REQUEST, Engine
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from shim.verdict import Ask, Facts, HandoffEnd, HandoffReason, Reason

EXAMPLES = int(os.environ.get("LEDGER_EXAMPLES", "1000"))
FACTS = (
    Facts(ask=Ask.LOAD),
    Facts(ask=Ask.LOAD),
    Facts(ask=Ask.LOAD),
    Facts(ask=Ask.HANDOFF),
    Facts(ask=Ask.HANDOFF, reason=Reason.PARAMS_MISSING),
    Facts(reason=Reason.PARAMS_MISSING),
    Facts(reason=Reason.PARAMS_INVALID),
    Facts(reason=Reason.NOT_DISAGGREGATED),
)


@dataclass(frozen=True)
class Add:
    """A request arrives; `family` decides with whom it shares a prefix."""

    facts: Facts
    family: int
    prompt: int
    offer: int
    asynchronous: bool
    forgetful: bool
    undecided: int
    max_tokens: int
    logprobs: bool
    pins: bool


@dataclass(frozen=True)
class Step:
    """A step is built and the oldest processed; `seed` decides what workers report and what is sampled."""

    seed: int


@dataclass(frozen=True)
class Abort:
    """A client goes."""

    which: int


@dataclass(frozen=True)
class Reset:
    """An operator resets the prefix cache, running requests and all."""


ADDS = st.builds(
    Add,
    facts=st.sampled_from(FACTS),
    family=st.integers(0, 2),
    prompt=st.integers(1, 120),
    offer=st.integers(0, 130),
    asynchronous=st.booleans(),
    forgetful=st.booleans(),
    undecided=st.integers(0, 2),
    max_tokens=st.integers(1, 12),
    logprobs=st.integers(0, 9).map(lambda n: n == 0),
    pins=st.booleans(),
)
STEPS = st.builds(Step, seed=st.integers(0, 1 << 16))
EVENTS = st.lists(
    st.one_of(ADDS, STEPS, STEPS, STEPS, st.builds(Abort, st.integers(0, 7)), st.just(Reset())),
    min_size=10,
    max_size=40,
)


class World:
    """An engine, its workers and its clients; counts by itself what the ledger must come to."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.added: Counter[str] = Counter()
        self.beside: deque[dict[str, list[int]]] = deque()
        self.harmed = False

    def play(self, event: Add | Step | Abort | Reset) -> None:
        requests = self.engine.scheduler.requests
        match event:
            case Add():
                self._add(event)
            case Step():
                self.step(Random(event.seed))
            case Abort():
                ids = [key for key, one in requests.items() if not one.is_finished()]
                if ids:
                    victim = ids[event.which % len(ids)]
                    self.engine.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
            case Reset():
                holding = (RequestStatus.RUNNING, RequestStatus.WAITING)
                movable = all(
                    one.status in holding
                    and (one.status == RequestStatus.RUNNING or not one.num_computed_tokens)
                    for one in requests.values()
                )
                if movable and not self.engine.steps.flying:
                    self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _add(self, event: Add) -> None:
        number = sum(self.added.values())
        request_id = f"r{number % 6}"
        # vLLM's ids are unique; it would take the output of a step in flight for the new request's.
        flying = any(request_id in output.num_scheduled_tokens for output, _ in self.engine.steps.flying)
        if flying or request_id in self.engine.scheduler.requests:
            return
        self.added[request_id] += 1
        tail = [200 + number % 50] * (event.prompt // 3)
        prompt = ([10 + event.family] * event.prompt)[: event.prompt - len(tail)] + tail
        handoff = {"do_remote_prefill": True} if event.facts.ask is Ask.HANDOFF and event.pins else None
        script = Script(
            offer=event.offer if event.facts.ask is Ask.LOAD else 0,
            asynchronous=event.asynchronous,
            undecided=event.undecided,
            pins=event.pins,
            handoff=handoff,
            # A loaded prompt of one token is at 0 again, and vLLM asks again without end.
            forgetful=event.forgetful or event.prompt == 1,
        )
        logprobs = 1 if event.logprobs else None
        self.engine.add(
            event.facts, script, request_id, prompt, max_tokens=event.max_tokens, prompt_logprobs=logprobs
        )

    def step(self, chance: Random, *, kind: bool = False) -> None:
        """One turn of the busy loop; a `kind` one ends every load well."""
        engine = self.engine
        engine.steps.token = 7 if chance.random() < 0.1 else 5
        engine.steps.schedule()
        self.beside.append(dict(engine.connector.beside))
        engine.connector.beside.clear()
        while len(engine.steps.flying) >= engine.steps.depth:
            engine.steps.update(self._report(chance, kind=kind))
        self.check()

    def drain(self) -> None:
        """Let everything end; what vLLM has starved is aborted at last."""
        scheduler, chance = self.engine.scheduler, Random(0)
        for turn in range(200):
            if not scheduler.requests:
                break
            if turn == 150:
                # 0.32 counts a failed load's own reservation against its retry (scheduler.py,
                # _inflight_prefills), which then may never fit into few blocks.
                scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            self.step(chance, kind=True)
        while self.engine.steps.flying:
            self.engine.steps.update(self._report(chance, kind=True))
        assert not scheduler.requests

    def _report(self, chance: Random, *, kind: bool) -> KVConnectorOutput:
        connector, requests = self.engine.connector, self.engine.scheduler.requests
        beside = self.beside.popleft()
        report = KVConnectorOutput(finished_recving=set(), finished_sending=set())
        for request_id, blocks in sorted(connector.loading.items()):
            if not kind and chance.random() < 0.4:
                continue
            alive = not requests[request_id].is_finished()
            if alive and not kind and chance.random() < 0.4:
                self.harmed = True
                if FAILS_BY_REQUEST and chance.random() < 0.3:
                    report.failed_recving.add(request_id)
                else:
                    report.invalid_block_ids.update(blocks[chance.randrange(len(blocks)) :])
                    if chance.random() < 0.3:
                        continue  # the load goes on
            report.finished_recving.add(request_id)
        for request_id, blocks in beside.items():
            one = requests.get(request_id)
            running = one is not None and one.status == RequestStatus.RUNNING
            # With steps in flight vLLM itself trips over it (async_scheduler.py, num_output_placeholders >= 0).
            if running and self.engine.steps.depth == 1 and not kind and chance.random() < 0.4:
                self.harmed = True
                report.invalid_block_ids.update(blocks[chance.randrange(len(blocks)) :])
        report.finished_sending.update(connector.sending)
        connector.sending.clear()
        return report

    def check(self) -> None:
        """What must hold between any two steps."""
        engine = self.engine
        given = Counter(verdict.request_id for verdict in engine.seen.verdicts)
        assert given <= self.added, "more than one verdict for a request"
        if not engine.ledger.loading_ids:
            assert sum(engine.seen.counted.values()) == sum(engine.steps.computed.values())
        if not self.harmed:
            assert not any(verdict.reason is Reason.LOAD_FAILED for verdict in engine.seen.verdicts)
        assert len(engine.seen.starts) - len(engine.seen.loads) == len(engine.ledger.loading_ids)


@given(
    events=EVENTS,
    policy=st.sampled_from(["fail", "recompute"]),
    depth=st.integers(1, 2),
    blocks=st.sampled_from([14, 24, 200]),
)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_random_schedules(events: list[Any], policy: str, depth: int, blocks: int) -> None:
    """One verdict each, every computed prompt token once, only known labels, and nothing left at the end."""
    engine = Engine(policy=policy, depth=depth, blocks=blocks)
    world = World(engine)
    for event in events:
        world.play(event)
    world.drain()
    for request_id in tuple(world.added):
        engine.ledger.handoff_closed(request_id, HandoffEnd.UNKNOWN)
    assert Counter(verdict.request_id for verdict in engine.seen.verdicts) == world.added
    engine.settled()
    issued = [one for one in engine.seen.handoffs if one.reason is HandoffReason.NONE]
    assert len(issued) == len(engine.seen.closed)
    assert not engine.connector.observe._requests
