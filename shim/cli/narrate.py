"""Tell a person at a terminal, or a log, what is being waited for."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.status import Status

_QUIET_SECONDS = 10.0

_COUNTS = re.compile(r"\d+")


class Narrator:
    """One line of progress: a spinner on a terminal; elsewhere a line now and then. A context manager."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        """Be silent until told something.

        Args:
            console: where to.
            clock: seconds, for the pace of lines in a log.
        """
        self._console = console
        self._clock = clock
        self._status: Status | None = console.status("") if console.is_terminal else None
        self._kind = ""
        self._next = 0.0

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, line: str) -> None:
        """Say what is going on now; a log gets it if it is news, or if it got none for a while."""
        if self._status is not None:
            self._status.update(line)
            return
        kind = _COUNTS.sub("", line)
        if kind != self._kind or self._clock() >= self._next:
            self._kind, self._next = kind, self._clock() + _QUIET_SECONDS
            self._console.print(line, markup=False, highlight=False)

    def prefixed(self, prefix: str) -> Callable[[str], None]:
        """A narrator of lines that all begin alike."""
        return lambda line: self(prefix + line)
