"""Says in the log what a contained fault was: exception types and frames, seldom, and never a value.

What is raised while a request's params are looked at may have them in its message, and a source line may hold
a key; so of an exception only what the code itself says is written: its type, that of its causes, and where.
Nothing here raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shim.telemetry.log import LOGGER, QUIET_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType

CONTAINED: Final = "a fault of the shim's in %s was contained; please report it with this line"
PASSED_ON: Final = "the inner connector raised in %s, which passes on as without the shim"
FRAMES: Final = 8
"""Innermost frames named of each exception."""
CHAIN: Final = 4
"""Exceptions named, from the one that was caught back to its causes."""
CAUSES: Final = 64
"""Different faults that are told apart; past these all are forgotten, and may be said again."""
_PACKAGE: Final = Path(__file__).parents[1]

Cause = tuple[str, type[BaseException], "CodeType | None", int]
"""Where it was contained, the exception's type, and the code and line that raised it."""


class Faults:
    """Writes a line a fault: the first of its cause at once, further ones counted for `QUIET_SECONDS`.

    Args:
        clock: seconds; only differences count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logger = logging.getLogger(LOGGER)
        self._lock = threading.Lock()
        self._said: dict[Cause, tuple[float, int]] = {}

    def say(self, where: str, error: BaseException, what: str = CONTAINED, level: int = logging.ERROR) -> None:
        """Log one fault.

        Args:
            where: the hook, sink or hand-off that it was contained in; one of the shim's own words.
            error: what was caught there.
            what: the sentence, with a place for `where`.
            level: of the line.
        """
        try:
            skipped = self._allowed(where, error)
            if skipped is not None:
                line = f"kv_shim: {what}: %s. skipped=%d"
                self._logger.log(level, line, where, described(error), skipped)
        except Exception:  # noqa: BLE001, S110  # a log that fails: nowhere left to say it
            pass

    def _allowed(self, where: str, error: BaseException) -> int | None:
        """How many of the same cause were skipped since the last line; None if this one is."""
        raised = error.__traceback__
        while raised is not None and raised.tb_next is not None:
            raised = raised.tb_next
        cause = (where, type(error), raised and raised.tb_frame.f_code, raised.tb_lineno if raised else 0)
        with self._lock:
            now = self._clock()
            at, skipped = self._said.get(cause, (float("-inf"), 0))
            if 0 <= now - at < QUIET_SECONDS:
                self._said[cause] = at, skipped + 1
                return None
            if len(self._said) >= CAUSES:
                self._said.clear()
            self._said[cause] = now, 0
            return skipped


def described(error: BaseException) -> str:
    """Types and frames of an exception and its causes: `KeyError at shim/a.py:3 in f > b.py:9 in g`."""
    return ", from ".join(f"{type(each).__qualname__} at {_frames(each)}" for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, then what it was raised from or while handling; as Python's own traceback has them."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen and len(seen) < CHAIN:
        yield following
        seen.add(id(following))
        cause, hidden = following.__cause__, following.__suppress_context__
        following = cause if cause is not None or hidden else following.__context__


def _frames(error: BaseException) -> str:
    frames: deque[str] = deque(maxlen=FRAMES)
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        frames.append(f"{_place(code.co_filename)}:{step.tb_lineno} in {code.co_qualname}")
        step = step.tb_next
    return " > ".join(frames) or "no frame"


def _place(filename: str) -> str:
    """A file of the shim's from its package on, of any other its name: no path of this machine's."""
    path = Path(filename)
    return str(path.relative_to(_PACKAGE.parent)) if path.is_relative_to(_PACKAGE) else path.name


FAULTS: Final = Faults()
"""This process's."""
