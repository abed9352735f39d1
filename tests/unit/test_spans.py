"""The spans sink, on a real OpenTelemetry SDK; what concerns the process's provider runs in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from shim.telemetry.provider import SHUTDOWN_SECONDS, wants_export
from shim.telemetry.spans import ATTRIBUTES, SpanObserver, parent_of
from shim.verdict import (
    Ask,
    Endpoint,
    Facts,
    Handoff,
    HandoffEnd,
    HandoffReason,
    HandoffResult,
    Load,
    LoadResult,
    Outcome,
    PeerKey,
    Reason,
    Source,
    Verdict,
)

TRACE, PARENT, PREFILL = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "b7ad6b7169203331"
FACTS = Facts(
    ask=Ask.LOAD,
    source=Source.BODY,
    endpoint=Endpoint.CHAT,
    external_id="chatcmpl-7",
    traceparent=f"00-{TRACE}-{PARENT}-01",
    tracestate="vendor=a:1,t@sys=b",
    linked_traceparent=f"00-{TRACE}-{PREFILL}-01",
    peer=PeerKey("10.0.0.7", 5600, "engine-p"),
    peer_request_id="cmpl-p-1",
)
VERDICT = Verdict(
    request_id="chatcmpl-7-1f2e",
    outcome=Outcome.LOCAL_PREFILL,
    reason=Reason.NO_MATCH,
    facts=FACTS,
    prompt_tokens=100,
    expected_tokens=0,
    loaded_tokens=0,
    computed_tokens=100,
    admitted_at=1_700_000_000.0,
    decided_at=1_700_000_000.25,
    first_scheduled_at=1_700_000_000.5,
    completed_at=1_700_000_001.5,
)
LOAD = Load("chatcmpl-7-1f2e", FACTS, LoadResult.LOADED, 99, 99, 1_700_000_000.0, 1_700_000_000.5, 100)
HANDOFF = Handoff(
    "cmpl-p-1",
    replace(FACTS, ask=Ask.HANDOFF, peer=None, peer_request_id=""),
    HandoffResult.ISSUED,
    HandoffReason.NONE,
    prompt_tokens=100,
    issued_at=1_700_000_000.0,
    end=HandoffEnd.READ,
    ended_at=1_700_000_002.0,
)


class Bench:
    """An observer whose spans can be looked at."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.observer = SpanObserver("NixlConnector", "kv_consumer", "llama", provider)

    def spans(self) -> tuple[ReadableSpan, ...]:
        """Spans ended so far."""
        return self._exporter.get_finished_spans()

    def span(self) -> ReadableSpan:
        """The only one."""
        (span,) = self.spans()
        return span


@pytest.fixture
def bench() -> Bench:
    """A fresh one."""
    return Bench()


def test_a_load_is_a_client_span_with_everything_known(bench: Bench) -> None:
    """Name, kind, times, parent, link and attributes are those of the contract."""
    bench.observer.load_ended(LOAD)
    span = bench.span()
    assert (span.name, span.kind) == ("kv_transfer.load", SpanKind.CLIENT)
    assert (span.start_time, span.end_time) == (1_700_000_000_000_000_000, 1_700_000_000_500_000_000)
    assert span.status.status_code is StatusCode.UNSET
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.context.trace_state.to_header() == FACTS.tracestate
    assert span.parent is not None
    assert (f"{span.parent.span_id:016x}", span.parent.is_remote) == (PARENT, True)
    assert [f"{link.context.span_id:016x}" for link in span.links] == [PREFILL]
    assert dict(span.attributes or {}) == {
        "gen_ai.request.id": "chatcmpl-7",
        "gen_ai.request.model": "llama",
        "gen_ai.usage.input_tokens": 100,
        "server.address": "10.0.0.7",
        "server.port": 5600,
        "vllm.kv_transfer.connector": "NixlConnector",
        "vllm.kv_transfer.role": "kv_consumer",
        "vllm.kv_transfer.outcome": "loaded",
        "vllm.kv_transfer.reason": "none",
        "vllm.kv_transfer.source": "body",
        "vllm.kv_transfer.endpoint": "/v1/chat/completions",
        "vllm.kv_transfer.tokens.expected": 99,
        "vllm.kv_transfer.tokens.loaded": 99,
        "vllm.kv_transfer.wait_seconds": 0.5,
        "vllm.kv_transfer.remote.engine_id": "engine-p",
        "vllm.kv_transfer.remote.request_id": "cmpl-p-1",
    }


@pytest.mark.parametrize("result", list(LoadResult))
def test_only_a_failed_load_is_an_error(bench: Bench, result: LoadResult) -> None:
    """A partial load is used, and an abort is the client's wish."""
    bench.observer.load_ended(replace(LOAD, result=result))
    span = bench.span()
    attributes = dict(span.attributes or {})
    failed = result is LoadResult.FAILED
    assert span.status.status_code is (StatusCode.ERROR if failed else StatusCode.UNSET)
    assert attributes.get("error.type") == ("load_failed" if failed else None)
    assert attributes["vllm.kv_transfer.outcome"] == result.value
    lost = result in {LoadResult.FAILED, LoadResult.PARTIAL}
    assert attributes["vllm.kv_transfer.reason"] == ("load_failed" if lost else "none")


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_local_prefill_span_for_two_outcomes_only(bench: Bench, outcome: Outcome) -> None:
    """Remote, intended, failed, aborted and prefill work have none; the status is always unset."""
    bench.observer.verdict(replace(VERDICT, outcome=outcome))
    if outcome not in {Outcome.LOCAL_PREFILL, Outcome.PARTIAL}:
        assert bench.spans() == ()
        return
    span = bench.span()
    assert (span.name, span.kind) == ("kv_transfer.local_prefill", SpanKind.INTERNAL)
    assert (span.start_time, span.end_time) == (1_700_000_000_250_000_000, 1_700_000_001_500_000_000)
    assert span.status.status_code is StatusCode.UNSET
    assert span.links == ()
    attributes = dict(span.attributes or {})
    assert "error.type" not in attributes
    assert attributes["vllm.kv_transfer.outcome"] == outcome.value
    assert attributes["vllm.kv_transfer.reason"] == "no_match"
    assert attributes["vllm.kv_transfer.tokens.computed"] == 100


@pytest.mark.parametrize("end", list(HandoffEnd))
def test_a_handoff_span_at_its_close(bench: Bench, end: HandoffEnd) -> None:
    """From the request's end to the hand-off's; an error only when it expired."""
    bench.observer.handoff(replace(HANDOFF, end=None, ended_at=None))
    assert bench.spans() == ()
    bench.observer.handoff_closed(replace(HANDOFF, end=end))
    span = bench.span()
    expired = end is HandoffEnd.EXPIRED
    assert (span.name, span.kind) == ("kv_transfer.handoff", SpanKind.INTERNAL)
    assert (span.start_time, span.end_time) == (1_700_000_000_000_000_000, 1_700_000_002_000_000_000)
    assert span.status.status_code is (StatusCode.ERROR if expired else StatusCode.UNSET)
    attributes = dict(span.attributes or {})
    assert attributes.get("error.type") == ("handoff_expired" if expired else None)
    assert attributes["vllm.kv_transfer.outcome"] == end.value
    assert attributes["vllm.kv_transfer.wait_seconds"] == 2.0
    assert "server.address" not in attributes


def test_no_attribute_outside_the_contract(bench: Bench) -> None:
    """Every name that any span uses is in the table."""
    for result in LoadResult:
        bench.observer.load_ended(replace(LOAD, result=result))
    for end in HandoffEnd:
        bench.observer.handoff_closed(replace(HANDOFF, end=end))
    bench.observer.verdict(VERDICT)
    used = {name for span in bench.spans() for name in span.attributes or {}}
    assert used == set(ATTRIBUTES)


def test_without_a_caller_context_the_span_is_a_root(bench: Bench) -> None:
    """No parent, its own trace; and a request from outside HTTP shows vLLM's own id."""
    bench.observer.load_ended(replace(LOAD, facts=Facts(ask=Ask.LOAD)))
    span = bench.span()
    assert span.parent is None
    assert span.links == ()
    assert dict(span.attributes or {})["gen_ai.request.id"] == "chatcmpl-7-1f2e"


def test_a_callers_wish_not_to_be_sampled_is_kept(bench: Bench) -> None:
    """The default sampler follows the parent."""
    bench.observer.load_ended(replace(LOAD, facts=replace(FACTS, traceparent=f"00-{TRACE}-{PARENT}-00")))
    assert bench.spans() == ()


def test_a_clock_that_went_back_gives_no_negative_span(bench: Bench) -> None:
    """Times come from the wall clock, which may be set."""
    bench.observer.load_ended(replace(LOAD, ended_at=LOAD.started_at - 5))
    bench.observer.verdict(replace(VERDICT, completed_at=VERDICT.decided_at - 5))
    bench.observer.handoff_closed(replace(HANDOFF, ended_at=HANDOFF.issued_at - 5))
    for span in bench.spans():
        assert span.start_time == span.end_time
        assert dict(span.attributes or {}).get("vllm.kv_transfer.wait_seconds", 0.0) == 0.0


@pytest.mark.parametrize(
    "traceparent",
    [
        "00",
        f"00-{TRACE}-{PARENT}-01\n",
        f"00-{TRACE}-{PARENT}-01-x",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        "\ud800" * 55,
        "0" * 1_000_000,
    ],
    ids=range(9),
)
def test_a_hostile_traceparent_gives_a_root(bench: Bench, traceparent: str) -> None:
    """Whatever stands there, there is a span, and neither a parent nor a link."""
    bench.observer.load_ended(
        replace(LOAD, facts=replace(FACTS, traceparent=traceparent, linked_traceparent=traceparent))
    )
    assert bench.span().parent is None
    assert bench.span().links == ()


@pytest.mark.parametrize(
    "tracestate",
    [
        "a=b\r\nSet-Cookie: x",
        "a=\x1b[31mred",
        "a=\u202eb",
        "a=\ud800",
        "A=b",
        "=",
        "a=" + "b" * 1_000_000,
        ",".join(f"k{n}=v" for n in range(33)),
        "a=1,a=2",
    ],
    ids=range(9),
)
def test_a_hostile_tracestate_is_dropped_without_a_word(
    tracestate: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The parent stays; OpenTelemetry would log the string as it is, so it never sees it."""
    context = parent_of(FACTS.traceparent, tracestate)
    assert context
    span_context = _span_context(context)
    assert f"{span_context.span_id:016x}" == PARENT
    assert not span_context.trace_state
    assert caplog.records == []


def _span_context(context):
    from opentelemetry import trace

    return trace.get_current_span(context).get_span_context()


def test_hostile_strings_are_printable_and_short(bench: Bench) -> None:
    """No string of the client's reaches a collector as it came."""
    evil = "\r\n\x1b[2J\u202e\ud800" + "x" * 1_000_000
    facts = replace(FACTS, external_id=evil, peer=PeerKey(evil, 1, evil), peer_request_id=evil)
    bench.observer.load_ended(replace(LOAD, facts=facts, request_id=evil))
    bench.observer.handoff_closed(replace(HANDOFF, facts=replace(facts, external_id=""), request_id=evil))
    for span in bench.spans():
        for value in dict(span.attributes or {}).values():
            if isinstance(value, str):
                assert len(value) <= 128
                assert value.isascii()
                assert value.isprintable()


ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({ENDPOINT: " "}, False),
        ({ENDPOINT: "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4317"}, False),
        ({ENDPOINT: "http://c:4317", "OTEL_SDK_DISABLED": "True"}, False),
        ({ENDPOINT: "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_when_a_provider_is_wanted(environ: dict[str, str], wanted: bool) -> None:
    """Only an OTLP endpoint for traces asks for one, and OpenTelemetry's own switches can say no."""
    assert wants_export(environ) is wanted


PRELUDE = """
import gc, os, sys, threading, time, timeit
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from shim.telemetry.spans import SpanObserver
from shim.verdict import *
def load(at):
    return Load("r", Facts(ask=Ask.LOAD), LoadResult.LOADED, 9, 9, at, at, 10)
def eventually(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
def has_provider():
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
observer = SpanObserver("c", "kv_consumer", "m")
"""


def run(script: str, **environ: str) -> tuple[str, float]:
    """What a fresh Python prints, and when it had ended (Unix seconds); it must succeed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, time.time()


def test_nobody_records() -> None:
    """Without provider and endpoint nothing is installed, held or started; an event costs next to nothing."""
    printed, _ = run("""
event = load(1.0)
print(min(timeit.repeat(lambda: observer.load_ended(event), number=2000, repeat=5)) / 2000 * 1e6 < 5)
print(has_provider(), threading.active_count(), "opentelemetry.exporter" in str(sys.modules.keys()))
""")
    assert printed.split() == ["True", "False", "1", "False"]


def test_a_provider_that_appears_later_is_used() -> None:
    """The look is repeated, at most once a second of the events' own time, also when that goes back."""
    printed, _ = run("""
observer.load_ended(load(100.0))
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
observer.load_ended(load(100.5))
print(len(exporter.get_finished_spans()))
observer.load_ended(load(101.5))
observer.load_ended(load(101.6))
print(len(exporter.get_finished_spans()))
other = SpanObserver("c", "kv_consumer", "m")
other.load_ended(load(50.0))
print(len(exporter.get_finished_spans()))
""")
    assert printed.split() == ["0", "2", "3"]


def test_a_provider_of_vllms_is_never_replaced() -> None:
    """With an endpoint set and a provider there, none is installed."""
    printed, _ = run(
        """
provider = TracerProvider()
trace.set_tracer_provider(provider)
observer.load_ended(load(1.0))
print(trace.get_tracer_provider() is provider, threading.active_count())
""",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
    )
    assert printed.split() == ["True", "1"]


def test_two_observers_install_one_provider() -> None:
    """Both find the same one, and the warning of a second `set_tracer_provider` is not seen."""
    printed, _ = run(
        """
import logging
seen = []
handler = logging.Handler(); handler.emit = seen.append
logging.getLogger("opentelemetry.trace").addHandler(handler)
others = [SpanObserver("c", "kv_consumer", "m") for _ in range(8)]
for each in [observer, *others]:
    each.load_ended(load(1.0))
eventually(has_provider)
first = trace.get_tracer_provider()
eventually(lambda: all(each._tracers._tracer for each in [observer, *others]))
print(trace.get_tracer_provider() is first, len(seen))
print(sum(thread.name == "OtelBatchSpanRecordProcessor" for thread in threading.enumerate()))
os._exit((sys.stdout.flush(), 0)[1])
""",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
    )
    assert printed.split() == ["True", "0", "1"]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_dead_collector_changes_nothing(protocol: str) -> None:
    """Events stay cheap while exports fail, memory stays bounded, and the process ends in time."""
    printed, ended = run(
        """
observer.load_ended(load(1.0))
eventually(has_provider)
eventually(lambda: observer._tracers._tracer)
took = []
for n in range(6000):
    began = time.perf_counter()
    observer.load_ended(load(2.0 + n))
    took.append(time.perf_counter() - began)
print(sorted(took)[5900] < 1.0)  # an event that waits for the collector takes 10 s; a busy machine is no such
gc.collect()
from opentelemetry.sdk.trace import ReadableSpan
print(sum(isinstance(thing, ReadableSpan) for thing in gc.get_objects()) <= 2048 + 3 * 512)
print(time.time())
""",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        OTEL_BSP_SCHEDULE_DELAY="50",
    )
    *checks, leaving = printed.split()
    assert checks == ["True", "True"]
    assert ended - float(leaving) < SHUTDOWN_SECONDS + 4


def test_a_protocol_that_is_none_is_said_once() -> None:
    """A wrong setting costs the spans and one line that says what to set; nothing is retried."""
    printed, _ = run(
        """
import logging
seen = []
handler = logging.Handler(); handler.emit = lambda record: seen.append(record.getMessage())
logging.getLogger("vllm.kv_shim").addHandler(handler)
for n in range(5):
    observer.load_ended(load(1.0 + 2 * n))
    eventually(lambda: observer._tracers._held is None)
print(len(seen), has_provider(), threading.active_count())
print(seen[0])
""",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://user:secret@127.0.0.1:9",
        OTEL_EXPORTER_OTLP_PROTOCOL="carrier-pigeon",
    )
    first, line = printed.splitlines()
    assert first == "1 False 1"
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=carrier-pigeon" in line
    assert "secret" not in line
