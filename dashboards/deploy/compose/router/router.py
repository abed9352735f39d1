"""A small router: prefill first, then decode with prefill's hand-off. To try things out, not for production.

Its environment: PREFILL_URL, DECODE_URL, PORT (8000). A prefill that fails or hands nothing over is no reason
to fail: decode then gets the request alone, and its shim counts why.
"""

from __future__ import annotations

import json
import os
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PREFILL = os.environ.get("PREFILL_URL", "http://localhost:8100")
DECODE = os.environ.get("DECODE_URL", "http://localhost:8200")

FOR_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PASSED_ON = ("authorization", "traceparent", "tracestate")
ROUTES = ("/v1/completions", "/v1/chat/completions")


def prefill_request(body: dict[str, Any]) -> dict[str, Any]:
    """The same prompt for one token, not streamed, marked for hand-off."""
    wanted = {**body, "stream": False, "max_tokens": 1, "n": 1, "kv_transfer_params": FOR_PREFILL}
    wanted.pop("stream_options", None)
    wanted.pop("min_tokens", None)
    if "max_completion_tokens" in wanted:
        wanted["max_completion_tokens"] = 1
    return wanted


def make_app(prefill: httpx.AsyncClient, decode: httpx.AsyncClient) -> FastAPI:  # a few small handlers  # noqa: C901  # a few small handlers
    """The application, over clients whose base URLs are the two servers."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await prefill.aclose()
        await decode.aclose()

    app = FastAPI(lifespan=lifespan)

    async def hand_off(path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        try:
            answer = await prefill.post(path, json=prefill_request(body), headers=headers)
            return answer.json().get("kv_transfer_params") if answer.is_success else None
        except (httpx.HTTPError, ValueError):
            return None

    async def serve(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return JSONResponse({"error": {"message": "the body is no JSON object", "type": "BadRequest"}}, 400)
        headers = {name: value for name, value in request.headers.items() if name in PASSED_ON}
        headers["x-request-id"] = request.headers.get("x-request-id", uuid.uuid4().hex)
        path = request.url.path
        # Also when it is null: the key tells decode that a router tried.
        body["kv_transfer_params"] = await hand_off(path, body, headers)
        answer = await decode.send(decode.build_request("POST", path, json=body, headers=headers), stream=True)

        async def relay() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_bytes():
                    yield chunk
            finally:
                await answer.aclose()

        kind = answer.headers.get("content-type", "application/json")
        return StreamingResponse(relay(), answer.status_code, media_type=kind)

    for route in ROUTES:
        app.post(route)(serve)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> Response:
        answer = await decode.get("/v1/models")
        return Response(answer.content, answer.status_code, media_type="application/json")

    return app


if __name__ == "__main__":
    import uvicorn

    limits = httpx.Limits(max_connections=None)
    clients = [
        httpx.AsyncClient(base_url=url, timeout=None, limits=limits) for url in (PREFILL, DECODE)
    ]  # generation takes as long as it takes
    uvicorn.run(
        make_app(*clients), host="0.0.0.0", port=int(os.environ.get("PORT", "8000"))
    )  # inside a container
