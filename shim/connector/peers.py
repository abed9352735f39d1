"""Which peers may be contacted: the allow-list, and a circuit breaker for peers that don't answer.

Client params name hosts, so everything here takes hostile strings. Names are never resolved.
Imports neither vLLM nor torch.
"""

from __future__ import annotations

import ipaddress
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from shim.config import SettingsError
from shim.telemetry.catalog import PeerState
from shim.verdict import PeerKey

MAX_PORT = 65_535
MAX_URL = 512
_MAX_HOST = 253
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*\.?", re.ASCII)
_INTERFACE = re.compile(r"[A-Za-z0-9_.-]{1,15}", re.ASCII)
_URL_CHARS = re.compile(r"[A-Za-z0-9._~:/\[\]%-]+", re.ASCII)
_HOST_WANTED = "a host name or a plainly written IP address"
_URL_WANTED = "an http or https URL of host and port, without user, query or fragment"
_DEFAULT_PORT = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Ports = tuple[tuple[int, int], ...]
_ANY_PORT: Ports = ((1, MAX_PORT),)


class Host(NamedTuple):
    """A host as it will be matched: an address, or a lower-case name without its final dot."""

    address: Address | None
    name: str


@lru_cache(maxsize=1024)
def parse_host(text: str) -> Host | None:
    """Read a host; `None` if it is neither an address in its usual spelling nor a name.

    `127.1`, `0177.0.0.1`, `2130706433` and `0x7f.1` are addresses to the C library, so a name whose
    last label is a number is refused rather than passed on unmatched.
    """
    if not text or len(text) > _MAX_HOST or not text.isascii():
        return None
    bare = text[1:-1] if text[0] == "[" and text[-1] == "]" and ":" in text else text
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        if not _NAME.fullmatch(text):
            return None
        name = text.lower().removesuffix(".")
        last = name.rpartition(".")[2]
        odd = last.isdigit() or re.fullmatch(r"0x[0-9a-f]*", last)
        return None if odd else Host(None, name)
    mapped = getattr(address, "ipv4_mapped", None)
    _, scoped, scope = bare.partition("%")
    # `ipaddress` takes any scope; ZeroMQ reads "source;destination" there and would dial what nobody judged.
    if scoped and (mapped or not _INTERFACE.fullmatch(scope)):
        return None
    return Host(mapped or address, "")


def host_problem(value: object) -> str:
    """What was wanted, if this is no host; else `""`."""
    # The length first: a cache's look-up hashes all of a string.
    good = type(value) is str and len(value) <= _MAX_HOST and parse_host(value) is not None
    return "" if good else _HOST_WANTED


@lru_cache(maxsize=1024)
def parse_url(text: str) -> tuple[str, int] | None:
    """Host and port of a peer's URL; `None` if it is not plainly an http(s) one."""
    if not 0 < len(text) <= MAX_URL or not _URL_CHARS.fullmatch(text):
        return None
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return None
    default = _DEFAULT_PORT.get(parts.scheme)
    host = parts.hostname or ""
    if default is None or parse_host(host) is None or port == 0:
        return None
    return host, port or default


def url_problem(value: object) -> str:
    """What was wanted, if this is no peer's URL; else `""`."""
    good = type(value) is str and len(value) <= MAX_URL and parse_url(value) is not None
    return "" if good else _URL_WANTED


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    network: Network | None
    ports: Ports

    def covers(self, host: Host, port: int) -> bool:
        if not any(low <= port <= high for low, high in self.ports):
            return False
        if host.address is None:
            return self.network is None and self.name == host.name
        network = self.network
        if network is None or network.version != host.address.version or host.address not in network:
            return False
        # 0.0.0.0/0 is no permission to ask the cloud's metadata service: that has to be named.
        return not _special(host.address) or _special(network)


def _special(what: Address | Network) -> bool:
    """Whether an address or a whole network is link-local, multicast or unspecified."""
    return what.is_link_local or what.is_multicast or what.is_unspecified


class AllowList:
    """The peers that may be contacted; without entries any but special addresses."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """Parse `host[:ports]` and `cidr[:ports]`; ports are `a`, `a-b`, or those joined by commas.

        An IPv6 address or network with ports is written in brackets: `[fd00::/8]:5600`.

        Raises:
            SettingsError: an entry is neither.
        """
        self._entries = tuple(_entry(text) for text in entries)
        self._exact = {e.name for e in self._entries if e.network is None}
        self._seen: dict[tuple[str, int], bool] = {}

    def allows(self, host: str, port: int) -> bool:
        """Whether this peer may be contacted; remembers its last thousand answers."""
        key = (host, port)
        known = self._seen.get(key)
        if known is None:
            known = self._decide(host, port)
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            self._seen[key] = known
        return known

    def _decide(self, text: str, port: int) -> bool:
        host = parse_host(text)
        if host is None or not 1 <= port <= MAX_PORT:
            return False
        if not self._entries:
            return host.address is None or not _special(host.address)
        return any(entry.covers(host, port) for entry in self._entries)


_REMEMBERED: Final = 1024


def _entry(text: str) -> _Entry:
    where, ports = _split(text)
    if "/" in where:
        try:
            network: Network | None = ipaddress.ip_network(where, strict=True)
        except ValueError as error:
            raise _bad(text, f"{error}", "write the network's first address, e.g. 10.0.0.0/8") from error
        return _Entry("", network, ports)
    host = parse_host(where)
    if host is None:
        raise _bad(text, "no host name, IP address or network", "write e.g. prefill-0:5600 or 10.0.0.0/8")
    if host.address is None:
        return _Entry(host.name, None, ports)
    return _Entry("", ipaddress.ip_network(host.address), ports)


def _split(text: str) -> tuple[str, Ports]:
    if text.startswith("["):
        where, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _bad(text, "an open bracket", "write e.g. [fd00::/8]:5600")
        return where, _ports(text, rest[1:]) if rest else _ANY_PORT
    if text.count(":") == 1:
        where, _, rest = text.partition(":")
        return where, _ports(text, rest)
    return text, _ANY_PORT  # no ports, or an IPv6 address without them


def _ports(text: str, ports: str) -> Ports:
    ranges: list[tuple[int, int]] = []
    for item in ports.split(","):
        low, dash, high = item.partition("-")
        if not (low.isascii() and low.isdigit() and (not dash or (high.isascii() and high.isdigit()))):
            raise _bad(text, f"port {item!r}", "write e.g. :5600, :5600-5610 or :5600,5610")
        bounds = int(low), int(high) if dash else int(low)
        if not 1 <= bounds[0] <= bounds[1] <= MAX_PORT:
            raise _bad(text, f"port {item!r}", f"use ports from 1 to {MAX_PORT}, the lower first")
        ranges.append(bounds)
    return tuple(ranges)


def _bad(entry: str, found: str, advice: str) -> SettingsError:
    msg = f"allow_peers: found {entry!r} ({found}), wanted host[:ports] or cidr[:ports]; {advice}"
    return SettingsError(msg)


THRESHOLD: Final = 3
"""Failures in a row that open a breaker: one is a lost packet, two a restart in between."""
BACK_OFF: Final = 10.0
"""Seconds until the first trial; doubles with every failed one."""
MAX_BACK_OFF: Final = 60.0
FORGET_AFTER: Final = 600.0
MAX_PEERS: Final = 1024


@dataclass(slots=True)
class _Breaker:
    failures: int = 0
    back_off: float = BACK_OFF
    retry_at: float = 0.0  # when the next trial may start; a running trial that never reports ends then
    used_at: float = 0.0
    state: PeerState | None = None  # None = closed


Transition = Callable[[PeerKey, str], None]
"""Called with a peer and the state it went to: `open`, `half_open`, `closed`, or `forgotten`."""


class Breakers:
    """Circuit breakers by peer. Not thread-safe: they live on the scheduler's thread.

    Closed until `THRESHOLD` failures in a row, then open for a back-off, then half open: one trial;
    its success closes the breaker, its failure opens it for twice as long. Any success resets it.
    A breaker exists only for a peer that has failed.
    """

    def __init__(self, clock: Callable[[], float], on_transition: Transition | None = None) -> None:
        """Keep none yet.

        Args:
            clock: seconds, never going back.
            on_transition: called at every change; may not raise.
        """
        self._clock = clock
        self.on_transition = on_transition
        self._breakers: OrderedDict[PeerKey, _Breaker] = OrderedDict()

    def __len__(self) -> int:
        return len(self._breakers)

    def counts(self) -> Mapping[PeerState, int]:
        """How many are open and half open."""
        states = [b.state for b in self._breakers.values()]
        return {state: states.count(state) for state in PeerState}

    def blocked(self, key: PeerKey) -> bool:
        """Whether the peer may not be asked now; takes no trial."""
        breaker = self._breakers.get(key)
        return breaker is not None and breaker.state is not None and self._clock() < breaker.retry_at

    def allowed(self, key: PeerKey) -> bool:
        """Whether the peer may be asked now; in a half-open state this *is* the one trial."""
        if not self._breakers:
            return True
        now = self._clock()
        breaker = self._current(key, now)
        if breaker is None or breaker.state is None:
            return True
        if now < breaker.retry_at:
            return False
        # A trial that ends without a report (aborted, all cached) must not block the peer for good.
        breaker.retry_at = now + MAX_BACK_OFF
        self._move(key, breaker, PeerState.HALF_OPEN)
        return True

    def failed(self, key: PeerKey) -> None:
        """A handshake with the peer or a transfer from it failed."""
        now = self._clock()
        breaker = self._current(key, now)
        if breaker is None:
            breaker = self._breakers[key] = _Breaker(used_at=now)
            self._trim(now)
        breaker.failures += 1
        if breaker.state is PeerState.HALF_OPEN:
            breaker.back_off = min(breaker.back_off * 2, MAX_BACK_OFF)
        elif breaker.state is PeerState.OPEN or breaker.failures < THRESHOLD:
            return  # a request that was under way when it opened says nothing new
        breaker.retry_at = now + breaker.back_off
        self._move(key, breaker, PeerState.OPEN)

    def succeeded(self, key: PeerKey) -> None:
        """The peer answered."""
        breaker = self._breakers.pop(key, None)
        if breaker is not None and breaker.state is not None:
            self._tell(key, "closed")

    def expire(self) -> None:
        """Forget peers unused for `FORGET_AFTER`; cheap, for whoever ticks."""
        self._trim(self._clock())

    def _current(self, key: PeerKey, now: float) -> _Breaker | None:
        self._trim(now)
        breaker = self._breakers.get(key)
        if breaker is not None:
            breaker.used_at = now
            self._breakers.move_to_end(key)
        return breaker

    def _trim(self, now: float) -> None:
        while self._breakers:
            key, breaker = next(iter(self._breakers.items()))
            if len(self._breakers) <= MAX_PEERS and now - breaker.used_at < FORGET_AFTER:
                return
            del self._breakers[key]
            if breaker.state is not None:
                self._tell(key, "forgotten")

    def _move(self, key: PeerKey, breaker: _Breaker, to: PeerState) -> None:
        if breaker.state is not to:
            breaker.state = to
            self._tell(key, to.value)

    def _tell(self, key: PeerKey, to: str) -> None:
        if self.on_transition is not None:
            self.on_transition(key, to)
