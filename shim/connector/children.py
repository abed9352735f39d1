"""Which connector makes a request's load: the inner one, or the child that a `MultiConnector` chose for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shim.connector.profiles import profile_for
from shim.verdict import Ask

if TYPE_CHECKING:
    from collections.abc import Iterator


class Loader(NamedTuple):
    """What is known of a connector that loads.

    Attributes:
        unit: tokens in one unit of what it loads.
        from_peer: what it loads comes from the peer that the request's params name.
    """

    unit: int
    from_peer: bool


class Loaders:
    """The loaders of a scheduler-side connector, which is already built.

    Args:
        connector: the inner connector, or its wrapped subclass.
        block_size: tokens in one of the scheduler's blocks.
    """

    def __init__(self, connector: Any, block_size: int) -> None:
        self._connector = connector
        self._leaves = {id(leaf): _loader(leaf, block_size) for leaf in _leaves(connector)}
        self.smallest_unit = min((leaf.unit for leaf in self._leaves.values()), default=block_size)
        """Tokens; a shorter prompt is too short for any of them."""

    def of(self, request_id: str) -> Loader | None:
        """Who makes the load that the scheduler has just given blocks for; None if that can't be told.

        `MultiConnector.get_num_new_matched_tokens` keeps its choice until `request_finished`
        (multi_connector.py, `_requests_to_connector`, 0.28.0 to 0.34.0).
        """
        connector = self._connector
        while (children := _children(connector)) is not None:
            chosen = getattr(connector, "_requests_to_connector", {}).get(request_id)
            if chosen is None:
                return None
            connector = children[chosen]
        return self._leaves.get(id(connector))


def _children(connector: Any) -> list[Any] | None:
    """A `MultiConnector`'s children; None for any other connector."""
    return getattr(connector, "_connectors", None)


def _leaves(connector: Any) -> Iterator[Any]:
    children = _children(connector)
    if children is None:
        yield connector
        return
    for child in children:
        yield from _leaves(child)


def _loader(connector: Any, block_size: int) -> Loader:
    profile = profile_for(str(connector._kv_transfer_config.kv_connector))  # noqa: SLF001  # vLLM's base class
    # An unknown connector's peers are not known, so no breaker is kept of them.
    from_peer = any(mode.ask is Ask.LOAD and mode.peers for mode in profile.modes)
    return Loader(block_size, from_peer)
