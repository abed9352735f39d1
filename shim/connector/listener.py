"""Keeps NIXL's handshake listener on prefill alive whatever is sent to its port.

The listener's thread has no guard (nixl/base_scheduler.py, `_nixl_handshake_listener`, 0.28.0 to 0.32.0): a
message that is no msgpack, or that asks for a rank which prefill does not have, ends it. Prefill then looks
healthy, and no new decode server can handshake. Delete this when vLLM guards its thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from shim.telemetry.faults import FAULTS

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

LISTENER = "_nixl_handshake_listener"
_GUARDED = "_kv_shim_guarded"
PAUSE = 0.05
"""Seconds between an end and the next start, so that a flood of junk costs no core."""
_JUNK = (
    "%s got a message it could not answer and listens again; if this repeats, see who else sends to its port"
)


class _Ranks(dict[Any, Any]):
    """The handshake data by rank; an unknown rank is answered with nothing, which fails that one load."""

    def __missing__(self, rank: Any) -> bytes:
        return b""


def defend(connector: Any) -> None:
    """Guard the listeners of a scheduler-side connector, and of a `MultiConnector`'s children; else nothing.

    On the class, once a process: an attribute more on the instance, or a look into its `__dict__`, would cost
    the scheduler's own hooks the fast attribute access that Python has for small instances.
    """
    for each in (connector, *getattr(connector, "_connectors", ())):
        scheduler = type(getattr(each, "connector_scheduler", None))
        original = getattr(scheduler, LISTENER, None)
        if original is not None and not hasattr(original, _GUARDED):
            setattr(scheduler, LISTENER, staticmethod(_supervised(original)))


def _supervised(listen: Callable[..., None]) -> Callable[..., None]:
    def listen_on(
        encoded_data: Mapping[Any, Any],
        ready_event: threading.Event,
        stop_event: threading.Event,
        *address: Any,
    ) -> None:
        while not stop_event.is_set():
            try:
                listen(_Ranks(encoded_data), ready_event, stop_event, *address)
            except Exception as error:  # whatever a stranger's message makes it raise
                if not ready_event.is_set():
                    raise  # it never listened: the port is taken, and the start must fail as without us
                FAULTS.say("NIXL's handshake listener", error, _JUNK, logging.WARNING)
                stop_event.wait(PAUSE)

    setattr(listen_on, _GUARDED, True)
    return listen_on
