"""Owns how a client's strings may appear in a log line, span or error body: printable ASCII, cut to 128."""

from __future__ import annotations

import re
from typing import Final

LIMIT: Final = 128
"""Characters kept of a string that a client chose."""

_OTHERS = re.compile(r"[^ -~]")


def printable(value: object) -> str:
    """A client-given string made safe: at most `LIMIT` characters, each printable ASCII.

    Whatever else is in it (line ends, ESC, bidirectional marks, lone surrogates, any script) becomes `?`, one
    for one, so that two ids which differ still look different in length. Costs the same for an id of 1 MB as
    for one of 128 characters.

    Args:
        value: anything out of a request; what is not a string is named by its type only, since turning it
            into text may cost without bound.
    """
    if not isinstance(value, str):
        return f"<{type(value).__name__}>"
    short = value[:LIMIT]
    return short if short.isascii() and short.isprintable() else _OTHERS.sub("?", short)
