"""Answers a refused request with a 503 that says why, also where its response had already begun."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from shim.entrypoint.counters import contained

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from shim.verdict import Reason

    Message = MutableMapping[str, Any]
    Send = Callable[[Message], Awaitable[None]]

RETRY_AFTER_SECONDS = 1


class Gate:
    """Holds a response's start back until its first body: a stream starts before its request is generated.

    Args:
        refused: why the request is refused, None if it is not (yet).
        send: the server's.
    """

    def __init__(self, refused: Callable[[], Reason | None], send: Send) -> None:
        self._refused = refused
        self._send = send
        self._start: Message | None = None
        self._answered = False

    async def __call__(self, message: Message) -> None:
        """Pass one ASGI message on, or the refusal in place of all of them."""
        if self._answered:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        start, self._start = self._start, None
        if start is not None:
            if answer := self._refusal():
                self._answered = True
                for part in answer:
                    await self._send(part)
                return
            await self._send(start)
        await self._send(message)

    def _refusal(self) -> list[Message]:
        """The refusal; empty for a request that is not refused, and where making it fails."""
        try:
            reason = self._refused()
            return [] if reason is None else refusal(reason)
        except Exception as error:  # noqa: BLE001  # see the docstring
            contained("its refusal", error)
            return []


def refusal(reason: Reason) -> list[Message]:
    """The ASGI messages that answer a refused request in place of what vLLM would say."""
    error = {
        "message": (
            f"kv_shim: refused, {reason}: the request came to a decode server without a usable hand-off, and "
            "on_local_prefill does not allow to prefill it there; retry by way of a prefill server"
        ),
        "type": "ServiceUnavailable",
        "param": "kv_transfer_params",
        "code": int(HTTPStatus.SERVICE_UNAVAILABLE),
        "reason": str(reason),
    }
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(RETRY_AFTER_SECONDS).encode()),
    ]
    return [
        {"type": "http.response.start", "status": int(HTTPStatus.SERVICE_UNAVAILABLE), "headers": headers},
        {"type": "http.response.body", "body": body, "more_body": False},
    ]
