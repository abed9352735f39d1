"""What stands still: loads while nothing is scheduled, the engine itself, a prefill server at first contact."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from chaos import paused
from scenarios import REMOTE, elsewhere
from traffic import OUTPUT, Traffic, consumer, producer, settled, silent_peer, wanted

from shim.cli.router import KEY, body
from shim.telemetry.catalog import ENTRYPOINT, LOAD_WAIT_SECONDS, LOADS_STARTED, OLDEST_LOAD_START
from shim.verdict import Endpoint, Outcome, Reason

if TYPE_CHECKING:
    from shim.cli.fleet import Spec

WAITS = LOAD_WAIT_SECONDS.wire_name + "_count"
OLDEST = OLDEST_LOAD_START.wire_name
LEASE = 240


@pytest.fixture(scope="module")
def traffic(bench):
    """A pair of its own: its engine will be stopped; two API servers get its payloads in turn.

    A failed load fails its request. Decode has had no contact with prefill when the first test begins.
    """
    pair = bench.pair(patient(producer(bench)), replace(patient(consumer(bench)), api_servers=2))
    return Traffic(pair, plain=pair.prefill.url)


def patient(spec: Spec) -> Spec:
    """With a lease that outlives every pause here, however busy the machine is."""
    config = dict(spec.kv_transfer_config or {})
    extra = config["kv_connector_extra_config"] | {"kv_lease_duration": LEASE}
    return replace(
        spec,
        kv_transfer_config=config | {"kv_connector_extra_config": extra, "kv_load_failure_policy": "fail"},
    )


def in_flight(traffic: Traffic) -> float:
    """Loads in flight, from counters alone."""
    scrape = traffic.pair.metrics()
    return scrape.total(LOADS_STARTED.wire_name) - scrape.total(WAITS)


def settled_at(traffic: Traffic, count: int) -> None:
    """Wait until as many loads are in flight as there should be."""
    deadline = time.monotonic() + 20
    while in_flight(traffic) != count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert in_flight(traffic) == count


def engine_of(traffic: Traffic) -> int:
    """The process id of decode's EngineCore."""
    for pid in traffic.pair.decode.processes():
        if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    msg = "found no EngineCore among decode's processes"
    raise AssertionError(msg)


def test_a_router_may_send_a_hand_off_again_after_a_load_that_failed(traffic) -> None:
    """Prefill stands still at decode's first contact: one 500 with one verdict; going on, it is pulled from."""
    before = traffic.pair.metrics()
    prompt = traffic.prompt()
    handoff = traffic.handoff(Endpoint.COMPLETIONS, prompt)
    ask = body(Endpoint.COMPLETIONS, prompt, OUTPUT) | {KEY: handoff}
    with paused(traffic.pair.prefill):
        assert traffic.decode(Endpoint.COMPLETIONS, ask).status == httpx.codes.INTERNAL_SERVER_ERROR
    failed = (1, Outcome.FAILED, Reason.LOAD_FAILED)
    alone = settled(traffic.pair.metrics, before, lambda now: now.verdicts == wanted(failed))
    assert alone.verdicts == wanted(failed)
    reply = traffic.decode(Endpoint.COMPLETIONS, ask)
    assert reply.status == httpx.codes.OK, reply.text[:300]
    assert reply.output == traffic.right(Endpoint.COMPLETIONS, ask)
    both = wanted(failed, (1, *REMOTE))
    gained = settled(traffic.pair.metrics, before, lambda now: now.verdicts == both)
    assert gained.verdicts == both
    assert gained.of(ENTRYPOINT.wire_name, event="rejected_before_engine") == 1


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
        assert waiting.result().status == httpx.codes.INTERNAL_SERVER_ERROR
    settled_at(traffic, 0)
