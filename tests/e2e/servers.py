"""What the tests say about servers: their settings, a pair with a router, and what decode counted."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shim.cli import model
from shim.cli.fleet import Environment, Fleet, Spec, nixl
from shim.cli.metrics import Scrape, scrape
from shim.cli.router import Prompt, Router

if TYPE_CHECKING:
    import httpx

    from shim.cli.fleet import Server

ROOT = Path(__file__).parents[2]
MODELS = ROOT / ".models"
LOGS = ROOT / ".cache" / "e2e"

REQUESTS = "vllm:kv_shim_requests_total"
PARAMS = "vllm:kv_shim_params_total"
ERRORS = "vllm:kv_shim_errors_total"
DROPPED = "vllm:kv_shim_stats_dropped_total"
HANDOFFS = "vllm:kv_shim_handoffs_total"
INFO = "vllm:kv_shim_info"


@dataclass(frozen=True, slots=True)
class Bench:
    """What a module needs to start servers of its own kind."""

    environment: Environment
    fleet: Fleet
    http: httpx.Client

    @property
    def has_bug(self) -> bool:
        """Whether this vLLM drops the params on `/inference/v1/generate`."""
        return self.environment.release < (0, 29)

    def spec(self, name: str, size: str = "small", **changes) -> Spec:
        """A server with the model of this size, which is written on first use."""
        if not model.is_written(MODELS, size):
            command = [sys.executable, model.__file__, size, "--into", str(MODELS)]
            subprocess.run(command, check=True, capture_output=True)
        path = model.model_path(MODELS, size)
        return Spec(name=name, environment=self.environment, model=path, **changes)

    def pair(self, prefill: Spec, decode: Spec, *more: Spec) -> Pair:
        """Start all of these at once, and put a router between the first two."""
        servers = self.fleet.start(prefill, decode, *more)
        router = Router(servers[0].url, servers[1].url, self.http)
        # Seeded, so that a failure can be seen again; what counts is that prompts differ within a run.
        return Pair(servers[0], servers[1], tuple(servers[2:]), router, random.Random(3))


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode server, the router between them, and servers beside them."""

    prefill: Server
    decode: Server
    others: tuple[Server, ...]
    router: Router
    source: random.Random

    def prompt(self, length: int = 400) -> Prompt:
        """One that was not sent yet."""
        return Prompt.random(length, self.source)

    def metrics(self, server: Server | None = None) -> Scrape:
        """What decode's `/metrics` say, or another server's."""
        return scrape(self.router.client, (server or self.decode).url)


def shim(role: str = "kv_both", **settings) -> dict:
    """A `kv_transfer_config` that names the shim and is NIXL's otherwise."""
    return nixl(role, kv_connector="shim", kv_connector_extra_config={"shim": settings})
