"""Cores shared among servers, with processes that spin and wait as vLLM's do."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from shim.cli.cores import NICE, share

# A thread that polls, one that waits, and a first thread that polls as an engine at work does.
SERVER = """
import threading, time
def spin():
    while True: time.sleep(0)
names = [threading.Thread(target=target, daemon=True) for target in (spin, lambda: time.sleep(60))]
for thread in names: thread.start()
print(*(thread.native_id for thread in names), flush=True)
end = time.monotonic() + 60
while time.monotonic() < end: time.sleep(0)
"""


@pytest.fixture
def server():
    """Its id, and those of the thread that polls and the one that waits."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        spinning, waiting = map(int, process.stdout.readline().split())
        yield process.pid, spinning, waiting
        process.kill()


def test_only_a_spinning_thread_is_put_below_the_others(server) -> None:
    """Neither the thread that waits nor the first one, which does the server's work."""
    process, spinning, waiting = server
    # Two threads of one Python take turns, so each is watched longer than a thread of its own would be.
    share([[process]], sleep=lambda seconds: time.sleep(seconds * 4))
    niceness = [os.getpriority(os.PRIO_PROCESS, thread) for thread in (spinning, waiting, process)]
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness == [NICE, ours, ours]


def test_each_server_gets_cores_of_its_own(server) -> None:
    """All of its threads; together they have all cores there are, and with one core all have that."""
    process, spinning, waiting = server
    share([[process], [process]], sleep=lambda _: None)
    cores = sorted(os.sched_getaffinity(0))
    last = set(cores[1 % len(cores) :: 2])
    assert {frozenset(os.sched_getaffinity(thread)) for thread in (process, spinning, waiting)} == {
        frozenset(last)
    }


def test_a_process_that_has_ended_is_passed_over(server) -> None:
    """A helper of a server's may end while it is looked at."""
    process, _, waiting = server
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    share([[gone.pid, process]], sleep=lambda _: None)
    assert os.sched_getaffinity(waiting) == os.sched_getaffinity(0)
