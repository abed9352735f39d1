"""Nothing stays behind, however whoever started the servers ends; servers that are no vLLM stand in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shim.cli import keeper
from shim.cli.fleet import Fleet, FleetError, Server, running

# What vLLM is to the kernel: a child in the same session, one that left it, and no answer to SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {} time.sleep(600)"
for how in ("", "os.setsid();"):
    subprocess.Popen([sys.executable, "-c", child.format(how), sys.argv[1]])
time.sleep(600)
"""

# SIGINT by its usual handler: a shell's background job, which a CI may be, inherits it ignored.
STARTER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, start_new_session=True)
time.sleep(600)
"""


def marked(mark: str) -> list[int]:
    """Processes with this argument."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in arguments:
            found.append(int(entry.name))
    return found


def wait_until(condition, seconds: float = 15.0) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def mark(tmp_path) -> str:
    """An argument that only this test's processes have."""
    return f"mark-{tmp_path.name}-{os.getpid()}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_starter_that_is_killed_takes_the_servers_with_it(mark, number) -> None:
    """Also by a signal that nobody can handle, and children that left the session or ignore SIGTERM."""
    command = [keeper.__file__, "0.2", sys.executable, "-c", STUBBORN, mark]
    with subprocess.Popen([sys.executable, "-c", STARTER, *command], stderr=subprocess.DEVNULL) as starter:
        assert wait_until(lambda: len(marked(mark)) == 5)
        starter.send_signal(number)
        starter.wait()
    assert wait_until(lambda: not marked(mark)), marked(mark)


def test_a_keeper_that_is_terminated_ends_its_server(mark) -> None:
    """A service manager ends every process at once."""
    command = [sys.executable, keeper.__file__, "0.2", sys.executable, "-c", STUBBORN, mark]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as held:
        assert wait_until(lambda: len(marked(mark)) == 4)
        held.terminate()
        held.wait()
        assert not marked(mark)


@pytest.mark.parametrize("code", [0, 3])
def test_a_keeper_gives_its_servers_exit_code(code) -> None:
    """So that a server's end can be told from a refusal to start."""
    command = [sys.executable, keeper.__file__, "1", sys.executable, "-c", f"raise SystemExit({code})"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as held:
        assert held.wait(10) == code


def engine_up(server: Server) -> bool:
    """Whether a vLLM has come as far as its EngineCore, with a resource tracker between."""
    return len(server.processes()) >= 3


def test_a_body_that_raises_leaves_no_process_of_a_real_server(bench, tmp_path) -> None:
    """Stopped while it starts up, when EngineCore has just begun."""
    started: list[Server] = []

    def body() -> None:
        with Fleet(tmp_path) as fleet:
            started.append(Server(bench.spec("raised"), tmp_path))
            fleet.servers.extend(started)
            assert wait_until(lambda: engine_up(started[0]), 60)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert started[0].processes() == []
    assert not marked(str(started[0].port))


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(bench, tmp_path) -> None:
    """The message holds the end of its log."""
    spec = bench.spec("wrong", kv_transfer_config={"kv_connector": "NoSuchConnector", "kv_role": "kv_both"})
    with pytest.raises(FleetError, match="NoSuchConnector"), running(spec, logs=tmp_path):
        pass
    assert (tmp_path / "wrong.log").stat().st_size > 0
