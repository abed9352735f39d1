"""Spans as bytes on the wire: from processes made as vLLM makes EngineCore, through vLLM's provider or ours."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

import otlp
from otlp import OtlpReceiver, Received

from shim.telemetry.spans import ATTRIBUTES

TRACE, ROUTER, PREFILL = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "b7ad6b7169203331"
VLLM_KEYS = [
    f"vllm.{name}" for name in ("instrumenting_module_name", "process_id", "process_kind", "process_name")
]

ENGINE = f"""
import multiprocessing, os, sys
import opentelemetry.exporter.otlp.proto.grpc.trace_exporter  # as vLLM does (vllm/tracing/otel.py)
import opentelemetry.exporter.otlp.proto.http.trace_exporter
import requests
from opentelemetry import trace
from shim.telemetry.spans import SpanObserver
from shim.verdict import *

PARENT = "00-{TRACE}-{ROUTER}-01"
T = 1_700_000_000.0

def prefill():
    facts = Facts(ask=Ask.HANDOFF, source=Source.EXTRA_ARGS, endpoint=Endpoint.CHAT, external_id="chatcmpl-7",
                  traceparent=PARENT)
    SpanObserver("NixlConnector", "kv_producer", "llama").handoff_closed(Handoff(
        "chatcmpl-7-aa", facts, HandoffResult.ISSUED, HandoffReason.NONE, 100, T, HandoffEnd.READ, T + 1))

def decode():
    facts = Facts(ask=Ask.LOAD, source=Source.BODY, endpoint=Endpoint.CHAT, external_id="chatcmpl-7",
                  traceparent=PARENT, tracestate="vendor=1", linked_traceparent="00-{TRACE}-{PREFILL}-01",
                  peer=PeerKey("10.0.0.7", 5600, "engine-p"),
                  peer_request_id="chatcmpl-7-aa")
    observer = SpanObserver("NixlConnector", "kv_consumer", "llama")
    observer.load_ended(Load("chatcmpl-7-bb", facts, LoadResult.FAILED, 99, 0, T + 0.5, T + 0.75, 100))
    observer.verdict(Verdict("chatcmpl-7-bb", Outcome.LOCAL_PREFILL, Reason.LOAD_FAILED, facts, 100, 99, 0, 100,
                             T + 0.25, T + 0.5, T + 0.75, T + 2))

def engine(work):  # vLLM forks EngineCore or spawns it
    process = multiprocessing.get_context("fork").Process(target=work, name="EngineCore")
    process.start()
    process.join(60)
    assert process.exitcode == 0
"""


def run(script: str, environ: dict[str, str]) -> str:
    """What a fresh Python prints with only this OpenTelemetry environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE + script],
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def three(spans: list[Received]) -> bool:
    """Whether both engines' spans came."""
    return len(spans) >= 3


def check_trace(spans: list[Received]) -> None:
    """The spans of one disaggregated request, as the contract has them."""
    assert {span.trace_id for span in spans} == {TRACE}
    assert {span.parent_id for span in spans} == {ROUTER}
    assert {span.scope for span in spans} == {"vllm.kv_shim"}
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"kv_transfer.load", "kv_transfer.local_prefill", "kv_transfer.handoff"}
    load, local = by_name["kv_transfer.load"], by_name["kv_transfer.local_prefill"]
    handoff = by_name["kv_transfer.handoff"]
    assert [span.kind for span in (load, local, handoff)] == ["CLIENT", "INTERNAL", "INTERNAL"]
    assert [span.status for span in (load, local, handoff)] == ["ERROR", "UNSET", "UNSET"]
    assert [span.links for span in (load, local, handoff)] == [((TRACE, PREFILL),), (), ()]
    assert load.trace_state == "vendor=1"
    assert (load.start_ns, load.end_ns) == (1_700_000_000_500_000_000, 1_700_000_000_750_000_000)
    for span in spans:
        assert set(span.attributes) <= set(ATTRIBUTES)
        assert span.attributes["gen_ai.request.id"] == "chatcmpl-7"
    assert load.attributes == {
        "gen_ai.request.id": "chatcmpl-7",
        "gen_ai.request.model": "llama",
        "gen_ai.usage.input_tokens": 100,
        "error.type": "load_failed",
        "server.address": "10.0.0.7",
        "server.port": 5600,
        "vllm.kv_transfer.connector": "NixlConnector",
        "vllm.kv_transfer.role": "kv_consumer",
        "vllm.kv_transfer.outcome": "failed",
        "vllm.kv_transfer.reason": "load_failed",
        "vllm.kv_transfer.source": "body",
        "vllm.kv_transfer.endpoint": "/v1/chat/completions",
        "vllm.kv_transfer.tokens.expected": 99,
        "vllm.kv_transfer.tokens.loaded": 0,
        "vllm.kv_transfer.wait_seconds": 0.25,
        "vllm.kv_transfer.remote.engine_id": "engine-p",
        "vllm.kv_transfer.remote.request_id": "chatcmpl-7-aa",
    }


def test_prefill_and_decode_join_the_callers_trace() -> None:
    """Two forked engines, `OTEL_EXPORTER_OTLP_ENDPOINT` only: one trace, and their last spans are not lost."""
    with OtlpReceiver() as receiver:
        run(
            "engine(prefill); engine(decode)",
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
                "OTEL_SERVICE_NAME": "decode-7",
                "OTEL_BSP_SCHEDULE_DELAY": "600000",  # only the process's end can send them
            },
        )
        spans = receiver.wait(three)
    check_trace(spans)
    for span in spans:
        assert span.resource["service.name"] == "decode-7"
        assert sorted(key for key in span.resource if key.startswith("vllm.")) == VLLM_KEYS
        assert span.resource["vllm.process_kind"] == "engine_core"
        assert span.resource["vllm.process_name"] == "EngineCore"


def test_vllms_provider_is_used_and_no_other() -> None:
    """As in EngineCore with an endpoint for traces: vLLM's own set-up first, then ours finds it."""
    with OtlpReceiver() as receiver:
        printed = run(
            """
from vllm.tracing import maybe_init_worker_tracer
maybe_init_worker_tracer("vllm.engine_core", "engine_core", "EngineCore")
provider = trace.get_tracer_provider()
prefill(); decode()
import threading
print(sorted(key for key in provider.resource.attributes if key.startswith("vllm.")))
print(trace.get_tracer_provider() is provider)
print(sum(thread.name == "OtelBatchSpanRecordProcessor" for thread in threading.enumerate()))
""",
            receiver.environ(),
        )
        assert printed.splitlines()[-3:] == [str(VLLM_KEYS), "True", "1"]
        spans = receiver.wait(three)
    check_trace(spans)
    assert {span.resource["vllm.instrumenting_module_name"] for span in spans} == {"vllm.engine_core"}


def test_grpc_is_the_default_as_in_vllm() -> None:
    """An endpoint without a protocol is spoken to by gRPC."""
    with OtlpReceiver() as receiver:

        class Service(TraceServiceServicer):
            def Export(self, request, context):  # noqa: N802  # the protocol's name
                receiver.add(request)
                return ExportTraceServiceResponse()

        server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            endpoint = f"http://127.0.0.1:{port}"
            run("engine(prefill); engine(decode)", {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
            check_trace(receiver.wait(three))
        finally:
            server.stop(0).wait()


def test_the_receiver_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses what is too large, malformed or not for it, and stops keeping spans."""
    monkeypatch.setattr(otlp, "BODY_LIMIT", 1000)
    monkeypatch.setattr(otlp, "SPANS_LIMIT", 2)
    request = ExportTraceServiceRequest()
    for _ in range(3):
        request.resource_spans.add().scope_spans.add().spans.add(name="x")
    with OtlpReceiver() as receiver:
        answers = [
            httpx.post(receiver.url + "/v1/logs", content=b"x"),
            httpx.post(receiver.traces_url, content=b"x" * 1001),
            httpx.post(receiver.traces_url, content=b"\xff"),
            httpx.post(receiver.traces_url, content=b"x", headers={"Content-Encoding": "gzip"}),
            httpx.post(
                receiver.traces_url,
                content=gzip.compress(request.SerializeToString()),
                headers={"Content-Encoding": "gzip"},
            ),
        ]
        assert [answer.status_code for answer in answers] == [404, 413, 400, 400, 200]
        assert len(receiver.spans("x")) == 2
        assert receiver.dropped == 1
        with pytest.raises(TimeoutError, match="2 spans"):
            receiver.wait(three, timeout=0.01)
