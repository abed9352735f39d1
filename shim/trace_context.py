"""The caller's W3C trace context: read once, wherever it comes from, and carried in one form.

That form is version 00's, which every reader knows; absent or malformed is `""`. Pure Python. Source of the
rules: W3C Trace Context, 2.2 (traceparent; versioning in 2.2.4), 2.3 (tracestate).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

STATE_LIMIT: Final = 512
"""Characters of a tracestate that is carried; W3C asks for as many (2.3.3.2)."""
_MEMBER_LIMIT: Final = 32
_READ: Final = re.compile(r"([0-9a-f]{2})(-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-)([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
_MEMBER: Final = re.compile(
    r"[ \t]*(?:(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~])?[ \t]*"
)

Traceparent = Annotated[str, Meta(pattern=r"^(|00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})\Z")]
"""As it travels between the shim's own parts; from outside it is read by `traceparent`."""
Tracestate = Annotated[str, Meta(max_length=STATE_LIMIT)]


def traceparent(value: object) -> str:
    """A caller's `traceparent` in version 00's form; empty if there is none or it is malformed.

    Versions 01 to fe may have more fields after the flags, of which only "sampled" is known; ff is none.

    Args:
        value: from outside: a header's text, or anything else in its place.
    """
    found = (
        _READ.fullmatch(value.strip(" \t")) if isinstance(value, str) and len(value) <= STATE_LIMIT else None
    )
    if found is None:
        return ""
    version, ids, flags, more = found.groups()
    if version == "ff" or (version == "00" and more):
        return ""
    return f"00{ids}{flags if version == '00' else f'{int(flags, 16) & _SAMPLED:02x}'}"


def tracestate(value: object) -> str:
    """A caller's `tracestate` as it is; empty if there is none, or it is long or malformed.

    Checked here because OpenTelemetry's propagator writes what it rejects to the log as it is.
    """
    if not isinstance(value, str) or len(value) > STATE_LIMIT:
        return ""
    members = value.split(",")
    return value if len(members) <= _MEMBER_LIMIT and all(map(_MEMBER.fullmatch, members)) else ""


def read(carrier: object) -> tuple[str, str]:
    """The traceparent and tracestate in a caller's headers (lower-case names), each empty if not usable.

    A tracestate without a traceparent is none (2.3).
    """
    headers = carrier if isinstance(carrier, Mapping) else {}
    parent = traceparent(headers.get("traceparent"))
    return (parent, tracestate(headers.get("tracestate"))) if parent else ("", "")


def of_span(context: SpanContext) -> tuple[str, str]:
    """The same of a span of this process; empty unless it is one."""
    if not context.is_valid:
        return "", ""
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return parent, tracestate(context.trace_state.to_header())
