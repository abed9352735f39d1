"""Start real vLLM servers on this machine, wait until they answer, and leave none behind.

The settings are those under which a prefill/decode pair over NIXL runs on two CPU cores; each that
surprises says why. Every server listens on loopback only and lives in a session of its own, which
`keeper.py` ends with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from shim.cli import cores, keeper

HOST = "127.0.0.1"

START_SECONDS = 240.0
"""A pair is up in 35 s on two idle cores; a data-parallel one took 100 s."""

GRACE_SECONDS = 8.0

# Below Linux's range for outgoing connections, which could take a port before the server binds it.
_PORTS = range(20_000, 32_000)

# What a shell may have set for another vLLM would make these servers something else than they say.
_FOREIGN = re.compile(r"^(VLLM_|SHIM_|UCX_|NIXL_|OTEL_|PROMETHEUS_MULTIPROC_DIR$|OMP_NUM_THREADS$)")

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
}

_ARGUMENTS = (
    # Decisive. The CPU platform turns `uni` into `mp`, whose message queue spins on sched_yield against
    # NIXL's progress thread: a pull then takes 5 to 45 s at random. A class path is left alone.
    *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
    *("--dtype", "float32"),  # bfloat16 ends in SIGILL inside CPU attention on machines with AMX
    *("--block-size", "32"),  # CPU attention takes multiples of 32
    *("--max-model-len", "4096"),
    *("--max-num-seqs", "8"),
    "--enforce-eager",
)

_SCALE_OUT_SINCE = (0, 30)
"""From here on `/inference/v1/generate` answers 403 without `--enable-scale-out`."""

Progress = Callable[[str], None]
"""Told in one line, about once a second, what is being waited for."""


class FleetError(RuntimeError):
    """A server that could not be started, or that ended; the message ends with its log's tail."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python that has vLLM, and that vLLM's version."""

    python: Path
    version: str

    @classmethod
    def of(cls, python: Path) -> Environment:
        """Ask this Python which vLLM it has, without importing it.

        Raises:
            FleetError: there is no such Python, or it has no vLLM.
        """
        ask = (
            "import importlib.metadata as m; names = [d.metadata['Name'] for d in m.distributions()];"
            "print(next((m.version(n) for n in ('vllm', 'vllm-cpu') if n in names), ''))"
        )
        try:
            answer = subprocess.run(  # noqa: S603  # a path from the command line, no shell
                [str(python), "-c", ask], capture_output=True, text=True, check=True, timeout=60
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError) as error:
            msg = f"fleet: found no working Python at {python} ({error}), wanted one with vLLM; run `make env`"
            raise FleetError(msg) from error
        if not answer:
            msg = f"fleet: found no vLLM in {python}, wanted vllm or vllm-cpu; run `make env`"
            raise FleetError(msg)
        return cls(python, answer)

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = (int(part) for part in re.findall(r"\d+", self.version)[:2])
        return major, minor


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One server to start.

    Attributes:
        name: for messages and the log file's name.
        environment: whose vLLM to run.
        model: path of the model.
        kv_transfer_config: as vLLM's option takes it; None for a plain server.
        env: variables on top of the fleet's own.
        arguments: options on top of the fleet's own.
        api_servers: `--api-server-count`.
        prefix_caching: off for measurements, since a cached prompt is neither pulled nor computed.
    """

    name: str
    environment: Environment
    model: Path
    kv_transfer_config: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    api_servers: int = 1
    prefix_caching: bool = False

    def command(self, port: int) -> list[str]:
        """The server's command line."""
        python = str(self.environment.python)
        options = [*_ARGUMENTS, "--model", str(self.model), "--served-model-name", "tiny"]
        options += ["--host", HOST, "--port", str(port)]
        if self.environment.release >= _SCALE_OUT_SINCE:
            options.append("--enable-scale-out")
        options.append("--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching")
        if self.kv_transfer_config is not None:
            options += ["--kv-transfer-config", json.dumps(self.kv_transfer_config)]
        options += self.arguments
        if self.api_servers == 1:
            # The `vllm` command of vllm-cpu fails; see serve.py, which several API servers need.
            return [python, "-m", "vllm.entrypoints.openai.api_server", *options]
        serve = str(Path(__file__).with_name("serve.py"))
        return [python, serve, "serve", *options, "--api-server-count", str(self.api_servers)]

    def environ(self, side_channel_port: int) -> dict[str, str]:
        """The server's environment."""
        inherited = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
        ours = {**_ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port)}
        return {**inherited, **ours, **self.env}


def nixl(role: str = "kv_both", **changes: Any) -> dict[str, Any]:
    """A `kv_transfer_config` for NIXL between two servers on this machine."""
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu", **changes}


class Server:
    """One running vLLM server."""

    def __init__(self, spec: Spec, logs: Path) -> None:
        """Start it; `Fleet` waits until it answers.

        Args:
            spec: what to start.
            logs: an existing folder for its log file.
        """
        self.spec = spec
        self.port, side_channel = _free_ports(2)
        self.url = f"http://{HOST}:{self.port}"
        self.log = logs / f"{spec.name}.log"
        self._began = time.monotonic()
        command = [sys.executable, keeper.__file__, str(GRACE_SECONDS), *spec.command(self.port)]
        with self.log.open("wb") as log:
            self._keeper = subprocess.Popen(  # noqa: S603  # our own command line, no shell
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=spec.environ(side_channel),
                start_new_session=True,
            )

    @property
    def session(self) -> int:
        """The id of the session that holds all of its processes."""
        return self._keeper.pid

    def processes(self) -> list[int]:
        """Ids of its live processes: API servers, EngineCore and their helpers."""
        return keeper.processes_of(self.session)

    def ready(self, client: httpx.Client) -> bool:
        """Whether it answers `/health`.

        Raises:
            FleetError: it has ended.
        """
        code = self._keeper.poll()
        if code is not None:
            msg = (
                f"{self.spec.name}: vLLM {self.spec.environment.version} ended with code {code}, wanted a "
                f"running server; its log ({self.log}) ends:\n{self.tail()}"
            )
            raise FleetError(msg)
        try:
            return client.get(f"{self.url}/health", timeout=5).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def seconds(self) -> float:
        """Time since it was started."""
        return time.monotonic() - self._began

    def tail(self, lines: int = 25) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def ask_to_stop(self) -> None:
        """Let its keeper end it; returns at once."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()

    def stop(self) -> None:
        """End it and wait until none of its processes lives."""
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(GRACE_SECONDS * 2)
        if self._keeper.poll() is None:
            self._keeper.kill()
            self._keeper.wait()
        # Nothing is left unless the keeper itself was killed.
        keeper.kill_all(self.session)


class Fleet:
    """Servers that start together and stop together; a context manager."""

    def __init__(self, logs: Path, progress: Progress | None = None) -> None:
        """Make an empty fleet.

        Args:
            logs: folder for the servers' logs, made if need be.
            progress: told what is being waited for.
        """
        self._logs = logs
        self._progress = progress or (lambda _line: None)
        self.servers: list[Server] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *specs: Spec, within: float = START_SECONDS) -> list[Server]:
        """Start these servers at the same time and wait until all of them answer.

        Args:
            specs: what to start.
            within: seconds to wait.

        Raises:
            FleetError: one ended, or was not ready in time. The others are left to `stop`.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        started: list[Server] = []
        for spec in specs:
            started.append(Server(spec, self._logs))
            self.servers.append(started[-1])
        # Proxies are for the world outside; these servers are not.
        with httpx.Client(trust_env=False) as client:
            waiting = list(started)
            while waiting:
                waiting = [server for server in waiting if not server.ready(client)]
                if not waiting:
                    break
                names = " and ".join(server.spec.name for server in waiting)
                seconds = max(server.seconds() for server in waiting)
                if seconds > within:
                    slow = waiting[0]
                    msg = (
                        f"{names}: not ready after {within:.0f} s, wanted an answer from /health; "
                        f"the log ({slow.log}) ends:\n{slow.tail()}"
                    )
                    raise FleetError(msg)
                version = waiting[0].spec.environment.version
                self._progress(f"starting {names} (vLLM {version}): {seconds:.0f} s")
                time.sleep(1)
        cores.share([server.processes() for server in started])
        return started

    def stop(self) -> None:
        """End all servers; safe to call twice."""
        servers, self.servers = self.servers, []
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.stop()


@contextlib.contextmanager
def running(
    *specs: Spec, logs: Path, progress: Progress | None = None, within: float = START_SECONDS
) -> Iterator[list[Server]]:
    """These servers, up and answering, for the length of a `with` block."""
    with Fleet(logs, progress) as fleet:
        yield fleet.start(*specs, within=within)


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for port in random.sample(_PORTS, len(_PORTS)):
            probe = held.enter_context(socket.socket())
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    msg = f"fleet: found no {count} free ports on {HOST}, wanted some in {_PORTS.start}-{_PORTS.stop}"
    raise FleetError(msg)
