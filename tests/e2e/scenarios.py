"""Traffic for every reason that a NIXL pair on CPUs can produce, with the verdicts it must get.

A NIXL decode offers the whole rest of a prompt whatever its length and always has a token left to load, so
`no_match`, `partial_match`, `local_cache` and `below_threshold` need a scripted connector (tests/contract).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from traffic import BYPASS, LEASE, OUTPUT, SKEW, Traffic, Verdicts, dead_port, leave, silent_peer, wanted

from shim.cli.router import KEY, body
from shim.verdict import Endpoint, Outcome, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from shim.cli.router import Prompt

COMPLETIONS, CHAT, GENERATE = Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.GENERATE
ROUTES = (COMPLETIONS, CHAT, GENERATE, Endpoint.RESPONSES, Endpoint.MESSAGES)
REMOTE = (Outcome.REMOTE, Reason.NONE)
# Greedy by another name: vLLM refuses `n` over 1 at temperature 0.
GREEDY = {"temperature": 0.01, "top_k": 1}


@dataclass(frozen=True, slots=True)
class Scenario:
    """Some requests to decode.

    Attributes:
        name: the reason, and what brings it about.
        send: sends them and checks their answers.
        verdicts: theirs; None = `send` returns them.
        unread: hand-offs that nobody reads, so that they expire on prefill.
        exact: vLLM's own token counts can be compared; it books failed loads as remote.
        since: the first vLLM that shows it.
    """

    name: str
    send: Callable[[Traffic], Verdicts | None]
    verdicts: Verdicts | None = None
    unread: int = 0
    exact: bool = True
    since: tuple[int, int] = field(default=(0, 28))


def local(count: int, reason: Reason) -> tuple[int, Outcome, Reason]:
    """So many prefilled here for a fault."""
    return count, Outcome.LOCAL_PREFILL, reason


def _pulls(traffic: Traffic) -> None:
    for route in ROUTES:
        prompt = traffic.prompt()
        traffic.check(route, prompt, traffic.handoff(route, prompt))


def _the_same_prompt_twice(traffic: Traffic) -> None:
    prompt = traffic.prompt()
    for _ in range(2):
        traffic.check(COMPLETIONS, prompt, traffic.handoff(COMPLETIONS, prompt))


def _salted_for_prefill_alone(traffic: Traffic) -> None:
    prompt = traffic.prompt()
    traffic.check(COMPLETIONS, prompt, traffic.handoff(COMPLETIONS, prompt, cache_salt="pepper"))


def _shorter_than_a_block(traffic: Traffic) -> None:
    prompt = traffic.prompt(10)
    traffic.check(GENERATE, prompt, traffic.handoff(GENERATE, prompt))


def _params(*cases: tuple[Endpoint, object]) -> Callable[[Traffic], None]:
    def send(traffic: Traffic) -> None:
        for route, params in cases:
            traffic.check(route, traffic.prompt(), params)

    return send


def _invalid(traffic: Traffic) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {"remote_block_ids": [1, 2]},
        {"remote_block_ids": None},
        {"remote_host": None},
        {"remote_port": "abc"},
        {"tp_size": 10**9},
    )
    for route, change in zip(ROUTES, changes, strict=True):
        prompt = traffic.prompt()
        traffic.check(route, prompt, traffic.handoff(route, prompt) | change)
    for route, params in ((COMPLETIONS, {"do_remote_prefill": True}), (GENERATE, {"do_remote_prefill": "yes"})):
        traffic.check(route, traffic.prompt(), params)


def _denied(traffic: Traffic) -> None:
    for route, host in ((COMPLETIONS, "169.254.169.254"), (GENERATE, "224.0.0.1")):
        prompt = traffic.prompt()
        traffic.check(route, prompt, traffic.handoff(route, prompt) | {"remote_host": host})


def _reused_later(traffic: Traffic) -> None:
    prompt = traffic.prompt()
    handoff = traffic.handoff(COMPLETIONS, prompt)
    for _ in range(2):
        traffic.check(COMPLETIONS, prompt, handoff)


def _reused_at_once(traffic: Traffic) -> None:
    prompt = traffic.prompt()
    handoff = traffic.handoff(GENERATE, prompt)
    traffic.at_once(*[lambda: traffic.check(GENERATE, prompt, handoff)] * 3)


def _three_answers(traffic: Traffic) -> None:
    prompt = traffic.prompt()
    traffic.check(COMPLETIONS, prompt, traffic.handoff(COMPLETIONS, prompt), n=3, **GREEDY)


def _list_of_prompts(traffic: Traffic) -> None:
    prompt, other = traffic.prompt(), traffic.prompt()
    handoff = traffic.handoff(COMPLETIONS, prompt)
    traffic.check(COMPLETIONS, prompt, handoff, prompt=[prompt.tokens, other.tokens])


def _mismatched(traffic: Traffic) -> None:
    for change in (_longer, _shorter, _another):
        prompt = traffic.prompt()
        traffic.check(COMPLETIONS, change(prompt), traffic.handoff(COMPLETIONS, prompt))


def _longer(prompt: Prompt) -> Prompt:
    return type(prompt)(prompt.text + prompt.text[:70])


def _shorter(prompt: Prompt) -> Prompt:
    return type(prompt)(prompt.text[:-70])


def _another(prompt: Prompt) -> Prompt:
    return type(prompt)(prompt.text[::-1])


def _expired(traffic: Traffic) -> None:
    prompt, handoff, issued = traffic.early
    time.sleep(max(0.0, issued + LEASE + SKEW + 0.2 - time.monotonic()))
    traffic.check(COMPLETIONS, prompt, handoff)


def _beam(traffic: Traffic) -> Verdicts:
    prompt, steps = traffic.prompt(), 4
    handoff = traffic.handoff(COMPLETIONS, prompt)
    traffic.check(COMPLETIONS, prompt, handoff, use_beam_search=True, n=2, max_tokens=steps)
    # The first step has one beam, the others two.
    later = 2 * (steps - 1)
    return wanted(
        (1, *REMOTE),
        local(1, Reason.UNSUPPORTED_MODE),
        (later - 1, Outcome.LOCAL_INTENDED, Reason.NOT_DISAGGREGATED),
    )


def _prompt_logprobs(traffic: Traffic) -> None:
    prompt = traffic.prompt()
    traffic.check(COMPLETIONS, prompt, traffic.handoff(COMPLETIONS, prompt), prompt_logprobs=1)


def _bypassed(traffic: Traffic) -> None:
    for route in (COMPLETIONS, Endpoint.MESSAGES):
        traffic.check(route, traffic.prompt(), headers={BYPASS: "1"})


def elsewhere(handoff: dict[str, Any], port: int, engine_id: str) -> dict[str, Any]:
    """The hand-off, as if another server had issued it."""
    return handoff | {"remote_port": port, "remote_engine_id": engine_id}


def _dead_peer(traffic: Traffic) -> None:
    port = dead_port()

    def one() -> None:
        prompt = traffic.prompt()
        handoff = traffic.handoff(COMPLETIONS, prompt)
        traffic.check(COMPLETIONS, prompt, elsewhere(handoff, port, f"dead-{port}"))

    traffic.at_once(one, one, one)
    for _ in range(3):
        one()


def _leaving(traffic: Traffic) -> None:
    with silent_peer() as port:

        def one() -> None:
            prompt = traffic.prompt()
            handoff = elsewhere(traffic.handoff(COMPLETIONS, prompt), port, f"silent-{port}")
            leave(traffic, COMPLETIONS, {**body(COMPLETIONS, prompt, OUTPUT), KEY: handoff}, after=1.0)

        traffic.at_once(one, one)


SCENARIOS = (
    Scenario("remote, every route", _pulls, wanted((5, *REMOTE))),
    Scenario("remote, the same prompt twice", _the_same_prompt_twice, wanted((2, *REMOTE))),
    Scenario("remote, a cache salt on prefill's leg only", _salted_for_prefill_alone, wanted((1, *REMOTE))),
    Scenario("remote, a prompt shorter than a block", _shorter_than_a_block, wanted((1, *REMOTE))),
    Scenario(
        "params_missing, every route",
        _params(*[(route, ...) for route in ROUTES], (COMPLETIONS, None)),
        wanted(local(6, Reason.PARAMS_MISSING)),
    ),
    Scenario(
        "params_empty",
        _params(*[(route, {}) for route in (COMPLETIONS, CHAT, GENERATE)]),
        wanted(local(3, Reason.PARAMS_EMPTY)),
    ),
    Scenario(
        "params_not_remote",
        _params(*[(route, {"do_remote_prefill": False}) for route in ROUTES[1:]]),
        wanted(local(4, Reason.PARAMS_NOT_REMOTE)),
    ),
    Scenario("params_invalid", _invalid, wanted(local(7, Reason.PARAMS_INVALID)), unread=5),
    Scenario("peer_denied", _denied, wanted(local(2, Reason.PEER_DENIED)), unread=2),
    Scenario("handoff_reused, later", _reused_later, wanted((1, *REMOTE), local(1, Reason.HANDOFF_REUSED))),
    Scenario("handoff_reused, at once", _reused_at_once, wanted((1, *REMOTE), local(2, Reason.HANDOFF_REUSED))),
    Scenario("handoff_reused, n: 3", _three_answers, wanted((1, *REMOTE), local(2, Reason.HANDOFF_REUSED))),
    Scenario(
        "handoff_reused, a list of prompts",
        _list_of_prompts,
        wanted((1, *REMOTE), local(1, Reason.HANDOFF_REUSED)),
    ),
    Scenario("handoff_mismatch", _mismatched, wanted(local(3, Reason.HANDOFF_MISMATCH))),
    Scenario("unsupported_mode and not_disaggregated, beam search", _beam),
    Scenario(
        "unsupported_mode, prompt_logprobs",
        _prompt_logprobs,
        wanted(local(1, Reason.UNSUPPORTED_MODE)),
        since=(0, 32),
    ),
    Scenario("router_bypass", _bypassed, wanted((2, Outcome.LOCAL_INTENDED, Reason.ROUTER_BYPASS))),
    Scenario(
        "aborted, a client leaves mid-load",
        _leaving,
        wanted((2, Outcome.ABORTED, Reason.NONE)),
        unread=2,
        exact=False,
    ),
    Scenario(
        "load_failed, then peer_unavailable",
        _dead_peer,
        wanted(local(3, Reason.LOAD_FAILED), local(3, Reason.PEER_UNAVAILABLE)),
        unread=6,
        exact=False,
    ),
    Scenario("handoff_expired", _expired, wanted(local(1, Reason.HANDOFF_EXPIRED)), unread=1),
    Scenario("remote again, every route", _pulls, wanted((5, *REMOTE))),
)
