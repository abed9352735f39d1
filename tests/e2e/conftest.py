"""Real vLLM servers for the tests: those of the environment whose Python runs pytest.

One fleet a module, since starting servers is what costs; it is stopped and looked over at the end.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from servers import LOGS, Bench

from shim.cli.fleet import Environment, Fleet
from shim.cli.router import client

if TYPE_CHECKING:
    from collections.abc import Iterator

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def environment() -> Environment:
    """The vLLM of the Python that runs pytest."""
    return Environment.of(Path(sys.executable))


@pytest.fixture(scope="module")
def bench(environment: Environment, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A fleet of this module's own, of which nothing may live on."""
    logs = LOGS / f"{environment.version}-{request.module.__name__}"
    with client() as http, Fleet(logs) as fleet:
        yield Bench(environment, fleet, http)
        servers = list(fleet.servers)
        fleet.stop()
        for server in servers:
            assert server.processes() == [], f"{server.spec.name} left processes behind"
