"""Every route between a `kv_producer` and a `kv_consumer`: the params arrive and the tokens are right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from servers import ERRORS, HANDOFFS, PARAMS, REQUESTS, shim

from shim.cli.measure import TAIL, count, counted
from shim.cli.metrics import Tokens
from shim.cli.router import ASK_PREFILL, KEY, Exchange, body
from shim.verdict import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUTES = (
    Endpoint.COMPLETIONS,
    Endpoint.CHAT,
    Endpoint.GENERATE,
    Endpoint.RESPONSES,
    Endpoint.MESSAGES,
)
ENTRYPOINT = "vllm:kv_shim_entrypoint_total"
MEGABYTES_10 = 10 * 1024 * 1024
OUTPUT = 16


@pytest.fixture(scope="module")
def pair(bench):
    """The shim on both sides, with the roles' own defaults, and a vLLM without any connector beside."""
    return bench.pair(
        bench.spec("producer", kv_transfer_config=shim("kv_producer")),
        bench.spec("consumer", kv_transfer_config=shim("kv_consumer")),
        bench.spec("plain"),
    )


def plain_output(pair, endpoint, prompt) -> tuple[int, ...] | str:
    """What a vLLM without a connector says to this prompt."""
    (reply,), _ = pair.router.post(pair.others[0].url, endpoint, body(endpoint, prompt, OUTPUT))
    return Exchange(endpoint, None, 0.0, 0.0, (reply,)).output


@pytest.mark.parametrize("endpoint", ROUTES, ids=lambda endpoint: endpoint.value)
def test_a_route_pulls_its_prompt_and_says_what_a_plain_vllm_says(pair, endpoint) -> None:
    """Remote KV, and not one output token different."""
    prompt = pair.prompt()
    before = pair.metrics()
    sample = count(pair.router, endpoint, prompt)
    assert sample.pulled, sample
    assert sample.exchange.output == plain_output(pair, endpoint, prompt)
    assert len(sample.exchange.output) > 0
    after = pair.metrics()
    assert after.total(REQUESTS, outcome="remote") == before.total(REQUESTS, outcome="remote") + 1
    found = after.total(PARAMS, endpoint=endpoint.value) - after.total(
        PARAMS, endpoint=endpoint.value, source="none"
    )
    assert found == 1, "the params' source is counted under the route's own name"


@pytest.mark.parametrize("endpoint", ROUTES, ids=lambda endpoint: endpoint.value)
def test_a_streamed_reply_is_pulled_and_says_what_a_plain_vllm_says(pair, endpoint) -> None:
    """Streaming goes another way through every route's code."""
    prompt = pair.prompt()
    before = Tokens.of(pair.metrics())
    exchange = pair.router.send(endpoint, prompt, stream=True)
    gained = counted(pair.router, before, len(prompt.text))
    assert len(exchange.chunks) > 1
    assert gained.pulled >= len(prompt.text) - TAIL
    assert gained.local <= TAIL
    assert exchange.output == plain_output(pair, endpoint, prompt)


def test_prompts_differ_in_what_the_model_says_to_them(pair) -> None:
    """Without this, equal outputs would prove nothing."""
    said = {plain_output(pair, Endpoint.COMPLETIONS, pair.prompt()) for _ in range(4)}
    assert len(said) == 4


def test_ten_megabytes_sent_in_chunks_lose_no_params(pair) -> None:
    """The key stands behind 10 MB that vLLM ignores, in a body without a length."""
    prompt = pair.prompt()
    asked = {**body(Endpoint.GENERATE, prompt, 1), KEY: dict(ASK_PREFILL)}
    (reply,), _ = pair.router.post(pair.prefill.url, Endpoint.GENERATE, asked)
    text = json.dumps(
        {"padding": "x" * MEGABYTES_10, **body(Endpoint.GENERATE, prompt, OUTPUT), KEY: reply[KEY]}
    )
    before = Tokens.of(pair.metrics())
    response = pair.router.client.post(
        pair.decode.url + Endpoint.GENERATE.value,
        content=_chunks(text.encode()),
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert response.status_code == 200, response.text[:300]
    gained = counted(pair.router, before, len(prompt.text))
    assert gained.pulled >= len(prompt.text) - TAIL
    assert tuple(response.json()["choices"][0]["token_ids"]) == plain_output(pair, Endpoint.GENERATE, prompt)


def _chunks(data: bytes) -> Iterator[bytes]:
    yield from (data[at : at + 65_536] for at in range(0, len(data), 65_536))


@pytest.mark.parametrize("endpoint", ROUTES, ids=lambda endpoint: endpoint.value)
def test_a_body_that_is_no_json_gets_vllms_own_answer(pair, endpoint) -> None:
    """The shim leaves such a body for vLLM to refuse, also if the key's bytes are in it."""
    bodies = (b'{"kv_transfer_params": {"do_remote_prefill": true', b"\xff\xfe", b"")
    for broken in bodies:
        answers = [
            pair.router.client.post(
                server.url + endpoint.value,
                content=broken,
                headers={"content-type": "application/json"},
                timeout=30,
            )
            for server in (pair.decode, pair.others[0])
        ]
        assert answers[0].status_code == answers[1].status_code == 400
        assert answers[0].json() == answers[1].json()


def test_lost_params_are_a_fault_on_a_consumer_and_have_their_reason(pair) -> None:
    """A `kv_consumer` expects remote KV unless told otherwise."""
    before = pair.metrics()
    prompt = pair.prompt()
    sample = count(pair.router, Endpoint.GENERATE, prompt, lose=True)
    assert sample.tokens.local >= len(prompt.text)
    assert sample.exchange.output == plain_output(pair, Endpoint.GENERATE, prompt)
    after = pair.metrics()
    labels = {"outcome": "local_prefill", "reason": "params_missing"}
    assert after.total(REQUESTS, **labels) == before.total(REQUESTS, **labels) + 1


def test_a_producer_counts_its_hand_offs_and_no_fault(pair) -> None:
    """Prefill's own work is `prefill`, with one hand-off issued for each."""
    before = pair.metrics(pair.prefill)
    for endpoint in ROUTES:
        pair.router.send(endpoint, pair.prompt(), max_tokens=1)
    after = pair.metrics(pair.prefill)
    assert after.total(REQUESTS, outcome="prefill") - before.total(REQUESTS, outcome="prefill") == len(ROUTES)
    assert after.total(REQUESTS) - before.total(REQUESTS) == len(ROUTES)
    assert after.total(HANDOFFS, result="issued") - before.total(HANDOFFS, result="issued") == len(ROUTES)


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT], ids=lambda endpoint: endpoint.value)
def test_a_streamed_prefill_answers_without_its_hand_off_and_is_counted(pair, endpoint) -> None:
    """Case 9: vLLM's chunks have no field for it, so the router can never know."""
    before = pair.metrics(pair.prefill)
    ask = body(endpoint, pair.prompt(), 1) | {"stream": True, KEY: dict(ASK_PREFILL)}
    reply = pair.router.client.post(f"{pair.prefill.url}{endpoint.value}", json=ask, timeout=60)
    assert reply.status_code == 200
    assert "remote_block_ids" not in reply.text
    after = pair.metrics(pair.prefill)
    labels = {"event": "response_without_handoff", "endpoint": endpoint.value}
    assert after.total(ENTRYPOINT, **labels) == before.total(ENTRYPOINT, **labels) + 1


def test_nothing_went_wrong_inside_the_shim(pair) -> None:
    """No hook of either side had to contain an exception."""
    for server in (pair.prefill, pair.decode):
        assert pair.metrics(server).total(ERRORS) == 0
