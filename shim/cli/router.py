"""A router in miniature: ask prefill for one token, hand its KV over to decode, answer with decode's reply.

It does what llm-d's sidecar does with vLLM's two-step protocol, on every route: prefill gets
`do_remote_decode`, its reply's `kv_transfer_params` go to decode as they are, and where the reply has
none the request goes to decode without, since an answer that comes late beats none.
"""

from __future__ import annotations

import json
import string
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from shim.verdict import Endpoint

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

KEY = "kv_transfer_params"

ASK_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router sends to prefill, as vLLM's examples and llm-d do."""

_TRACE_HEADERS = ("traceparent", "tracestate")

_TIMEOUT_SECONDS = 120.0

# Characters for which the tokenizer has one token each and no merge: none is in its training sentence.
_LETTERS = string.ascii_uppercase + string.digits
_FIRST_BYTE_TOKEN = 3 - ord("!")  # byte-level alphabet in order from "!", after three special tokens


class RouterError(RuntimeError):
    """A server that refused a request of the router's."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as text and as the tokens that the written model's tokenizer makes of it."""

    text: str

    @classmethod
    def random(cls, length: int, source: random.Random) -> Prompt:
        """`length` tokens that no other prompt starts with."""
        return cls("".join(source.choices(_LETTERS, k=length)))

    @property
    def tokens(self) -> list[int]:
        """One token a character."""
        return [ord(letter) + _FIRST_BYTE_TOKEN for letter in self.text]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request's way: what prefill gave, what decode answered, and how long each took.

    Attributes:
        handoff: the params that prefill's reply carried, None if it carried none.
        prefill_seconds: the round trip to prefill.
        decode_seconds: the round trip to decode, to the last byte.
        chunks: decode's reply; more than one object if it was streamed.
    """

    endpoint: Endpoint
    handoff: Mapping[str, Any] | None
    prefill_seconds: float
    decode_seconds: float
    chunks: tuple[Mapping[str, Any], ...] = field(repr=False)

    @property
    def output(self) -> tuple[int, ...] | str:
        """What the model said: token ids where the route tells them, else text."""
        if self.endpoint is Endpoint.RESPONSES:
            return _responses_text(self.chunks)
        if self.endpoint is Endpoint.MESSAGES:
            return _messages_text(self.chunks)
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return tuple(token for choice in choices for token in choice.get("token_ids") or ())

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length as vLLM counted it; 0 where a stream did not say."""
        for chunk in self.chunks:
            usage = chunk.get("usage") or {}
            for name in ("prompt_tokens", "input_tokens"):
                if usage.get(name):
                    return int(usage[name])
        return 0


def body(endpoint: Endpoint, prompt: Prompt, max_tokens: int, *, model: str = "tiny") -> dict[str, Any]:
    """A request for this route: greedy, `max_tokens` long, with the output's tokens where it can tell them."""
    sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    messages = [{"role": "user", "content": prompt.text}]
    match endpoint:
        case Endpoint.COMPLETIONS:
            return {"model": model, "prompt": prompt.tokens, "return_token_ids": True, **sampling}
        case Endpoint.CHAT:
            return {"model": model, "messages": messages, "return_token_ids": True, **sampling}
        case Endpoint.GENERATE:
            return {"model": model, "token_ids": prompt.tokens, "sampling_params": sampling}
        case Endpoint.RESPONSES:
            length = {"max_output_tokens": max_tokens, "store": False}
            return {"model": model, "input": prompt.text, **length, "temperature": 0, "ignore_eos": True}
        case Endpoint.MESSAGES:
            return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        case _:
            msg = f"router: found route {endpoint.value!r}, wanted one that generates"
            raise RouterError(msg)


@dataclass(frozen=True, slots=True)
class Router:
    """Sends requests to a prefill and a decode server.

    Attributes:
        prefill: prefill's URL.
        decode: decode's URL.
        client: for both.
    """

    prefill: str
    decode: str
    client: httpx.Client

    def send(
        self,
        endpoint: Endpoint,
        prompt: Prompt,
        *,
        max_tokens: int = 16,
        stream: bool = False,
        lose: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Exchange:
        """Send one request by way of prefill.

        Args:
            endpoint: the route.
            prompt: distinct from others, lest a prefix cache answer.
            max_tokens: the answer's length.
            stream: ask decode for a stream.
            lose: drop the params on the way, as a broken router would.
            headers: the caller's; those of W3C trace context are passed on.

        Raises:
            RouterError: a server refused.
            httpx.HTTPError: a server did not answer.
        """
        passed = {name: value for name, value in (headers or {}).items() if name.lower() in _TRACE_HEADERS}
        ask = body(endpoint, prompt, 1) | {KEY: dict(ASK_PREFILL)}
        (reply,), prefill_seconds = self.post(self.prefill, endpoint, ask, passed)
        handoff = reply.get(KEY)
        ask = body(endpoint, prompt, max_tokens)
        if handoff is not None and not lose:
            ask[KEY] = handoff
        if stream:
            ask["stream"] = True
        chunks, decode_seconds = self.post(self.decode, endpoint, ask, passed)
        return Exchange(endpoint, handoff, prefill_seconds, decode_seconds, tuple(chunks))

    def post(
        self, url: str, endpoint: Endpoint, ask: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> tuple[list[Mapping[str, Any]], float]:
        """One request to one server: its reply's JSON objects, and seconds to the last byte.

        Raises:
            RouterError: it refused.
            httpx.HTTPError: it did not answer.
        """
        began = time.perf_counter()
        response = self.client.post(url + endpoint.value, json=ask, headers=headers, timeout=_TIMEOUT_SECONDS)
        seconds = time.perf_counter() - began
        if response.status_code != httpx.codes.OK:
            answer = response.text[:300]
            msg = f"{url}{endpoint.value}: found status {response.status_code}, wanted 200: {answer}"
            raise RouterError(msg)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return _events(response.text), seconds
        return [response.json()], seconds


def client() -> httpx.Client:
    """A client for servers on this machine: no proxy stands between."""
    return httpx.Client(trust_env=False)


def _events(text: str) -> list[Mapping[str, Any]]:
    data = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]


def _responses_text(chunks: tuple[Mapping[str, Any], ...]) -> str:
    deltas = [chunk["delta"] for chunk in chunks if chunk.get("type") == "response.output_text.delta"]
    items = [item for chunk in chunks for item in chunk.get("output", ())]
    parts = [part for item in items for part in item.get("content") or ()]
    return "".join([*deltas, *(part.get("text", "") for part in parts)])


def _messages_text(chunks: tuple[Mapping[str, Any], ...]) -> str:
    deltas = [chunk["delta"] for chunk in chunks if chunk.get("type") == "content_block_delta"]
    parts = [part for chunk in chunks for part in chunk.get("content", ())]
    return "".join(part.get("text", "") for part in (*deltas, *parts))
