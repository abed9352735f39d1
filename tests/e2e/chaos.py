"""Requests in disorder: clients that leave, peers that die or stand still, and what every answer must be."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from scenarios import ROUTES, elsewhere
from servers import REQUESTS
from traffic import LEASE, OUTPUT, USAGE, Traffic, silent_peer

from shim.cli.router import ASK_PREFILL, KEY, body
from shim.verdict import Endpoint, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shim.cli.fleet import Server
    from shim.cli.router import Prompt

T = TypeVar("T")

REQUEST_COUNT = int(os.environ.get("SHIM_CHAOS_REQUESTS", "60"))
"""In all; the issue's figure is 300."""
AT_ONCE = 4
STALE = 6
STEPS = Counter({"ordinary": 6, "leaves": 2, "leaves mid-load": 1, "peer never answers": 1})
"""What a request does, and how often."""
FREE_WITHIN = LEASE + 15.0


class Chaos:
    """Runs requests in three parts: before, while, and after prefill is gone.

    Attributes:
        wrong: answers that were neither right nor a clear error, in words; `judge` fills it.
        told: what became of the requests.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.wrong: list[str] = []
        self.told: Counter[str] = Counter()
        self._traffic = traffic
        self._answers: list[tuple[Endpoint, dict[str, Any], tuple[int, ...] | str]] = []
        self._source = random.Random(5)
        self._stale: list[tuple[Prompt, dict[str, Any]]] = []
        self._count = max(REQUEST_COUNT // 3, AT_ONCE)

    def run(self, prefill: str) -> None:
        """A third of the requests, by way of a prefill server that is up."""
        before = self._pulled()
        steps = self._source.choices(list(STEPS), weights=STEPS.values(), k=self._count)
        with silent_peer() as silent, ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda step: self._one(step, prefill, silent), steps))
        name = "pulled after the restart" if self._stale else "pulled before"
        self.told[name] += int(self._pulled() - before)

    def stock(self) -> None:
        """Hand-offs to be sent to decode when their prefill server is gone."""
        self._stale = [
            (prompt, self._traffic.handoff(Endpoint.COMPLETIONS, prompt)) for prompt in self._prompts()
        ]

    def during(self, restart: Callable[[], T]) -> T:
        """A third of the requests while `restart` runs: the router has no prefill, or stale hand-offs."""
        with ThreadPoolExecutor(1) as starter, ThreadPoolExecutor(AT_ONCE) as pool:
            started = starter.submit(restart)
            list(pool.map(lambda item: self._send(*item), self._stale))
            missing = self._count - len(self._stale)
            list(pool.map(lambda _: self._send(self._prompt(), None), range(missing)))
            return started.result()

    def judge(self, plain: str) -> None:
        """Compare the answers with a local prefill's on this server; afterwards, since prefill was gone."""
        self._traffic.plain = plain
        for route, ask, output in self._answers:
            right = output == self._traffic.right(route, ask)
            self.told["right"] += right
            if not right:
                self.wrong.append(f"{route.value}: other tokens than a local prefill's")

    def _prompts(self) -> list[Prompt]:
        return [self._prompt() for _ in range(STALE)]

    def _prompt(self) -> Prompt:
        return self._traffic.prompt(self._source.choice((40, 400, 1200)))

    def _pulled(self) -> float:
        return self._traffic.pair.metrics().total(REQUESTS, outcome=Outcome.REMOTE.value)

    def _one(self, step: str, prefill: str, silent: int) -> None:
        route = self._source.choice(ROUTES)
        prompt = self._prompt()
        ask = body(route, prompt, 1) | {KEY: dict(ASK_PREFILL)}
        (reply,), _ = self._traffic.pair.router.post(prefill, route, ask)
        handoff = reply[KEY]
        if step in {"peer never answers", "leaves mid-load"}:
            handoff = elsewhere(handoff, silent, f"silent-{silent}")
        if step.startswith("leaves"):
            wait = 0.5 if step == "leaves mid-load" else self._source.choice((0.005, 0.02, 0.05))
            with contextlib.suppress(httpx.TimeoutException):
                ask = {**body(route, prompt, OUTPUT), KEY: handoff}
                self._traffic.decode(route, ask, timeout=wait)
            self.told[step] += 1
            return
        self._send(prompt, handoff, route)

    def _send(
        self, prompt: Prompt, handoff: dict[str, Any] | None, route: Endpoint = Endpoint.COMPLETIONS
    ) -> None:
        """One request that waits for its answer."""
        ask = body(route, prompt, OUTPUT)
        try:
            reply = self._traffic.decode(route, {**ask, KEY: handoff} if handoff else ask)
        except httpx.HTTPError as error:
            self.wrong.append(f"{route.value}: no answer: {error!r}")
            return
        if reply.status != httpx.codes.OK:
            clear = reply.status >= httpx.codes.INTERNAL_SERVER_ERROR and '"error"' in reply.text
            self.told["a clear error"] += clear
            if not clear:
                self.wrong.append(f"{route.value}: {reply.status} {reply.text[:200]}")
        else:
            self._answers.append((route, ask, reply.output))


def kill(server: Server) -> None:
    """All of its processes, as the kernel would for want of memory."""
    for pid in server.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while server.processes() and time.monotonic() < deadline:
        time.sleep(0.05)


@contextmanager
def paused(server: Server) -> Iterator[None]:
    """A server that stands still: the kernel still takes connections for it."""
    pids = server.processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def idle(traffic: Traffic, server: Server) -> bool:
    """Whether all blocks of a server without requests are free, at the latest when leases have run out."""
    deadline = time.monotonic() + FREE_WITHIN
    while traffic.pair.metrics(server).total(USAGE) > 0:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True
