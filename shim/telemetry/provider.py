"""Owns where spans go: to vLLM's tracer provider, else to one the shim installs, at most one a process.

vLLM sets its provider up before EngineCore takes a request, but only for `--otlp-traces-endpoint` or
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` (vllm/v1/engine/core.py, vllm/tracing/otel.py, 0.28.0 and 0.32.0). So the
shim looks when there is a first span, and only then, if an OTLP endpoint is set, installs its own. That takes
up to 150 ms (`requests` and gRPC are imported), so a thread does it while early spans are held.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections import deque
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Final, TypeVar

from opentelemetry import trace

from shim import __version__
from shim.telemetry.faults import FAULTS, described

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SCOPE: Final = "vllm.kv_shim"
"""The spans' instrumentation scope."""

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
DEFAULT_PROTOCOL: Final = "grpc"
"""As in vLLM and in OpenTelemetry for Python, so that one environment means the same to all of them."""

LOOK_SECONDS: Final = 1.0
"""How long a look that found no provider is believed."""

HELD_LIMIT: Final = 256
"""Spans kept while a provider is being installed; the oldest are dropped."""

SHUTDOWN_SECONDS: Final = 2.0
"""How long the process's exit waits for the last spans; a dead collector would hold it up for 10 s or more."""

Event = TypeVar("Event")
_installing = threading.Lock()
logger = logging.getLogger("vllm.kv_shim")


class Tracers:
    """Hands events to whoever turns them into spans, once a tracer is known; never blocks the caller.

    Args:
        provider: use this one and look for no other (tests, offline use).
    """

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer = None if provider is None else _tracer_of(provider)
        self._looked_at = float("-inf")
        self._tried = False
        self._lock = threading.Lock()
        self._held: deque[tuple[Callable[[trace.Tracer, Any], None], Any]] | None = None

    def send(self, make: Callable[[trace.Tracer, Event], None], event: Event, at: float) -> None:
        """Make the spans of an event, now, or as soon as a provider is installed; drop it if nobody records.

        Args:
            make: makes them; called on this thread, or for held events on the installing one.
            event: what happened.
            at: when, in Unix seconds; saves reading a clock.
        """
        tracer = self._tracer or self._look(at)
        if tracer is None:
            if self._held is None:
                return
            with self._lock:
                if self._held is not None:
                    self._held.append((make, event))
                    return
            tracer = self._tracer
        if tracer is not None:
            make(tracer, event)

    def _look(self, at: float) -> trace.Tracer | None:
        if self._looked_at <= at < self._looked_at + LOOK_SECONDS:
            return None
        self._looked_at = at
        provider = trace.get_tracer_provider()
        if not isinstance(provider, trace.ProxyTracerProvider):
            self._tracer = _tracer_of(provider)
        elif not self._tried and wants_export(os.environ):
            self._tried = True
            self._held = deque(maxlen=HELD_LIMIT)
            leaving, closed = _at_exit()
            threading.Thread(
                target=self._install, args=(leaving, closed), name="kv_shim_spans", daemon=True
            ).start()
        return self._tracer

    def _install(self, leaving: threading.Event, closed: threading.Event) -> None:
        """Find or install the provider, make the held spans, and close what was installed at exit."""
        tracer = shutdown = None
        try:
            provider, shutdown = install(os.environ)
            tracer = _tracer_of(provider)
        except Exception as error:  # noqa: BLE001  # whatever an exporter raises, requests go on without spans
            logger.warning(
                "kv_shim: no spans: found %s set and %s=%s, of which no OTLP exporter could be made (%s); "
                "correct them, or set OTEL_TRACES_EXPORTER=none to do without",
                _first(ENDPOINTS, os.environ)[0],
                *_first(PROTOCOLS, os.environ, DEFAULT_PROTOCOL),
                described(error),
            )
        with self._lock:
            held, self._held = self._held or (), None
            self._tracer = tracer = self._tracer or tracer
        if tracer is not None:
            for make, event in held:
                try:
                    make(tracer, event)
                except Exception as error:  # noqa: BLE001  # one span less
                    FAULTS.say("a held span", error)
        if shutdown is not None:
            # This thread lives on to close the provider: at exit none can be started any more (Python 3.12).
            leaving.wait()
            shutdown()
        closed.set()


def wants_export(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for spans over OTLP, by OpenTelemetry's own variables."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    return any(environ.get(name, "").strip() for name in ENDPOINTS)


def install(environ: Mapping[str, str]) -> tuple[trace.TracerProvider, Callable[[], None] | None]:
    """The process's tracer provider; if it has none, a new one that exports over OTLP in the background.

    Endpoint, headers, timeout, sampler and `service.name` come from OpenTelemetry's environment variables.

    Returns:
        The provider, and what shuts it down if it is the shim's, else None.

    Raises:
        ValueError: an unknown protocol; or what the exporter raises.
    """
    with _installing:
        current = trace.get_tracer_provider()
        if not isinstance(current, trace.ProxyTracerProvider):
            return current, None
        # Heavy, and needed only here.
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        exporter = _exporter(_first(PROTOCOLS, environ, DEFAULT_PROTOCOL)[1])
        # The same keys as vLLM's own provider has in this process (vllm/tracing/otel.py).
        resource = Resource.create(
            {
                "vllm.instrumenting_module_name": SCOPE,
                "vllm.process_kind": "engine_core",
                "vllm.process_name": multiprocessing.current_process().name,
                "vllm.process_id": str(os.getpid()),
            }
        )
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        if trace.get_tracer_provider() is not provider:  # somebody else was faster
            provider.shutdown()
            return trace.get_tracer_provider(), None
        return provider, provider.shutdown


def _exporter(protocol: str) -> Any:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415  # heavy
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415  # heavy
            OTLPSpanExporter as HttpExporter,
        )

        return HttpExporter()
    msg = f"protocol {protocol!r}, wanted grpc or http/protobuf"
    raise ValueError(msg)


def _at_exit() -> tuple[threading.Event, threading.Event]:
    """Let the process's exit wait a little for the last spans.

    Not `atexit`: vLLM forks EngineCore, and Python 3.11 ends a forked process without it, but with these.

    Returns:
        What is set when the process begins to end, and what is to be set when nothing is left to wait for.
    """
    owner = os.getpid()
    leaving, closed = threading.Event(), threading.Event()

    def leave() -> None:
        if os.getpid() == owner:
            leaving.set()
            closed.wait(SHUTDOWN_SECONDS)

    Finalize(None, leave, exitpriority=0)
    return leaving, closed


def _tracer_of(provider: trace.TracerProvider) -> trace.Tracer:
    return provider.get_tracer(SCOPE, __version__)


def _first(names: tuple[str, ...], environ: Mapping[str, str], default: str = "") -> tuple[str, str]:
    """The first of these variables that is set, and its value; else the first and `default`."""
    for name in names:
        if value := environ.get(name, "").strip():
            return name, value
    return names[0], default
