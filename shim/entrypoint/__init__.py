"""The API server's half: remembers HTTP requests and attaches what it knows to engine requests.

Installed when a config that uses the shim is settled, or by `SHIM_ENTRYPOINT=1` on a server without one.
"""

from __future__ import annotations

import contextlib
from typing import Any

from shim.config import DISABLE_ENV, Settings, flag
from shim.entrypoint import counters, handoff
from shim.entrypoint.middleware import RequestContext
from shim.patch import wrap_once


def install(settings: Settings, config: Any, model_config: Any = None) -> None:
    """Hook the middleware, the hand-off and the counters into this process's vLLM. Idempotent.

    Args:
        settings: the operator's.
        config: vLLM's `KVTransferConfig`, None on a server without a connector.
        model_config: vLLM's `ModelConfig`.

    With `SHIM_DISABLE` set only `info` is exported, so that a shim disabled on purpose shows.
    """
    from fastapi import FastAPI  # noqa: PLC0415  # `import shim.entrypoint` must stay light
    from vllm.v1.engine import core_client  # noqa: PLC0415
    from vllm.v1.metrics.loggers import PrometheusStatLogger  # noqa: PLC0415

    from shim.connector.screening import profile_of  # noqa: PLC0415

    disabled = flag(DISABLE_ENV)
    counters.install(PrometheusStatLogger, disabled=disabled)
    if disabled:
        return
    handoff.server.has_connector = config is not None and config.kv_connector is not None
    handoff.server.silent = handoff.server.has_connector and profile_of(config).hands_off_silently
    handoff.server.settings = settings
    handoff.server.hashing = _hashing(model_config)
    _install_policy(settings, config)
    wrap_once(FastAPI, "build_middleware_stack", _in_context)
    for name in dir(core_client):
        cls = getattr(core_client, name)
        if (
            isinstance(cls, type)
            and issubclass(cls, core_client.EngineCoreClient)
            and cls is not core_client.EngineCoreClient
            and "add_request_async" in vars(cls)
        ):
            wrap_once(cls, "add_request_async", _attaching)


def _hashing(model_config: Any) -> str:
    """What vLLM's hashes of multimodal items depend on besides the items (multimodal/processing/inputs.py)."""
    from vllm import __version__  # noqa: PLC0415  # needs vLLM

    multimodal = getattr(model_config, "multimodal_config", None)
    if multimodal is None:
        return ""
    return f"{__version__} {multimodal.mm_hasher_algorithm} {model_config.model}"


def _install_policy(settings: Settings, config: Any) -> None:
    """Only where the operator set one, and never on a server that only prefills."""
    active = settings.on_local_prefill != "allow" or settings.load_timeout is not None
    if not active or not handoff.server.has_connector or config.kv_role == "kv_producer":
        return
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415  # needs vLLM

    from shim.entrypoint import policy  # noqa: PLC0415

    policy.install(AsyncLLM, policy.Policy(settings, config))
    RequestContext.gated = settings.on_local_prefill != "allow"


def _in_context(build_middleware_stack: Any) -> Any:
    """Put `RequestContext` around every application's middleware stack, outermost.

    Works where the server module is `__main__` and no option names a middleware.
    """

    def build(self: Any) -> Any:
        return RequestContext(build_middleware_stack(self))

    return build


def _attaching(add_request_async: Any) -> Any:
    """Have every engine request pass `attach`: it also sees children of `n > 1` and rejection clean-ups."""

    async def add(self: Any, request: Any) -> None:
        try:
            handoff.attach(request)
        except Exception as error:  # noqa: BLE001  # see below
            # The request goes on as vLLM made it, but for what only we may say: a fault of ours fails none.
            with contextlib.suppress(Exception):
                handoff.strip(request)
            counters.contained("the hand-off", error)
        await add_request_async(self, request)

    return add
