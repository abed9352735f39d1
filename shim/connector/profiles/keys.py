"""Kinds of values that transfer params may hold, and the checks for them.

A check answers `""` for a value that the connector can take, else what was wanted; it never walks
a value before its size is known. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType

from shim.connector.peers import host_problem, url_problem

MAX_ID = 512
"""Longest id in characters: vLLM's own are a public request id (limited by the HTTP server's header
size, in practice under 200) plus a random suffix."""
MAX_TEXT = 4096
MAX_INT32 = 2**31 - 1
"""Block ids become `np.int32` on the worker (vLLM 0.32 nixl/base_worker.py `_compute_desc_ids`)."""
MAX_GROUPS = 64
MAX_RANKS = 65_536
_INT64_MIN, _INT64_MAX = -(2**63), 2**64 - 1
_PLAIN_DEPTH, _PLAIN_NODES = 8, 1024
_INT_ONLY = frozenset({int})
_SCALARS = frozenset({bool, int, float, str, type(None)})

Check = Callable[[object], str]


class Kind(Enum):
    """What a key holds."""

    FLAG = auto()  # true or false; checked apart, before everything else
    IDENT = auto()  # a non-empty string that can be encoded
    HOST = auto()
    HOSTS = auto()
    PORT = auto()
    PORTS = auto()  # one port or a list of them (one a rank)
    URL = auto()
    TP_SIZE = auto()
    PP_SIZE = auto()
    RANKS = auto()  # a count or index of ranks
    COUNT = auto()
    SECONDS = auto()
    BLOCKS = auto()  # a list of lists of block ids; checked apart, against the prompt
    TEXT = auto()
    RECORD = auto()  # a JSON object with keys of its own
    ANY = auto()  # anything small
    DROPPED = auto()  # read by the API server only; never shown to the connector


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the params.

    Attributes:
        kind: what it holds.
        nullable: whether the connector takes `null` for it; where not, a null is dropped, so that the
            connector's default counts.
        fields: the keys of a `RECORD`.
        required: the keys a `RECORD` can't be without.
    """

    kind: Kind
    nullable: bool = True
    fields: Mapping[str, Key] = field(default_factory=dict)
    required: tuple[str, ...] = ()


def compile_check(key: Key, *, max_tp: int, max_pp: int) -> Check | None:
    """The check of a key's value, `None` for those that the guard checks apart.

    Args:
        key: the key.
        max_tp: largest tensor (or context) parallel size a peer may claim.
        max_pp: largest pipeline parallel size a peer may claim.
    """
    if key.kind in {Kind.FLAG, Kind.BLOCKS, Kind.DROPPED}:
        return None
    if key.kind is Kind.RECORD:
        return _record(key, max_tp=max_tp, max_pp=max_pp)
    if key.kind is Kind.TP_SIZE:
        return _integer(1, max_tp)
    if key.kind is Kind.PP_SIZE:
        return _integer(1, max_pp)
    return _CHECKS[key.kind]


def ident(value: object) -> str:
    """Check an id: the worker joins, encodes and hashes it (nixl/base_worker.py `_send_heartbeats`)."""
    if type(value) is not str or not value or len(value) > MAX_ID:
        return f"a string of 1 to {MAX_ID} characters"
    return "" if value.isascii() or _encodable(value) else "a string of valid Unicode"


def plain(value: object) -> str:  # noqa: C901, PLR0911  # one rule a return
    """Check a value that no rule knows: small, shallow, and encodable as msgpack."""
    if type(value) in _SCALARS:
        return _scalar(value)
    left = _PLAIN_NODES
    level: list[object] = [value]
    for _ in range(_PLAIN_DEPTH):
        below: list[object] = []
        for item in level:
            if type(item) in _SCALARS:
                if wanted := _scalar(item):
                    return wanted
                continue
            if type(item) not in {list, tuple, dict}:
                return "plain JSON"
            left -= len(item)  # type: ignore[arg-type]  # one of the three above
            if left < 0:
                return f"at most {_PLAIN_NODES} values"
            if type(item) is dict:
                if any(type(name) is not str or len(name) > MAX_ID for name in item):
                    return "plain JSON"
                below.extend(item.values())
            else:
                below.extend(item)  # type: ignore[arg-type]  # a list or tuple
        if not below:
            return ""
        level = below
    return f"at most {_PLAIN_DEPTH} levels of nesting"


def blocks_problem(value: object, *, groups: int | None, limit: int) -> tuple[str, bool]:
    """Check block ids without walking a list that is too long for the prompt.

    Args:
        value: what the params hold.
        groups: how many lists are wanted, `None` if not known.
        limit: most ids a list may hold for this prompt.

    Returns:
        What was wanted (`""` = fine), and whether only the length was wrong: the ids then belong to
        another prompt, and were not looked at.
    """
    if type(value) not in {list, tuple} or not value:
        return "a non-empty list of lists of block ids", False
    outer: Sequence[object] = value  # type: ignore[assignment]  # a list or tuple
    if len(outer) > MAX_GROUPS or (groups is not None and len(outer) != groups):
        return f"{groups or f'at most {MAX_GROUPS}'} lists of block ids, one a KV cache group", False
    long = False
    for group in outer:
        if type(group) not in {list, tuple}:
            return "a list of lists of block ids", False
        ids: Sequence[int] = group  # type: ignore[assignment]  # a list or tuple
        if len(ids) > limit:
            long = True
        elif ids and not _block_ids(ids):
            return f"block ids from 0 to {MAX_INT32}", False
    return (f"at most {limit} block ids for this prompt", True) if long else ("", False)


def _block_ids(ids: Sequence[int]) -> bool:
    if set(map(type, ids)) != _INT_ONLY:
        return False
    # Block ids come in runs, which `sorted` finds in one pass: a fifth of the time of `min` and `max`.
    ordered = sorted(ids)
    return ordered[0] >= 0 and ordered[-1] <= MAX_INT32


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell
        return False
    return True


def _scalar(value: object) -> str:
    if type(value) is str:
        if len(value) > MAX_TEXT:
            return f"at most {MAX_TEXT} characters"
        return "" if value.isascii() or _encodable(value) else "a string of valid Unicode"
    if type(value) is int and not _INT64_MIN <= value <= _INT64_MAX:
        return "an integer of at most 64 bits"
    return ""


def _integer(low: int, high: int) -> Check:
    wanted = f"an integer from {low} to {high}"

    def check(value: object) -> str:
        # `type is int`: a bool is an int to isinstance, but not a port.
        return "" if type(value) is int and low <= value <= high else wanted

    return check


def _host(value: object) -> str:
    return host_problem(value)


def _url(value: object) -> str:
    return url_problem(value)


_port = _integer(1, 65_535)


def _listed(check: Check, what: str) -> Check:
    def listed(value: object) -> str:
        if type(value) is list:
            if len(value) > MAX_RANKS // 64 or any(map(check, value)):
                return what
            return ""
        return what if check(value) else ""

    return listed


def _seconds(value: object) -> str:
    wanted = "a number of seconds"
    if type(value) is int:
        return "" if abs(value) <= MAX_INT32 * 1000 else wanted
    return "" if type(value) is float and math.isfinite(value) else wanted


def _text(value: object) -> str:
    if type(value) is not str or not value or "\0" in value:
        return "a non-empty string"
    return _scalar(value)


def _record(key: Key, *, max_tp: int, max_pp: int) -> Check:
    checks = {name: compile_check(sub, max_tp=max_tp, max_pp=max_pp) for name, sub in key.fields.items()}

    def record(value: object) -> str:
        if type(value) is not dict:
            return "a JSON object"
        for name in key.required:
            if value.get(name) is None:
                return f"a JSON object with {name}"
        for name, item in value.items():
            known = checks.get(name) if type(name) is str else None
            if known is not None and item is not None and (wanted := known(item)):
                return f"{name} to be {wanted}"
        return plain(value)

    return record


_CHECKS: Mapping[Kind, Check] = MappingProxyType(
    {
        Kind.IDENT: ident,
        Kind.HOST: _host,
        Kind.HOSTS: _listed(_host, "a host or a list of hosts"),
        Kind.PORT: _port,
        Kind.PORTS: _listed(_port, "a port or a list of ports"),
        Kind.URL: _url,
        Kind.RANKS: _integer(0, MAX_RANKS),
        Kind.COUNT: _integer(0, MAX_INT32),
        Kind.SECONDS: _seconds,
        Kind.TEXT: _text,
        Kind.ANY: plain,
    }
)
