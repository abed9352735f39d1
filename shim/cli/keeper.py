"""Hold one server's processes, so that none outlives whoever started it, however that one ends.

`python keeper.py GRACE COMMAND…` starts the command and waits until it ends or standard input does.
The starter holds the other end of that pipe: the kernel closes it on a return, an exception, Ctrl-C
and SIGKILL alike. vLLM's own children (EngineCore, API servers) do not all notice a dead parent, so
everything in the session, and every orphan that the kernel hands over, is ended here. Standard
library only, and no import of the shim: it starts in milliseconds, under any Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_POLL_SECONDS = 0.05
_ORPHAN_SECONDS = 2.0


def processes_of(session: int) -> list[int]:
    """Ids of the live processes that a session's leader answers for, without the leader itself.

    Those are the session's members and the leader's children in other sessions. Zombies hold nothing
    and do not count. Read from `/proc/<pid>/stat` (proc(5)): after the command's name in parentheses
    come state, parent, process group and session.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == session:
            continue
        try:
            state, parent, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if session in {int(parent), int(its_session)} and state not in "ZX":
            found.append(int(entry.name))
    return found


def kill_all(session: int) -> None:
    """SIGKILL every process that a session's leader answers for, until there is none."""
    while found := processes_of(session):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _end(session: int, server: subprocess.Popen[bytes], grace: float) -> None:
    """SIGTERM to the server for an orderly end; after `grace` seconds SIGKILL to all that is left."""
    _on_signals(_nothing)
    if server.poll() is None:
        server.terminate()
    deadline = time.monotonic() + grace
    while processes_of(session) and time.monotonic() < deadline:
        if server.poll() is not None:
            # What outlives the server has nothing left to finish.
            deadline = min(deadline, time.monotonic() + _ORPHAN_SECONDS)
        time.sleep(_POLL_SECONDS)
    kill_all(session)
    server.wait()


def _on_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    # Handlers and never SIG_IGN: an ignored signal would stay ignored in the server.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    return


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main(arguments: list[str]) -> int:
    """Run the command until it or standard input ends; its exit code, as a shell would give it."""
    grace, command = float(arguments[0]), arguments[1:]
    # Without this an EngineCore whose parent died would go to init, out of sight.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    session = os.getpid()
    if os.getsid(0) != session:
        os.setsid()
    _on_signals(_leave)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603  # the starter's own command
    try:
        select.select([sys.stdin.fileno(), os.pidfd_open(server.pid)], [], [])
    finally:
        _end(session, server, grace)
    code = server.returncode
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
