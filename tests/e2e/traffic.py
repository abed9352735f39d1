"""Requests to a live pair, one by one, with what decode and prefill counted for them."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from servers import REQUESTS, Bench, Pair, shim

from shim.cli.metrics import BY_SOURCE
from shim.cli.router import ASK_PREFILL, KEY, Exchange, Prompt, body
from shim.verdict import Endpoint, Outcome, TokenKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shim.cli.fleet import Spec
    from shim.cli.metrics import Scrape
    from shim.verdict import Reason

TOKENS = "vllm:kv_shim_prompt_tokens_total"
CLOSED = "vllm:kv_shim_handoffs_closed_total"
SUCCESS = "vllm:request_success_total"
USAGE = "vllm:kv_cache_usage_perc"

LEASE = 12
"""Seconds that prefill keeps blocks for a reader; short, so that a test can outwait it."""
SKEW = 0.5
BYPASS = "x-kept-local"
"""The trusted header by which a router says that it kept a request local on purpose."""
OUTPUT = 12
LENGTH = 400
SETTLE_SECONDS = 10.0

# vLLM compiles a function for logprobs at its first use (v1/sample/ops/logprobs.py); that takes a minute here.
EAGER = {"TORCHDYNAMO_DISABLE": "1"}

Verdicts = Counter[tuple[str, str]]


def producer(bench: Bench, name: str = "prefill", env: Mapping[str, str] | None = None) -> Spec:
    """A prefill server with a short lease."""
    config = configured("kv_producer", {"kv_lease_duration": LEASE}, expect_remote="never")
    return bench.spec(name, kv_transfer_config=config, prefix_caching=True, env={**EAGER, **(env or {})})


def consumer(
    bench: Bench,
    name: str = "decode",
    settings: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> Spec:
    """A decode server on which missing params are a fault, and a failed load is computed again."""
    ours = {
        "expect_remote": "always",
        "clock_skew": SKEW,
        "trusted_router_marks": [f"header:{BYPASS}=local"],
        **(settings or {}),
    }
    config = configured("kv_consumer", {"kv_lease_duration": LEASE}, **ours)
    return bench.spec(name, kv_transfer_config=config, prefix_caching=True, env={**EAGER, **(env or {})})


def configured(role: str, extra: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """The shim's config with further keys for NIXL beside its own."""
    config = shim(role, **settings)
    config["kv_connector_extra_config"] |= extra
    return config | {"kv_load_failure_policy": "recompute"}


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of a server's."""

    status: int
    output: tuple[int, ...] | str
    seconds: float
    text: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False, default_factory=dict)


@dataclass(slots=True)
class Traffic:
    """Sends requests to a pair; what is asked twice is asked with the same bytes.

    Attributes:
        asked: hand-offs that prefill was asked for.
        plain: URL of the server whose answers are right; it gets no params.
        early: a hand-off from before all other traffic, and when it was issued.
    """

    pair: Pair
    plain: str
    asked: int = 0
    source: random.Random = field(default_factory=lambda: random.Random(11))
    early: tuple[Prompt, dict[str, Any], float] = field(init=False)

    def __post_init__(self) -> None:
        prompt = self.prompt()
        self.early = (prompt, self.handoff(Endpoint.COMPLETIONS, prompt), time.monotonic())

    def prompt(self, length: int = LENGTH) -> Prompt:
        """One that was not sent yet."""
        return Prompt.random(length, self.source)

    def handoff(self, endpoint: Endpoint, prompt: Prompt, **changes: Any) -> dict[str, Any]:
        """A real hand-off for this prompt, asked for with these changes of the body."""
        ask = body(endpoint, prompt, 1) | {KEY: dict(ASK_PREFILL)} | changes
        (reply,), _ = self.pair.router.post(self.pair.prefill.url, endpoint, ask)
        self.asked += 1
        found = reply[KEY]
        assert isinstance(found, dict)
        assert found["do_remote_prefill"] is True
        return found

    def post(
        self,
        url: str,
        endpoint: Endpoint,
        ask: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> Reply:
        """One request, whatever its answer's status."""
        began = time.perf_counter()
        response = self.pair.router.client.post(
            url + endpoint.value, json=ask, headers=headers, timeout=timeout
        )
        seconds = time.perf_counter() - began
        output: tuple[int, ...] | str = ()
        if response.status_code == httpx.codes.OK and not ask.get("stream"):
            output = Exchange(endpoint, None, 0.0, 0.0, (response.json(),)).output
        return Reply(response.status_code, output, seconds, response.text, response.headers)

    def decode(
        self,
        endpoint: Endpoint,
        ask: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> Reply:
        """One request to decode, as it is."""
        return self.post(self.pair.decode.url, endpoint, ask, headers, timeout)

    def right(self, endpoint: Endpoint, ask: Mapping[str, Any]) -> tuple[int, ...] | str:
        """What a local prefill says to the same request without params."""
        reply = self.post(self.plain, endpoint, {name: value for name, value in ask.items() if name != KEY})
        assert reply.status == httpx.codes.OK, reply.text[:300]
        assert reply.output
        return reply.output

    def check(
        self,
        endpoint: Endpoint,
        prompt: Prompt,
        params: object = ...,
        /,
        *,
        headers: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> Reply:
        """Send a request to decode and see that it says what a local prefill says.

        Args:
            endpoint: the route.
            prompt: what is asked.
            params: the value of the params key; `...` = the key is absent.
            headers: sent along.
            changes: of the body.
        """
        ask = {**body(endpoint, prompt, OUTPUT), **changes}
        if params is not ...:
            ask[KEY] = params
        reply = self.decode(endpoint, ask, headers)
        assert reply.status == httpx.codes.OK, reply.text[:300]
        assert reply.output == self.right(endpoint, ask)
        return reply

    def at_once(self, *calls: Callable[[], Any]) -> list[Any]:
        """All of these at the same time; their results in order."""
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]


@dataclass(frozen=True, slots=True)
class Gained:
    """What a server counted between two scrapes."""

    before: Scrape
    after: Scrape

    def of(self, name: str, **labels: str) -> float:
        """The growth of a counter."""
        return self.after.total(name, **labels) - self.before.total(name, **labels)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The growth by these labels' values, of those that grew."""
        before = self.before.by(name, *labels)
        grown = {key: value - before.get(key, 0) for key, value in self.after.by(name, *labels).items()}
        return {key: value for key, value in grown.items() if value}

    @property
    def verdicts(self) -> Verdicts:
        """Requests by outcome and reason."""
        return Counter({key: int(value) for key, value in self.by(REQUESTS, "outcome", "reason").items()})

    @property
    def successes(self) -> int:
        """Requests that came to their end, by vLLM's own count."""
        return int(self.of(SUCCESS))

    @property
    def local_tokens(self) -> int:
        """Prompt tokens computed here, by vLLM's own count."""
        return int(self.of(BY_SOURCE, source="local_compute"))

    @property
    def explained_tokens(self) -> int:
        """The same by the shim's: a whole load's last token is computed, and vLLM does not book it."""
        kinds = (TokenKind.FAULT, TokenKind.INTENDED, TokenKind.TAIL)
        whole = self.of(REQUESTS, outcome=Outcome.REMOTE.value)
        return int(sum(self.of(TOKENS, kind=kind.value) for kind in kinds) - whole)


def settled(
    read: Callable[[], Scrape],
    before: Scrape,
    holds: Callable[[Gained], bool],
    within: float = SETTLE_SECONDS,
) -> Gained:
    """What was counted since, once it holds; else what there is after a while, for the assertion to show.

    vLLM counts after it has handed the output to whoever waits for it, so a reply may come first.
    """
    deadline = time.monotonic() + within
    while True:
        gained = Gained(before, read())
        if holds(gained) or time.monotonic() > deadline:
            return gained
        time.sleep(0.03)


def wanted(*counts: tuple[int, Outcome, Reason]) -> Verdicts:
    """Requests by outcome and reason, as they should be."""
    return Counter({(outcome.value, reason.value): count for count, outcome, reason in counts})


@contextmanager
def silent_peer() -> Iterator[int]:
    """A port on loopback that takes connections and never says a word."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:

        def accept() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for connection in held:
                connection.close()


def dead_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def leave(traffic: Traffic, endpoint: Endpoint, ask: Mapping[str, Any], after: float) -> None:
    """A client that sends a request to decode and goes away before its answer."""
    try:
        reply = traffic.decode(endpoint, ask, timeout=after)
    except httpx.TimeoutException:
        return
    msg = f"found an answer ({reply.status}) within {after} s, wanted the load to take longer"
    raise AssertionError(msg)
