"""Every reason on a live pair: each request counted once, with its reason, and answered as it should be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from otlp import OtlpReceiver, Received
from scenarios import SCENARIOS, Scenario
from servers import DROPPED, ERRORS, HANDOFFS
from traffic import CLOSED, LEASE, Gained, Traffic, Verdicts, consumer, producer, settled

from shim.cli.metrics import Scrape
from shim.telemetry import spans
from shim.verdict import Endpoint, HandoffEnd, Outcome

if TYPE_CHECKING:
    from shim.cli.router import Prompt

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
NEW = Scrape(())
"""What a server that has just begun has counted."""


@pytest.fixture(scope="module")
def receiver():
    """Where both servers send their spans."""
    with OtlpReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def pair(bench, receiver):
    """A prefill and a decode server with prefix caching and traces."""
    env = receiver.environ()
    return bench.pair(producer(bench, env=env), consumer(bench, env=env))


@pytest.fixture(scope="module")
def traffic(pair):
    """What is right is what prefill itself says: it computes the whole prompt."""
    return Traffic(pair, plain=pair.prefill.url)


class Run:
    """What all scenarios together must have been counted as, on servers that served nothing else."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.verdicts: Verdicts = Verdicts()
        self.unread = 0


@pytest.fixture(scope="module")
def run(traffic):
    """Counted from the first request on."""
    return Run(traffic)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_reason_is_counted_once_and_the_answer_is_a_local_prefills(run, bench, scenario: Scenario) -> None:
    """By the shim's counters, by vLLM's own beside them, and by the output's tokens."""
    if bench.environment.release < scenario.since:
        pytest.skip(f"vLLM {bench.environment.version} serves this from remote KV")
    before = run.traffic.pair.metrics()
    wanted = scenario.send(run.traffic) or scenario.verdicts
    run.verdicts += wanted
    run.unread += scenario.unread
    aborted = sum(count for (outcome, _), count in wanted.items() if outcome == Outcome.ABORTED)
    whole = wanted.total() - aborted

    def complete(gained: Gained) -> bool:
        return (
            gained.verdicts == wanted
            and gained.successes == whole
            and (not scenario.exact or gained.local_tokens == gained.explained_tokens)
        )

    gained = settled(run.traffic.pair.metrics, before, complete)
    assert gained.verdicts == wanted
    assert gained.successes == whole
    if scenario.exact:
        assert gained.local_tokens == gained.explained_tokens


def test_all_requests_together_were_counted_once(run) -> None:
    """On the idle server, long after: nothing came late and nothing twice."""
    gained = Gained(NEW, run.traffic.pair.metrics())
    assert gained.verdicts == run.verdicts
    assert gained.of(ERRORS) == 0
    assert gained.of(DROPPED) == 0


def test_every_hand_off_was_read_or_has_expired(run) -> None:
    """Prefill says of each hand-off how it ended, and no client made it free one twice."""
    prefill = run.traffic.pair.prefill
    asked, unread = run.traffic.asked, run.unread

    def complete(gained: Gained) -> bool:
        return gained.of(CLOSED) == asked

    gained = settled(lambda: run.traffic.pair.metrics(prefill), NEW, complete, within=LEASE + 10)
    assert gained.of(HANDOFFS, result="issued") == asked
    assert gained.by(CLOSED, "result") == {
        (HandoffEnd.READ.value,): asked - unread,
        (HandoffEnd.EXPIRED.value,): unread,
    }
    assert gained.of(ERRORS) == 0


def test_a_request_is_one_trace_across_prefill_and_decode(traffic, receiver) -> None:
    """The router passes the caller's context on; decode's load links to prefill's hand-off."""
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    prompt = traffic.prompt()
    traffic.pair.router.send(Endpoint.GENERATE, prompt, headers=headers)
    names = {spans.SpanName.LOAD.value, spans.SpanName.HANDOFF.value}

    def ours(received: list[Received]) -> dict[str, Received]:
        return {span.name: span for span in received if span.trace_id == TRACE and span.name in names}

    found = ours(receiver.wait(lambda received: ours(received).keys() == names))
    load, handoff = found[spans.SpanName.LOAD.value], found[spans.SpanName.HANDOFF.value]
    assert load.parent_id == handoff.parent_id == CALLER
    assert load.links == ((TRACE, handoff.span_id),)
    assert (load.kind, handoff.kind) == ("CLIENT", "INTERNAL")
    assert (load.status, handoff.status) == ("UNSET", "UNSET")
    assert {span.resource["vllm.process_kind"] for span in (load, handoff)} == {"engine_core"}
    assert load.resource["vllm.process_id"] != handoff.resource["vllm.process_id"]
    assert handoff.start_ns < load.end_ns
    _has_the_contracts_attributes(load, handoff, prompt)


def _has_the_contracts_attributes(load: Received, handoff: Received, prompt: Prompt) -> None:
    tokens = len(prompt.text)
    for span, role, outcome in ((load, "kv_consumer", "loaded"), (handoff, "kv_producer", "read")):
        assert (
            span.attributes.items()
            >= {
                spans.MODEL: "tiny",
                spans.INPUT_TOKENS: tokens,
                spans.CONNECTOR: "NixlConnector",
                spans.ROLE: role,
                spans.OUTCOME: outcome,
                spans.REASON: "none",
                spans.ENDPOINT: Endpoint.GENERATE.value,
            }.items()
        )
        assert span.attributes[spans.REQUEST_ID]
        assert span.attributes[spans.WAIT_SECONDS] > 0
        assert span.attributes.keys() <= set(spans.ATTRIBUTES)
    assert load.attributes[spans.TOKENS_EXPECTED] == load.attributes[spans.TOKENS_LOADED] == tokens
    assert load.attributes[spans.SERVER_ADDRESS] == "127.0.0.1"
    assert load.attributes[spans.SERVER_PORT] > 0
    assert load.attributes[spans.REMOTE_ENGINE_ID]
    assert load.attributes[spans.REMOTE_REQUEST_ID]


def test_a_local_prefill_is_a_span_that_says_why(traffic, receiver) -> None:
    """Also in the caller's own trace."""
    trace = TRACE[::-1]
    prompt = traffic.prompt()
    traffic.check(Endpoint.CHAT, prompt, headers={"traceparent": f"00-{trace}-{CALLER}-01"})

    def ours(received: list[Received]) -> list[Received]:
        return [s for s in received if s.trace_id == trace and s.name == spans.SpanName.LOCAL_PREFILL]

    (span,) = ours(receiver.wait(lambda received: bool(ours(received))))
    assert span.parent_id == CALLER
    assert span.kind == "INTERNAL"
    assert span.attributes[spans.REASON] == "params_missing"
    assert span.attributes[spans.ENDPOINT] == Endpoint.CHAT.value
    assert span.attributes[spans.TOKENS_COMPUTED] == span.attributes[spans.INPUT_TOKENS] >= len(prompt.text)
