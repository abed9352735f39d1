"""In flight and oldest, while nothing is scheduled and while the engine stands still."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from scenarios import elsewhere
from traffic import OUTPUT, Traffic, consumer, producer, silent_peer

from shim.cli.router import KEY, body
from shim.telemetry.catalog import LOAD_WAIT_SECONDS, LOADS_STARTED, OLDEST_LOAD_START
from shim.verdict import Endpoint

WAITS = LOAD_WAIT_SECONDS.wire_name + "_count"
OLDEST = OLDEST_LOAD_START.wire_name


@pytest.fixture(scope="module")
def traffic(bench):
    """A pair of its own: its engine will be stopped; two API servers get its payloads in turn."""
    pair = bench.pair(producer(bench), replace(consumer(bench), api_servers=2))
    return Traffic(pair, plain=pair.prefill.url)


def in_flight(traffic: Traffic) -> float:
    """Loads in flight, from counters alone."""
    scrape = traffic.pair.metrics()
    return scrape.total(LOADS_STARTED.wire_name) - scrape.total(WAITS)


def settled_at(traffic: Traffic, wanted: int) -> None:
    """Wait until as many loads are in flight as there should be."""
    deadline = time.monotonic() + 20
    while in_flight(traffic) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert in_flight(traffic) == wanted


def engine_of(traffic: Traffic) -> int:
    """The process id of decode's EngineCore."""
    for pid in traffic.pair.decode.processes():
        if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    msg = "found no EngineCore among decode's processes"
    raise AssertionError(msg)


def test_a_waiting_load_ages_also_in_a_stopped_engine(traffic) -> None:
    """A peer never answers: one load in flight, its start is known and stays, whatever the engine does."""
    prompt = traffic.prompt()
    traffic.check(Endpoint.COMPLETIONS, prompt, traffic.handoff(Endpoint.COMPLETIONS, prompt))
    settled_at(traffic, 0)
    with silent_peer() as port, ThreadPoolExecutor(1) as pool:
        prompt = traffic.prompt()
        handoff = elsewhere(traffic.handoff(Endpoint.COMPLETIONS, prompt), port, f"silent-{port}")
        ask = body(Endpoint.COMPLETIONS, prompt, OUTPUT) | {KEY: handoff}
        began = time.time()
        waiting = pool.submit(traffic.decode, Endpoint.COMPLETIONS, ask)
        settled_at(traffic, 1)
        start = traffic.pair.metrics().total(OLDEST)
        assert began - 1 <= start <= time.time()
        engine = engine_of(traffic)
        os.kill(engine, signal.SIGSTOP)
        try:
            time.sleep(1.5)
            assert in_flight(traffic) == 1
            assert traffic.pair.metrics().total(OLDEST) == start
            assert time.time() - start > 1.5
        finally:
            os.kill(engine, signal.SIGCONT)
        assert waiting.result().status == httpx.codes.OK
    settled_at(traffic, 0)
