"""`shim demo`: the bug on real servers, the same traffic with the shim, and a loss explained.

One prefill and one decode server of this Python's vLLM, twice: with plain NIXL, then with
`kv_connector: "shim"`. Every number but the times comes from vLLM's own `/metrics`.
"""

from __future__ import annotations

import random
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from shim.cli import model
from shim.cli.fleet import Environment, FleetError, Spec, nixl, running
from shim.cli.measure import count, interleave, merge
from shim.cli.metrics import scrape
from shim.cli.narrate import Narrator
from shim.cli.router import Prompt, Router, RouterError, client
from shim.cli.tables import RATIO_LIMIT, Phase, increases, risen, traffic
from shim.telemetry.catalog import PARAMS, PROMPT_TOKENS, REQUESTS
from shim.verdict import Endpoint, Outcome, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rich.console import Console

ROUTES = (Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.GENERATE)

BUG_UNTIL = (0, 29)
"""From here on vLLM itself passes the params on `/inference/v1/generate`."""

_MODEL = "large"
_AGAIN = 3
_LOST_PROMPT = 1000  # long enough to be seen, short enough not to be waited for


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        python: of an environment with vLLM and the shim.
        models: folder of the written models.
        logs: folder for the servers' logs.
        rounds: requests on each route, in each phase.
        length: of a prompt, in tokens.
    """

    python: Path
    models: Path
    logs: Path
    rounds: int
    length: int


def run(plan: Plan, console: Console) -> int:
    """Run it all and print it; the process's exit code.

    Returns:
        0 if with the shim every request was pulled, no route took more than `RATIO_LIMIT` times as
        long as completions, and the counters explained the loss; else 1. 130 after Ctrl-C.
    """
    began = time.monotonic()
    try:
        with Narrator(console) as narrator:
            wrong = _phases(plan, console, narrator)
    except KeyboardInterrupt:
        console.print("\nStopped; no server is left running.")
        return 130
    except (FleetError, RouterError, httpx.HTTPError) as error:
        console.print(f"[red]The demo broke off.[/] {type(error).__name__}:")
        console.print(str(error), markup=False, highlight=False)
        return 1
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    for line in wrong:
        console.print(f"[red]WRONG[/] {line}")
    console.print(f"{'[red]FAILED[/]' if wrong else '[green]OK[/]'} after {minutes} min {seconds} s")
    return 1 if wrong else 0


def _phases(plan: Plan, console: Console, narrator: Narrator) -> list[str]:
    environment = Environment.of(plan.python)
    _write_model(plan, narrator)
    plain = _pair(plan, environment, "plain", nixl(), nixl())
    with running(*plain, logs=plan.logs, progress=narrator) as (prefill, decode), client() as http:
        before = _measure(plan, Router(prefill.url, decode.url, http), narrator, "plain NIXL")
    shim = _pair(plan, environment, "shim", _shim("never"), _shim("always"))
    with running(*shim, logs=plan.logs, progress=narrator) as (prefill, decode), client() as http:
        router = Router(prefill.url, decode.url, http)
        after = _measure(plan, router, narrator, "shim", settle=True)
        console.print(traffic(environment.version, plan.length, (before, after)))
        console.print(_comment(environment.release, before, after))
        return [*_faults(after), *_lose(router, console, narrator)]


def _shim(expect_remote: str) -> dict[str, Any]:
    settings = {"shim": {"expect_remote": expect_remote}}
    return nixl(kv_connector="shim", kv_connector_extra_config=settings)


def _pair(
    plan: Plan, environment: Environment, phase: str, prefill: dict[str, Any], decode: dict[str, Any]
) -> list[Spec]:
    path = model.model_path(plan.models, _MODEL)
    return [
        Spec(name=f"{phase}-{side}", environment=environment, model=path, kv_transfer_config=config)
        for side, config in (("prefill", prefill), ("decode", decode))
    ]


def _write_model(plan: Plan, narrator: Narrator) -> None:
    if model.is_written(plan.models, _MODEL):
        return
    narrator("writing a random Llama of 21 M parameters")
    # By the environment's Python, since it takes torch; by path, since it imports nothing of the shim.
    command = [str(plan.python), model.__file__, _MODEL, "--into", str(plan.models)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # all ours
    if done.returncode:
        msg = f"model: found exit code {done.returncode}, wanted a model in {plan.models}:\n{done.stderr}"
        raise FleetError(msg)


def _measure(plan: Plan, router: Router, narrator: Narrator, title: str, *, settle: bool = False) -> Phase:
    source = random.Random()  # noqa: S311  # prompts, no secrets
    tell = narrator.prefixed(f"{title}: ")
    tell("first contact between the servers")
    # The first pull of all sets the connection up, which is no route's own cost.
    router.send(Endpoint.COMPLETIONS, Prompt.random(64, source), max_tokens=1)
    phase = Phase(title, interleave(router, ROUTES, plan.rounds, plan.length, source, tell))
    for _ in range(_AGAIN if settle else 0):
        if phase.slowest() <= RATIO_LIMIT:
            break
        # A few samples on a busy machine prove little: as many again, and all of them count.
        again = narrator.prefixed(f"{title}, again: ")
        more = interleave(router, ROUTES, plan.rounds, plan.length, source, again)
        phase = Phase(title, merge(phase.rows, more))
    return phase


def _comment(version: tuple[int, int], before: Phase, after: Phase) -> str:
    route = Endpoint.GENERATE
    if version >= BUG_UNTIL:
        return f"This vLLM passes the params on {route.value} itself: there is no bug to show."
    redone, left = (phase.rows[route].tokens.local for phase in (before, after))
    return (
        f"This vLLM drops kv_transfer_params on {route.value}: decode prefilled {redone:,} tokens anew "
        f"(ratio {before.ratio(route):.2f}) and said so nowhere. With the shim: {left:,} (ratio "
        f"{after.ratio(route):.2f})."
    )


def _faults(phase: Phase) -> Iterable[str]:
    for endpoint, row in phase.rows.items():
        if row.pulls < len(row.samples):
            yield f"{endpoint.value}: {row.pulls} of {len(row.samples)} pulled with the shim, wanted all"
        ratio = phase.ratio(endpoint)
        if ratio > RATIO_LIMIT:
            yield f"{endpoint.value}: ratio {ratio:.2f} with the shim, wanted at most {RATIO_LIMIT}"


def _lose(router: Router, console: Console, narrator: Narrator) -> list[str]:
    """Drop the params of one request a route, and show what decode's counters make of it."""
    source = random.Random()  # noqa: S311  # prompts, no secrets
    before = scrape(router.client, router.decode)
    tokens = 0
    for endpoint in ROUTES:
        narrator(f"shim: a router that loses the params on {endpoint.value}")
        tokens += count(router, endpoint, Prompt.random(_LOST_PROMPT, source), lose=True).tokens.local
    after = scrape(router.client, router.decode)
    title = f"A router loses the params of {len(ROUTES)} requests; what decode's /metrics say of it"
    console.print(risen((REQUESTS, PROMPT_TOKENS, PARAMS), before, after, title))
    found = dict(increases(REQUESTS, before, after))
    wanted = {(Outcome.LOCAL_PREFILL.value, Reason.PARAMS_MISSING.value): float(len(ROUTES))}
    if found == wanted:
        console.print(
            f"{len(ROUTES)} requests, {tokens:,} tokens prefilled on decode because the params were "
            "missing: what a router lost is counted, with its reason."
        )
        return []
    return [f"{REQUESTS.wire_name} rose by {found}, wanted {wanted}"]
