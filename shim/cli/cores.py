"""Share this machine's cores among servers, so that none measures another's spinning thread.

One of NIXL's threads a server polls without pause (`pthrDelay = 0` in nixl's `_api.py`, which nothing can
set). Two servers on two cores then have three busy threads at every prefill, and the same request takes
1.7 s or 6.9 s. With each server on cores of its own, and the thread that spins below those that work,
times halve and repeat within a few percent; tokens and calls are the same.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SAMPLE_SECONDS = 0.5
SPINNING = 0.4
"""Share of a core that an idle server's thread uses only if it spins."""

NICE = 10
"""A tenth of a working thread's weight. At 19 pulls starve beside an engine that polls for their end."""


def share(servers: Sequence[Sequence[int]], sleep: Callable[[float], None] = time.sleep) -> None:
    """Give each server cores of its own, and put its spinning threads below its others.

    Args:
        servers: the ids of each server's processes; all are up and idle.
        sleep: waits while threads are watched.
    """
    cores = sorted(os.sched_getaffinity(0))
    for index, processes in enumerate(servers):
        # With fewer cores than servers some share one; with more, each gets its part.
        own = set(cores[index % len(cores) :: max(len(servers), 1)])
        for thread in _threads(processes):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, own)
    everyone = [process for processes in servers for process in processes]
    before = {thread: _ticks(thread) for thread in _threads(everyone)}
    sleep(SAMPLE_SECONDS)
    limit = SPINNING * SAMPLE_SECONDS * os.sysconf("SC_CLK_TCK")
    for thread, ticks in before.items():
        # A process's first thread is never NIXL's.
        if thread not in everyone and _ticks(thread) - ticks > limit:
            with contextlib.suppress(ProcessLookupError):
                # Upwards only: the other way needs privileges.
                os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))


def _threads(processes: Sequence[int]) -> list[int]:
    found: list[int] = []
    for process in processes:
        with contextlib.suppress(OSError):
            found += [int(entry.name) for entry in Path(f"/proc/{process}/task").iterdir()]
    return found


def _ticks(thread: int) -> int:
    """User and system time so far, in clock ticks (proc(5), fields 14 and 15); 0 if it has ended."""
    try:
        # Below `task`: `/proc/<thread>/stat` itself sums up the whole process.
        fields = Path(f"/proc/{thread}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
