"""A small OTLP/HTTP receiver on the loopback interface: keeps the spans it gets, as plain data."""

from __future__ import annotations

import gzip
import io
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

BODY_LIMIT = 4 << 20
SPANS_LIMIT = 10_000
KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
STATUSES = ("UNSET", "OK", "ERROR")


@dataclass(frozen=True, slots=True)
class Received:
    """One span as it came over the wire; ids are lower-case hex, `parent_id` is empty for a root."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    start_ns: int
    end_ns: int
    status: str
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    scope: str
    resource: dict[str, Any]


class OtlpReceiver:
    """Receives `POST /v1/traces` in protobuf, plain or gzipped; a context manager.

    Attributes:
        url: base URL, for `OTEL_EXPORTER_OTLP_ENDPOINT`.
        traces_url: full URL, for `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`.
        dropped: spans past `SPANS_LIMIT`.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._spans: list[Received] = []
        self._news = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.traces_url = self.url + "/v1/traces"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def environ(self) -> dict[str, str]:
        """Environment of a process that is to send its spans here, soon after they end."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": self.traces_url,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def spans(self, name: str | None = None) -> list[Received]:
        """The spans received so far, in the order of their arrival."""
        with self._news:
            return [span for span in self._spans if name in {None, span.name}]

    def wait(self, enough: Callable[[list[Received]], bool], timeout: float = 30) -> list[Received]:
        """The spans received, as soon as there are enough.

        Raises:
            TimeoutError: not within `timeout` seconds; says which spans came.
        """
        deadline = time.monotonic() + timeout
        with self._news:
            while not enough(self._spans):
                if not self._news.wait(deadline - time.monotonic()):
                    names = sorted({span.name for span in self._spans})
                    msg = (
                        f"OTLP receiver: found {len(self._spans)} spans {names} after {timeout} s, wanted more"
                    )
                    raise TimeoutError(msg)
            return list(self._spans)

    def add(self, request: ExportTraceServiceRequest) -> None:
        """Keep a request's spans."""
        received = [
            _read(span, scope.scope.name, _attributes(resource.resource.attributes))
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._news:
            room = SPANS_LIMIT - len(self._spans)
            self._spans += received[:room]
            self.dropped += len(received[room:])
            self._news.notify_all()


def _handler(receiver: OtlpReceiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if self.path != "/v1/traces" or not 0 < length <= BODY_LIMIT:
                self.close_connection = True
                self._answer(404 if self.path != "/v1/traces" else 413)
                return
            body = self.rfile.read(length)
            try:
                if self.headers.get("Content-Encoding") == "gzip":
                    with gzip.open(io.BytesIO(body)) as unzipped:
                        body = unzipped.read(BODY_LIMIT)
                request = ExportTraceServiceRequest.FromString(body)
            except (OSError, EOFError, DecodeError):
                self._answer(400)
                return
            receiver.add(request)
            self._answer(200, ExportTraceServiceResponse().SerializeToString())

        def _answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
            pass

    return Handler


def _read(span: Span, scope: str, resource: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        kind=KINDS[span.kind],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        trace_state=span.trace_state,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=STATUSES[span.status.code],
        attributes=_attributes(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        scope=scope,
        resource=resource,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)
