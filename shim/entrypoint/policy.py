"""What the entrypoint does about local prefills, where the operator asked for more than counting.

`on_local_prefill` refuses what the API server itself can know to be a fault; `load_timeout` bounds the wait
for remote KV. Both are off by default, and then nothing of this is installed.
"""

from __future__ import annotations

import asyncio
import functools
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from shim.connector.admission import fault_reason
from shim.connector.claims import Unclaimed
from shim.connector.recover import KV_PARAMS, copied, is_set
from shim.connector.screening import guard_for
from shim.entrypoint.counters import contained, count
from shim.entrypoint.handoff import recovered
from shim.entrypoint.middleware import current_request
from shim.patch import wrap_once
from shim.telemetry.catalog import EntrypointEvent
from shim.verdict import Endpoint, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from shim.config import Settings
    from shim.connector.guard import Screened
    from shim.entrypoint.middleware import HttpRequest

REFUSABLE = frozenset(
    {
        Reason.PARAMS_MISSING,
        Reason.PARAMS_EMPTY,
        Reason.PARAMS_NOT_REMOTE,
        Reason.PARAMS_INVALID,
        Reason.PEER_DENIED,
    }
)
"""What can be known before the engine is asked; a reason found later is served locally and counted."""


class RefusedError(ValueError):
    """A request that would be prefilled here though it should not be; vLLM turns it into an answer."""


class Policy:
    """Decides per generation, before the engine is asked.

    Args:
        settings: the operator's.
        config: vLLM's `KVTransferConfig`, which names the inner connector.
    """

    def __init__(self, settings: Settings, config: Any) -> None:
        self._limit = {"allow": None, "refuse": 0}.get(
            str(settings.on_local_prefill), settings.on_local_prefill
        )
        self.load_timeout = settings.load_timeout
        # Whose a hand-off is and which peer may be tried are the engine's to say: nothing is kept of either.
        self.guard = guard_for(config, settings, claims=Unclaimed())
        self._expect = settings.expectation(config.kv_role)

    def screen(self, params: object, prompt_tokens: int) -> Screened:
        """What the connector will make of these params, as far as can be known here."""
        return self.guard.screen("", params, prompt_tokens=prompt_tokens)

    def refuses(self, http: HttpRequest, sampling: Any, prompt_tokens: int | None) -> Reason | None:
        """Why this generation is refused; None if it is not."""
        if not isinstance(self._limit, int) or http.owner:
            return None  # allowed, or a further engine request of one that was let through
        if self._limit and (prompt_tokens is None or prompt_tokens <= self._limit):
            return None
        found = recovered(http, sampling.extra_args or {})
        params = (sampling.extra_args or {}).get(KV_PARAMS)
        params = found.kv if params is None else params
        reason = fault_reason(
            self.screen(params, prompt_tokens or 0).reason,
            self._expect,
            asked=found.asked or params is not None,
            mark=http.mark,
            unreadable=found.unreadable,
        )
        return reason if reason in REFUSABLE else None

    def check(self, http: HttpRequest | None, sampling: Any, prompt: Any) -> None:
        """Let a generation pass.

        Raises:
            RefusedError: it is refused; counted, and the middleware answers.
        """
        if http is None:  # embedded use, health checks and warm-up come without a request
            return
        try:
            reason = self.refuses(http, sampling, prompt_length(prompt))
        except Exception as error:  # noqa: BLE001  # a fault of ours refuses nobody
            contained("its policy", error, http.endpoint)
            return
        if reason is None:
            return
        http.refused = reason
        count(EntrypointEvent.REFUSED, http.endpoint)
        msg = f"kv_shim: {reason}: this prompt would be prefilled on a decode server"
        raise RefusedError(msg)

    def bounds(self, http: HttpRequest | None, sampling: Any) -> bool:
        """Whether this generation waits for remote KV under a bound; a fault of ours bounds nobody."""
        if self.load_timeout is None:
            return False
        try:
            # Children of one request would come out one by one.
            alone = sampling.n == 1 or not _is_final_only(sampling)
            return alone and waits_for_load(http, sampling.extra_args or {})
        except Exception as error:  # noqa: BLE001  # see the docstring
            contained("its policy", error, Endpoint.OTHER if http is None else http.endpoint)
            return False


def install(llm_class: type[Any], policy: Policy) -> None:
    """Put the policy in front of `AsyncLLM.generate`."""
    wrap_once(llm_class, "generate", functools.partial(_governed, policy))


def _governed(policy: Policy, original: Any) -> Any:
    async def generate(
        self: Any, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        http = current_request()
        policy.check(http, sampling_params, prompt)
        loads = policy.bounds(http, sampling_params)
        final_only = loads and _is_final_only(sampling_params)
        first_try = _cumulative(sampling_params) if final_only else sampling_params
        async with aclosing(original(self, prompt, first_try, request_id, **options)) as outputs:
            try:
                output = await asyncio.wait_for(anext(outputs, None), policy.load_timeout if loads else None)
            except TimeoutError:
                output = None
            else:
                loads = False
                while output is not None:
                    if not final_only or output.finished:
                        yield output
                    output = await anext(outputs, None)
        if not loads:
            return
        # Cancelling the first try has aborted it; its blocks stay with the inner connector until it reports.
        count(EntrypointEvent.LOAD_TIMEOUT, Endpoint.OTHER if http is None else http.endpoint)
        if http is not None:
            http.timed_out = True
        without = {
            name: value for name, value in (sampling_params.extra_args or {}).items() if name != KV_PARAMS
        }
        again = copied(sampling_params, without or None)
        async with aclosing(original(self, prompt, again, request_id, **options)) as outputs:
            async for output in outputs:
                yield output

    return generate


def _is_final_only(sampling: Any) -> bool:
    return getattr(sampling.output_kind, "name", "") == "FINAL_ONLY"


def _cumulative(sampling: Any) -> Any:
    """A copy whose outputs come as they are made, each whole: a final-only one shows nothing before its end."""
    clone = copied(sampling, sampling.extra_args)
    clone.output_kind = type(sampling.output_kind).CUMULATIVE
    return clone


def waits_for_load(http: HttpRequest | None, extra_args: dict[str, Any]) -> bool:
    """Whether this generation's params, from wherever, ask for a load."""
    params = extra_args.get(KV_PARAMS)
    if params is None and http is not None and not http.owner:
        params = recovered(http, extra_args).kv
    return is_set(params, "do_remote_prefill")


def prompt_length(prompt: Any) -> int | None:
    """Tokens of a rendered prompt; None if vLLM has not tokenized it yet."""
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    tokens = getattr(prompt, "prompt_token_ids", None) if tokens is None else tokens
    return None if tokens is None else len(tokens)
