"""Remembers where a request came from: a pure ASGI middleware that parses nothing unless it must."""

from __future__ import annotations

import json
import re
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from shim import trace_context
from shim.connector.recover import EC_PARAMS, KV_PARAMS
from shim.entrypoint.counters import contained, count
from shim.entrypoint.gate import Gate
from shim.telemetry.catalog import EntrypointEvent
from shim.verdict import Endpoint, Reason

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    Scope = MutableMapping[str, Any]
    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

PARAMS_BYTES_LIMIT = 1 << 20
"""Larger params are not recovered: a hand-off of a million tokens takes a tenth of this."""
PROMPT_IDS = "prompt_token_ids"
"""Routers put the prompt's ids into the params for vLLM's renderer (renderers/online_renderer.py), which has
read them by then; no connector does. They are megabytes, so they go before the rest is measured."""

_current: ContextVar[HttpRequest | None] = ContextVar("kv_shim_http_request", default=None)


_SEEN = "kv_shim_seen"


class Unreadable(ValueError):  # noqa: N818  # a finding about the client's body, not an error of ours
    """The body has the key, but its value can't be sent to an engine."""


class HttpRequest:
    """One HTTP request, as the hand-off needs it; filled while the application reads the body.

    Attributes:
        endpoint: its route.
        owner: id of the engine request that has this request's hand-off; `""` until there is one.
        handed: the owner has params, from wherever.
        mark: what a trusted router mark says, `tried` or `local`; else empty.
        siblings: how many further engine requests it made.
        refused: why the policy refuses it; None if it does not.
        timed_out: the entrypoint gave up on its load.
        reply: watches the response of a request that asked for a hand-off; None for all others.
    """

    __slots__ = (
        "_chunks",
        "_fields",
        "_headers",
        "_names_items",
        "endpoint",
        "handed",
        "mark",
        "owner",
        "refused",
        "reply",
        "siblings",
        "timed_out",
    )

    def __init__(self, scope: Scope) -> None:
        self.endpoint = endpoint_of(scope)
        self.owner = ""
        self.handed = False
        self.mark = ""
        self.siblings = 0
        self.refused: Reason | None = None
        self.timed_out = False
        self.reply = Reply()
        self._headers: list[tuple[bytes, bytes]] = scope.get("headers") or []
        self._chunks: list[bytes] = []
        self._fields: dict[str, msgspec.Raw] | None = None
        self._names_items = False

    def remember(self, chunk: bytes) -> None:
        """Keep a reference to a piece of the body as it streams by."""
        self._chunks.append(chunk)

    def forget(self) -> None:
        """Let go of the body."""
        self._chunks, self._fields = [], {}

    def names_items(self, keys: Iterable[bytes]) -> bool:
        """Whether one of these quoted keys is anywhere in the body; still known once it is forgotten."""
        body = self._body()
        self._names_items = self._names_items or any(key in body for key in keys)
        return self._names_items

    def header(self, name: str) -> bytes | None:
        """The first header of this (lower-case) name."""
        wanted = name.encode()
        return next((value for found, value in self._headers if found == wanted), None)

    def trace(self) -> tuple[str, str]:
        """The caller's traceparent and tracestate; empty if absent or malformed."""
        states = [value for name, value in self._headers if name == b"tracestate"]
        carrier = {"traceparent": self.header("traceparent") or b"", "tracestate": b",".join(states)}
        return trace_context.read({name: value.decode("latin-1") for name, value in carrier.items()})

    def has_key(self, name: str) -> bool:
        """Whether the body is a JSON object with this key, even null; looks at bytes before it parses."""
        return name in self._parsed(name)

    def value(self, name: str) -> Any:
        """The value of a key of the body; None if there is none.

        Raises:
            Unreadable: larger than `PARAMS_BYTES_LIMIT` without `PROMPT_IDS`, nested too deep, or with
                integers past 64 bit.
        """
        raw = self._parsed(name).get(name)
        return None if raw is None else _value(name, bytes(raw))

    def header_value(self, name: str) -> Any:
        """The JSON value of a header; None if there is none.

        Raises:
            Unreadable: no JSON, or as for `value`.
        """
        raw = self.header(name.lower())
        return None if raw is None else _value(name, raw)

    def _parsed(self, name: str) -> dict[str, msgspec.Raw]:
        """The body's top-level fields, if the key's bytes are there at all."""
        if self._fields is not None:
            return self._fields
        body = self._body()
        if f'"{name}"'.encode() not in body:
            return {}
        self._fields = _fields(body)
        return self._fields

    def _body(self) -> bytes:
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0] if self._chunks else b""


class Reply:
    """Looks for the hand-off in a prefill server's response, as its bytes go out.

    Attributes:
        owes: the response should have one; known once an engine request is made, which for a stream is after
            the response's start.
    """

    __slots__ = ("_found", "_ok", "_tail", "owes")

    _HANDOFF = re.compile(rb'"kv_transfer_params"\s*:\s*\{\s*"')
    _OVERLAP = 64

    def __init__(self) -> None:
        self.owes = self._ok = self._found = False
        self._tail = b""

    def lacks_handoff(self, message: Message) -> bool:
        """Take in one ASGI message; true at the end of a good response without a hand-off."""
        if message["type"] == "http.response.start":
            self._ok = message["status"] == HTTPStatus.OK
        if message["type"] != "http.response.body" or not (self.owes and self._ok) or self._found:
            return False
        seen = self._tail + message.get("body", b"")
        self._found = self._HANDOFF.search(seen) is not None
        self._tail = seen[-self._OVERLAP :]
        return not self._found and not message.get("more_body", False)


def _value(name: str, raw: bytes) -> Any:
    if f'"{PROMPT_IDS}"'.encode() in raw:
        raw = _without_prompt_ids(raw)
    if len(raw) > PARAMS_BYTES_LIMIT:
        raise Unreadable(name)
    try:
        value = msgspec.json.decode(raw)
        msgspec.msgpack.encode(value)  # as vLLM will, where it can't be caught for one request
    except (msgspec.MsgspecError, OverflowError, RecursionError, ValueError) as error:
        raise Unreadable(name) from error
    return value


def _without_prompt_ids(raw: bytes) -> bytes:
    """A JSON object without that key, which is not looked into; anything else as it is."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return raw
    fields.pop(PROMPT_IDS, None)
    return msgspec.json.encode(fields)


def _fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a JSON object; empty for anything else, which is vLLM's to refuse."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        pass
    # vLLM takes what Python's json takes (NaN, lone surrogates); read it the same way.
    try:
        loaded = json.loads(body)
        if not isinstance(loaded, dict):
            return {}
        # Of the others (a router's marks) only it matters that they are there.
        return {
            name: msgspec.Raw(json.dumps(value).encode() if name in {KV_PARAMS, EC_PARAMS} else b"null")
            for name, value in loaded.items()
        }
    except (ValueError, RecursionError):
        return {}


_ROUTES = {
    endpoint.value: endpoint for endpoint in Endpoint if endpoint not in {Endpoint.ENGINE, Endpoint.OTHER}
}


def endpoint_of(scope: Scope) -> Endpoint:
    """The route's label: a closed set, whatever path the client asked for."""
    path = scope.get("path", "")
    root = scope.get("root_path", "")
    if root and path.startswith(root):
        path = path[len(root) :]
    return _ROUTES.get(path.rstrip("/"), Endpoint.OTHER)


def current_request() -> HttpRequest | None:
    """The HTTP request being served in this context, if any."""
    return _current.get()


class RequestContext:
    """Middleware: makes `current_request` work for everything that runs to serve a request.

    Args:
        app: what to wrap.

    Attributes:
        gated: a policy may refuse requests after their response has begun.
    """

    gated: ClassVar[bool] = False

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, remembering it; nested installs and other scopes pass straight through."""
        # By the scope, not by the context: a pipelined request starts inside its predecessor's.
        if scope["type"] not in {"http", "websocket"} or _SEEN in scope:
            await self.app(scope, receive, send)
            return
        scope[_SEEN] = True
        request = HttpRequest(scope)

        async def remembering() -> Message:
            message = await receive()
            if message["type"] == "http.request" and (chunk := message.get("body")):
                request.remember(chunk)
            return message

        async def watching(message: Message) -> None:
            try:
                if request.reply.lacks_handoff(message):
                    count(EntrypointEvent.RESPONSE_WITHOUT_HANDOFF, request.endpoint)
            except Exception as error:  # noqa: BLE001  # the reply is vLLM's: a fault of ours fails none
                contained("watching a reply", error, request.endpoint)
            await send(message)

        sending = Gate(lambda: request.refused, watching) if self.gated else watching
        token = _current.set(request)
        try:
            await self.app(scope, remembering, sending)
        finally:
            _current.reset(token)
            request.forget()
