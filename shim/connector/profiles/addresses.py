"""Where the addresses of peers stand in transfer params and request ids."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from shim.connector.peers import parse_url
from shim.verdict import Ask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shim.connector.profiles.model import Peer

_PREFILL_ZMQ = re.compile(r"___prefill_addr_(.+?)___decode_addr_")
_DECODE_ZMQ = re.compile(r"___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$")
"""How vLLM's router writes peers into request ids (moriio/moriio_common.py)."""


def addresses(peer: Peer, clean: dict[str, Any], request_id: str, ask: Ask) -> Iterator[tuple[str, int]]:
    """Every address that these keys make the engine contact.

    Args:
        peer: the keys.
        clean: params whose shapes are checked already.
        request_id: the engine request's id.
        ask: what is asked for; it decides which of a request id's two addresses is the peer's.

    Raises:
        ValueError: the request id holds a malformed address.
    """
    if peer.in_request_id and (found := embedded(request_id, ask)) is not None:
        yield from found
    source = clean.get(peer.record) if peer.record else clean
    if not source:
        return
    if peer.url:
        where = parse_url(source[peer.url]) if source.get(peer.url) else None
        if where is not None:
            yield where
        return
    hosts = source.get(peer.host)
    for host in hosts if isinstance(hosts, list) else (hosts,):
        for name in peer.ports:
            port = source.get(name)
            for one in port if isinstance(port, list) else (port,):
                if host is not None and one is not None:
                    yield host, one


def embedded(request_id: str, ask: Ask) -> list[tuple[str, int]] | None:
    """The peer's address in a request id made by vLLM's router, `None` if there is none.

    As moriio_common.py `get_peer_zmq_from_request_id` and `parse_moriio_zmq_address` read it.

    Raises:
        ValueError: what is there is no address.
    """
    found = (_DECODE_ZMQ if ask is Ask.HANDOFF else _PREFILL_ZMQ).search(request_id)
    if found is None:
        return None
    parts = dict(part.partition(":")[::2] for part in found[1].split(","))
    named = {name.strip(): value.strip() for name, value in parts.items()}
    try:
        return [(named["host"], int(named[which])) for which in ("handshake", "notify")]
    except (KeyError, ValueError):
        msg = "the request id holds a malformed peer address"
        raise ValueError(msg) from None
