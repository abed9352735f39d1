"""What clients and dying peers may send at a live pair: the engine lives, and the answers are right."""

from __future__ import annotations

import json
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import zmq
from chaos import Chaos, idle, kill, paused
from scenarios import elsewhere, local
from servers import ERRORS, REQUESTS
from traffic import (
    BYPASS,
    OUTPUT,
    Gained,
    Traffic,
    consumer,
    dead_port,
    producer,
    settled,
    silent_peer,
    wanted,
)

from shim.cli.router import KEY, body
from shim.verdict import Endpoint, Outcome, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from traffic import Reply

PEERS = "vllm:kv_shim_peers"
TRANSITIONS = "vllm:kv_shim_peer_transitions_total"
ENTRYPOINT = "vllm:kv_shim_entrypoint_total"
COMPLETIONS = Endpoint.COMPLETIONS

LONG = 1500
"""Tokens; so that a prefill takes long beside what a request costs otherwise."""
TURNS = 3
SLOWEST = 1.5
LOAD_TIMEOUT = 1.5
HANDSHAKE_SECONDS = 5.0
"""After which NIXL gives up on a peer that does not answer (nixl/base_worker.py)."""
CLOSES_WITHIN = 40.0

Params = dict[str, Any]


def without(name: str) -> Callable[[Params], Params]:
    """A good hand-off that lacks a key."""
    return lambda handoff: {key: value for key, value in handoff.items() if key != name}


def changed(**changes: Any) -> Callable[[Params], Params]:
    """A good hand-off with other values."""
    return lambda handoff: handoff | changes


MALFORMED: dict[str, Callable[[Params], Params]] = {
    "flag alone": lambda _: {"do_remote_prefill": True},
    "flag is a string": lambda _: {"do_remote_prefill": "yes"},
    "no host": without("remote_host"),
    "block ids are null": changed(remote_block_ids=None),
    "block ids are flat": changed(remote_block_ids=[1, 2]),
    "host is null": changed(remote_host=None),
    "port is a string": changed(remote_port="abc"),
    "a million ranks": changed(tp_size=1_000_000),
}
"""With these a plain vLLM 0.32.0 dies, hangs, or answers 500."""


@pytest.fixture(scope="module")
def side_channel() -> int:
    """Prefill's handshake port, which it keeps over a restart."""
    return dead_port()


@pytest.fixture(scope="module")
def pair(bench, side_channel):
    """The pair, and on 0.32.0 a decode server that refuses."""
    specs = [producer(bench, env=at(side_channel)), consumer(bench)]
    if not bench.has_bug:
        specs.append(consumer(bench, "strict", {"on_local_prefill": "refuse", "load_timeout": LOAD_TIMEOUT}))
    return bench.pair(*specs)


def at(port: int) -> dict[str, str]:
    """The environment of a prefill server whose handshakes come in here."""
    return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}


@pytest.fixture(scope="module")
def traffic(pair):
    """What is right is what prefill says when it is asked for no hand-off: it computes the whole prompt."""
    return Traffic(pair, plain=pair.prefill.url)


@pytest.fixture(scope="module")
def good(traffic):
    """A hand-off to be broken; what is refused is never claimed, so it does for all."""
    return traffic.handoff(COMPLETIONS, traffic.prompt(LONG))


@pytest.fixture
def gained(traffic):
    """Waits until decode has counted what it should have, and gives it."""
    before = traffic.pair.metrics()
    return lambda verdicts: settled(traffic.pair.metrics, before, lambda now: now.verdicts == verdicts)


def as_fast_as_plain(traffic: Traffic, ask: Callable[[], Reply], record: Callable[[str, object], None]) -> None:
    """The issue's bound, by medians of requests in turns with plain local prefills.

    Those go to the same server, marked as local: beside one of NIXL's threads, which always spins, two servers
    do not share two cores evenly. Measured again if the machine was busy with something else.
    """
    for _ in range(3):
        ours, plain = [], []
        for _ in range(TURNS):
            ours.append(ask().seconds)
            marked = body(COMPLETIONS, traffic.prompt(LONG), OUTPUT)
            plain.append(traffic.decode(COMPLETIONS, marked, {BYPASS: "1"}).seconds)
        ratio = statistics.median(ours) / statistics.median(plain)
        record("seconds", f"{statistics.median(ours):.3f}, {ratio:.2f} times a plain local prefill's")
        if ratio <= SLOWEST:
            return
    assert ratio <= SLOWEST


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_hand_off_costs_a_local_prefill_and_no_more(
    traffic, good, gained, record_property, case
) -> None:
    """200, a local prefill's tokens, in at most one and a half times its seconds; the server stays up."""

    def ask() -> Reply:
        prompt = traffic.prompt(LONG)
        reply = traffic.decode(COMPLETIONS, {**body(COMPLETIONS, prompt, OUTPUT), KEY: MALFORMED[case](good)})
        asked.append((prompt, reply))
        return reply

    asked: list[tuple[Any, Reply]] = []
    as_fast_as_plain(traffic, ask, record_property)
    prompt, _ = asked[0]
    assert [reply.status for _, reply in asked] == [httpx.codes.OK] * len(asked)
    assert asked[0][1].output == traffic.right(COMPLETIONS, body(COMPLETIONS, prompt, OUTPUT))
    verdicts = wanted(
        local(len(asked), Reason.PARAMS_INVALID), (len(asked), Outcome.LOCAL_INTENDED, Reason.ROUTER_BYPASS)
    )
    assert gained(verdicts).verdicts == verdicts
    assert traffic.pair.router.client.get(f"{traffic.pair.decode.url}/health").status_code == httpx.codes.OK


def test_a_dead_port_is_waited_for_until_its_breaker_opens(traffic, gained, record_property) -> None:
    """First the user's policy rules (`recompute`); then a local prefill at once."""
    port = dead_port()

    def ask() -> Reply:
        prompt = traffic.prompt(LONG)
        params = elsewhere(traffic.handoff(COMPLETIONS, prompt), port, f"dead-{port}")
        return traffic.check(COMPLETIONS, prompt, params)

    before = traffic.pair.metrics()
    replies = traffic.at_once(ask, ask, ask)
    assert all(reply.seconds >= HANDSHAKE_SECONDS - 1 for reply in replies)
    counts = gained(wanted(local(3, Reason.LOAD_FAILED)))
    assert counts.verdicts == wanted(local(3, Reason.LOAD_FAILED))
    assert counts.after.total(PEERS, state="open") == before.total(PEERS, state="open") + 1
    as_fast_as_plain(traffic, ask, record_property)
    unavailable = (Outcome.LOCAL_PREFILL.value, Reason.PEER_UNAVAILABLE.value)
    now = settled(traffic.pair.metrics, counts.after, lambda now: now.verdicts[unavailable] >= TURNS - 1)
    # One of them may be the trial that comes with the end of the back-off.
    assert now.verdicts[unavailable] >= TURNS - 1


def test_a_breaker_closes_when_its_peer_answers_again(traffic, side_channel) -> None:
    """Prefill stands still before decode's first handshake with it, then goes on; junk does no harm."""
    _send_junk(side_channel)
    before = traffic.pair.metrics()
    prompts = [traffic.prompt() for _ in range(3)]
    handoffs = [traffic.handoff(COMPLETIONS, prompt) for prompt in prompts]
    asks = [
        {**body(COMPLETIONS, prompt, OUTPUT), KEY: handoff}
        for prompt, handoff in zip(prompts, handoffs, strict=True)
    ]
    with paused(traffic.pair.prefill):
        replies = traffic.at_once(*[partial(traffic.decode, COMPLETIONS, ask) for ask in asks])
        opened = settled(
            traffic.pair.metrics, before, lambda now: now.by(TRANSITIONS, "to") == {("open",): 1.0}
        )
    assert [reply.output for reply in replies] == [traffic.right(COMPLETIONS, ask) for ask in asks]
    assert opened.by(TRANSITIONS, "to") == {("open",): 1.0}
    assert opened.verdicts == wanted(local(3, Reason.LOAD_FAILED))
    deadline = time.monotonic() + CLOSES_WITHIN
    while not opened_again(traffic, opened.after) and time.monotonic() < deadline:
        time.sleep(1)
    closed = settled(traffic.pair.metrics, before, lambda now: ("closed",) in now.by(TRANSITIONS, "to"))
    assert closed.by(TRANSITIONS, "to") == {("open",): 1.0, ("half_open",): 1.0, ("closed",): 1.0}


def opened_again(traffic: Traffic, before: Any) -> bool:
    """Whether a fresh hand-off was pulled."""
    prompt = traffic.prompt()
    traffic.check(COMPLETIONS, prompt, traffic.handoff(COMPLETIONS, prompt))
    return traffic.pair.metrics().total(REQUESTS, outcome="remote") > before.total(REQUESTS, outcome="remote")


def _send_junk(port: int) -> None:
    """What is no handshake, to the port where prefill waits for them."""
    with zmq.Context() as context:
        for message in (b"junk", b"\xff" * 1000, b""):
            with context.socket(zmq.DEALER) as channel:
                channel.setsockopt(zmq.LINGER, 500)
                channel.connect(f"tcp://127.0.0.1:{port}")
                channel.send_multipart([b"", message])
                channel.poll(200)


@pytest.fixture
def strict(traffic, bench):
    """The decode server that may refuse."""
    if bench.has_bug:
        pytest.skip("a fourth server costs its start; the policy has no code of its own for a version")
    return traffic.pair.others[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (..., Reason.PARAMS_MISSING),
        ({}, Reason.PARAMS_EMPTY),
        ({"do_remote_prefill": 7}, Reason.PARAMS_INVALID),
    ],
)
def test_a_decode_server_that_may_refuse_says_why(traffic, strict, params, reason, stream) -> None:
    """503 with the reason and `Retry-After`, before the engine is asked, also where a stream had begun."""
    before = traffic.pair.metrics(strict)
    ask = {**body(COMPLETIONS, traffic.prompt(), OUTPUT), "stream": stream}
    reply = traffic.post(strict.url, COMPLETIONS, ask if params is ... else {**ask, KEY: params})
    assert reply.status == httpx.codes.SERVICE_UNAVAILABLE, reply.text[:300]
    assert reply.headers["retry-after"] == "1"
    assert json.loads(reply.text)["error"]["reason"] == reason.value
    gained = Gained(before, traffic.pair.metrics(strict))
    assert gained.of(ENTRYPOINT, event="refused") == 1
    assert gained.verdicts == {}


def test_a_request_kept_local_on_purpose_is_never_refused(traffic, strict) -> None:
    """By the router's trusted mark."""
    ask = body(COMPLETIONS, traffic.prompt(), OUTPUT)
    reply = traffic.post(strict.url, COMPLETIONS, ask, {BYPASS: "1"})
    assert reply.status == httpx.codes.OK
    assert reply.output == traffic.right(COMPLETIONS, ask)


def test_a_load_that_takes_too_long_is_given_up_and_prefilled(traffic, strict) -> None:
    """One answer, and a right one; the aborted try and the second one are both counted."""
    before = traffic.pair.metrics(strict)
    with silent_peer() as port:
        prompt = traffic.prompt()
        params = elsewhere(traffic.handoff(COMPLETIONS, prompt), port, f"silent-{port}")
        ask = body(COMPLETIONS, prompt, OUTPUT)
        reply = traffic.post(strict.url, COMPLETIONS, {**ask, KEY: params})
    assert reply.status == httpx.codes.OK, reply.text[:300]
    assert reply.output == traffic.right(COMPLETIONS, ask)
    assert LOAD_TIMEOUT <= reply.seconds < HANDSHAKE_SECONDS
    verdicts = wanted((1, Outcome.ABORTED, Reason.LOAD_TIMEOUT), local(1, Reason.LOAD_TIMEOUT))
    now = settled(lambda: traffic.pair.metrics(strict), before, lambda now: now.verdicts == verdicts)
    assert now.verdicts == verdicts
    assert now.of(ENTRYPOINT, event="load_timeout") == 1


def test_chaos_ends_with_right_answers_and_free_blocks(bench, traffic, side_channel, record_property) -> None:
    """Prefill dies and comes back as another on its old port; clients leave; a peer never answers."""
    before = traffic.pair.metrics()
    chaos = Chaos(traffic)
    chaos.run(prefill=traffic.pair.prefill.url)
    chaos.stock()  # hand-offs of a prefill server that will be gone
    kill(traffic.pair.prefill)
    again = chaos.during(lambda: bench.fleet.start(producer(bench, "prefill-again", env=at(side_channel)))[0])
    chaos.run(prefill=again.url)
    chaos.judge(plain=again.url)
    record_property("chaos", json.dumps(chaos.told, sort_keys=True))
    assert chaos.wrong == []
    assert chaos.told["pulled after the restart"] > 0
    assert idle(traffic, traffic.pair.decode), "decode holds blocks that no request uses"
    assert idle(traffic, again), "prefill holds blocks that nobody will read"
    gained = Gained(before, traffic.pair.metrics())
    assert gained.of(TRANSITIONS, to="open") > 0
    assert gained.of(ERRORS) == 0
