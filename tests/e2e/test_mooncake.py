"""A second real connector with the shim around it: Mooncake over TCP, where the router makes the params up."""

from __future__ import annotations

import importlib
import itertools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scenarios import GREEDY, REMOTE, Scenario, local
from servers import DROPPED, ERRORS, HANDOFFS, INFO, PARAMS, REQUESTS
from traffic import CLOSED, OUTPUT, TOKENS, USAGE, Gained, Traffic, Verdicts, dead_port, settled, wanted

from shim.cli.fleet import HOST
from shim.cli.router import KEY, body
from shim.verdict import Endpoint, Outcome, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers import Bench

    from shim.cli.fleet import Spec
    from shim.cli.router import Prompt

PACKAGE = "mooncake-transfer-engine-non-cuda"
DEBIAN = "libibverbs1 libnuma1 liburing2"


def _missing() -> str:
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        return f"Mooncake cannot be loaded ({error}): it needs PyPI's {PACKAGE} and Debian's {DEBIAN}"
    return ""


MISSING = _missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

SITE = Path(__file__).with_name("mooncake_site")
PREFILL, DECODE = "engine-p", "engine-d"
ROUTES = (Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.GENERATE)
ENTRYPOINT = "vllm:kv_shim_entrypoint_total"
LEASE = 6
"""Seconds that prefill waits for a reader, and a reader for prefill."""


def server(bench: Bench, role: str, engine: str, port: int, **settings: Any) -> Spec:
    """A server of the pair; `port` is of prefill's bootstrap server, where decode learns how to reach it."""
    config = {
        "kv_connector": "shim",
        "kv_role": role,
        "engine_id": engine,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "mooncake_protocol": "tcp",
            "shim": {"connector": "MooncakeConnector", **settings},
        },
    }
    path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_HOST_IP": HOST,
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LEASE),
    }
    return bench.spec(role, kv_transfer_config=config, env=env)


@dataclass(slots=True)
class Mooncake(Traffic):
    """A router for Mooncake: it names the transfer, and knows where prefill is.

    Attributes:
        bootstrap: URL of prefill's bootstrap server.
        numbers: of transfers.
        stopped: prefill replies that ended by a stop token.
    """

    bootstrap: str = ""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    stopped: int = 0

    def __post_init__(self) -> None:
        """No early hand-off: nothing in it would say when it expires."""

    def handoff(self, endpoint: Endpoint, prompt: Prompt, **changes: Any) -> dict[str, Any]:
        """Have prefill compute this prompt and keep it; the params for decode, of which prefill gives none."""
        transfer = f"transfer-{next(self.numbers)}"
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        ask = body(endpoint, prompt, 1) | {KEY: asked} | changes
        (reply,), _ = self.pair.router.post(self.pair.prefill.url, endpoint, ask)
        self.asked += 1
        self.stopped += reply["choices"][0]["finish_reason"] == "stop"
        assert reply.get(KEY) is None
        return self.params(transfer)

    def params(self, transfer: str) -> dict[str, Any]:
        """What decode is told."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_engine_id": PREFILL,
            "remote_bootstrap_addr": self.bootstrap,
        }


@pytest.fixture(scope="module")
def traffic(bench):
    """A pair; what is right is what prefill says without params: it has no prefix cache and loads nothing."""
    port = dead_port()
    pair = bench.pair(
        server(bench, "kv_producer", PREFILL, port, expect_remote="never", normalize_prefill=True),
        server(bench, "kv_consumer", DECODE, port, expect_remote="always"),
    )
    return Mooncake(pair, plain=pair.prefill.url, bootstrap=f"http://{HOST}:{port}")


class Run:
    """What all requests together must have been counted as."""

    def __init__(self, traffic: Mooncake) -> None:
        self.traffic = traffic
        self.decode = traffic.pair.metrics()
        self.prefill = traffic.pair.metrics(traffic.pair.prefill)
        self.verdicts = Verdicts()


@pytest.fixture(scope="module")
def run(traffic):
    """Counted from the first request on."""
    return Run(traffic)


def _pulls(traffic: Mooncake) -> None:
    for route in ROUTES:
        prompt = traffic.prompt()
        traffic.check(route, prompt, traffic.handoff(route, prompt))


def _shorter_than_a_block(traffic: Mooncake) -> None:
    prompt = traffic.prompt(10)
    traffic.check(Endpoint.GENERATE, prompt, traffic.handoff(Endpoint.GENERATE, prompt))


def _beam_search(traffic: Mooncake) -> None:
    prompt = traffic.prompt()
    handoff = traffic.handoff(Endpoint.COMPLETIONS, prompt)
    # vLLM's beam search makes its own SamplingParams: the params come from the body on every version.
    traffic.check(Endpoint.COMPLETIONS, prompt, handoff, use_beam_search=True, max_tokens=2)


def _stop_token(traffic: Mooncake) -> None:
    prompt, route = traffic.prompt(), Endpoint.COMPLETIONS
    first, *_ = traffic.right(route, body(route, prompt, 1))
    stop = {"stop_token_ids": [first]}
    reply = traffic.check(route, prompt, traffic.handoff(route, prompt, **stop), **stop)
    assert reply.output == (first,)
    (choice,) = json.loads(reply.text)["choices"]
    assert choice["finish_reason"] == "stop", "the caller's stop token still ends the caller's answer"


def _lost(traffic: Mooncake) -> None:
    for route in ROUTES:
        prompt = traffic.prompt()
        traffic.handoff(route, prompt)
        traffic.check(route, prompt)


def _reused(traffic: Mooncake) -> None:
    prompt = traffic.prompt()
    handoff = traffic.handoff(Endpoint.CHAT, prompt)
    for _ in range(2):
        traffic.check(Endpoint.CHAT, prompt, handoff)


def _params(*cases: dict[str, Any]) -> Callable[[Mooncake], None]:
    """Params with these changes; `...` takes the key away."""

    def send(traffic: Mooncake) -> None:
        for route, change in zip(itertools.cycle(ROUTES), cases, strict=False):
            changed = traffic.params(f"transfer-{next(traffic.numbers)}") | change
            traffic.check(
                route, traffic.prompt(), {key: value for key, value in changed.items() if value is not ...}
            )

    return send


def _not_even_an_object(traffic: Mooncake) -> None:
    for value in ("", 0):
        traffic.check(Endpoint.COMPLETIONS, traffic.prompt(), vllm_xargs={KEY: value})


def _unknown_transfer(traffic: Mooncake) -> None:
    traffic.check(Endpoint.COMPLETIONS, traffic.prompt(), traffic.params("never-asked-for"))


ABSENT = tuple({key: ...} for key in ("transfer_id", "remote_engine_id", "remote_bootstrap_addr"))
NULL = tuple({key: None} for key in ("transfer_id", "remote_engine_id", "remote_bootstrap_addr"))
FLAGS = ({"do_remote_decode": True}, {"do_remote_prefill": "yes"}, {"do_remote_decode": "false"})
MISROUTED = {"do_remote_prefill": False, "do_remote_decode": True}
SHAPES = (
    {"remote_engine_id": ["engine-p"]},
    {"remote_engine_id": 7},
    {"remote_bootstrap_addr": 8998},
    {"remote_bootstrap_addr": "127.0.0.1"},
    {"transfer_id": 5},
    {"transfer_id": ""},
)
SCENARIOS = (
    Scenario("remote, every route", _pulls, wanted((3, *REMOTE))),
    Scenario("remote, a prompt shorter than a block", _shorter_than_a_block, wanted((1, *REMOTE))),
    Scenario(
        "remote, beam search",
        _beam_search,
        wanted((1, *REMOTE), local(1, Reason.UNSUPPORTED_MODE)),
    ),
    Scenario("remote, a prompt whose first token is a stop token", _stop_token, wanted((1, *REMOTE))),
    Scenario("params_missing", _lost, wanted(local(3, Reason.PARAMS_MISSING))),
    Scenario("handoff_reused", _reused, wanted((1, *REMOTE), local(1, Reason.HANDOFF_REUSED))),
    Scenario("missing keys", _params(*ABSENT), wanted(local(3, Reason.PARAMS_INVALID))),
    Scenario("null keys", _params(*NULL), wanted(local(3, Reason.PARAMS_INVALID))),
    Scenario("flags that are none", _params(*FLAGS), wanted(local(3, Reason.PARAMS_INVALID))),
    # Mooncake asserts on it: a consumer hands nothing off. The hand-off is counted as missing.
    Scenario(
        "a request for prefill",
        _params(MISROUTED),
        wanted((1, Outcome.PREFILL, Reason.NONE)),
        exact=False,
    ),
    Scenario("wrong types", _params(*SHAPES), wanted(local(6, Reason.PARAMS_INVALID))),
    Scenario("no object", _not_even_an_object, wanted(local(2, Reason.PARAMS_INVALID))),
    Scenario(
        "peer_denied",
        _params({"remote_bootstrap_addr": "http://169.254.169.254:80"}),
        wanted(local(1, Reason.PEER_DENIED)),
    ),
    Scenario(
        "a transfer that prefill knows nothing of",
        _unknown_transfer,
        wanted(local(1, Reason.LOAD_FAILED)),
        exact=False,
    ),
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_reason_is_counted_once_and_the_answer_is_a_local_prefills(run, scenario: Scenario) -> None:
    """By the shim's counters, by vLLM's own beside them, and by the output's tokens; status 200 throughout."""
    before = run.traffic.pair.metrics()
    scenario.send(run.traffic)
    run.verdicts += scenario.verdicts

    def complete(gained: Gained) -> bool:
        return (
            gained.verdicts == scenario.verdicts
            and gained.successes == scenario.verdicts.total()
            and (not scenario.exact or gained.local_tokens == gained.explained_tokens)
        )

    gained = settled(run.traffic.pair.metrics, before, complete)
    assert gained.verdicts == scenario.verdicts
    assert gained.successes == scenario.verdicts.total()
    if scenario.exact:
        assert gained.local_tokens == gained.explained_tokens


def test_the_params_come_from_the_body_where_vllm_does_not_pass_them_on(run) -> None:
    """Beam search's only; vLLM 0.32.0 has the others' itself."""
    gained = Gained(run.decode, run.traffic.pair.metrics())
    sources = gained.by(PARAMS, "source", "endpoint")
    assert {key: count for key, count in sources.items() if key[0] == "body"} == {
        ("body", Endpoint.COMPLETIONS.value): 1
    }
    assert sources["extra_args", Endpoint.GENERATE.value] > 0


def test_prefill_survives_malformed_params_too(run) -> None:
    """Each is answered as if it had none, and counted as a hand-off that was not made."""
    traffic, prefill = run.traffic, run.traffic.pair.prefill
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "transfer-p"}
    changes = (
        {"transfer_id": ...},
        {"transfer_id": None},
        {"transfer_id": [1]},
        {"do_remote_decode": "true"},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "do_remote_decode": False},
        traffic.params("transfer-p"),
    )
    before = traffic.pair.metrics(prefill)
    for route, change in zip(itertools.cycle(ROUTES), changes, strict=False):
        params = {key: value for key, value in (asked | change).items() if value is not ...}
        ask = body(route, traffic.prompt(), OUTPUT)
        reply = traffic.post(prefill.url, route, ask | {KEY: params})
        assert reply.status == 200, reply.text[:300]
        assert reply.output == traffic.right(route, ask)

    def complete(gained: Gained) -> bool:
        return gained.successes == 2 * len(changes) and gained.verdicts.total() == 2 * len(changes)

    gained = settled(lambda: traffic.pair.metrics(prefill), before, complete)
    assert gained.by(HANDOFFS, "result", "reason") == {
        ("missing", "other"): len(changes),
        ("missing", "params_missing"): len(changes),
    }
    assert gained.verdicts == {
        ("prefill", "none"): 2 * len(changes),
    }


def test_prefill_keeps_one_prompt_a_transfer(run) -> None:
    """Mooncake's sender holds one request a transfer id: it would never free the blocks of the others."""
    traffic, prefill = run.traffic, run.traffic.pair.prefill
    before = traffic.pair.metrics(prefill)
    traffic.handoff(Endpoint.COMPLETIONS, traffic.prompt(), n=3, **GREEDY)
    gained = settled(lambda: traffic.pair.metrics(prefill), before, lambda gained: gained.successes == 3)
    assert gained.by(HANDOFFS, "result", "reason") == {("issued", "none"): 1, ("missing", "n_gt_1"): 2}


def test_prefill_counts_its_silent_hand_offs_and_their_ends(run) -> None:
    """Issued by keeping the blocks; Mooncake does not say whether they were read, only that they are free."""
    traffic = run.traffic

    def complete(gained: Gained) -> bool:
        return gained.of(CLOSED) == traffic.asked

    gained = settled(lambda: traffic.pair.metrics(traffic.pair.prefill), run.prefill, complete, LEASE + 10)
    assert gained.of(HANDOFFS, result="issued", reason="none") == traffic.asked
    assert gained.of(HANDOFFS, reason="finished_stop") == 0
    assert traffic.stopped == 0
    assert gained.by(CLOSED, "result") == {("unknown",): traffic.asked}
    assert gained.after.total(USAGE) == 0, "every block is free again"
    assert gained.of(ENTRYPOINT) == 0, "a reply without params is what Mooncake's always is"


def test_all_requests_together_were_counted_once(run) -> None:
    """On both idle servers, long after: nothing came late, nothing twice, and every token has its kind."""
    decode = Gained(run.decode, run.traffic.pair.metrics())
    prefill = Gained(run.prefill, run.traffic.pair.metrics(run.traffic.pair.prefill))
    assert decode.verdicts == run.verdicts
    assert decode.by(HANDOFFS, "result", "reason") == {("missing", "other"): 1}
    assert prefill.of(REQUESTS) == prefill.of(REQUESTS, outcome="prefill")
    assert prefill.of(TOKENS) == prefill.of(TOKENS, kind="prefill") == prefill.local_tokens
    for gained in (decode, prefill):
        assert gained.of(REQUESTS) == gained.successes
        assert gained.of(ERRORS) == gained.of(DROPPED) == 0


def test_both_sides_say_what_runs_there(traffic) -> None:
    """The inner connector under its own name, active on each role."""
    for role, one in (("kv_producer", traffic.pair.prefill), ("kv_consumer", traffic.pair.decode)):
        labels = {"connector": "MooncakeConnector", "kv_role": role, "state": "active"}
        assert traffic.pair.metrics(one).total(INFO, **labels) == 1
