"""The shim switched off on decode, and installed but not named on prefill: vLLM as it is without it."""

from __future__ import annotations

import pytest
from servers import INFO, shim

from shim.cli.fleet import nixl
from shim.cli.measure import count, counted
from shim.cli.metrics import Tokens
from shim.cli.router import ASK_PREFILL, KEY, body
from shim.verdict import Endpoint

OURS = "vllm:kv_shim_"


@pytest.fixture(scope="module")
def pair(bench):
    """Prefill names NIXL itself; decode names the shim and has `SHIM_DISABLE=1`."""
    return bench.pair(
        bench.spec("plain", kv_transfer_config=nixl()),
        bench.spec("disabled", kv_transfer_config=shim(), env={"SHIM_DISABLE": "1"}),
    )


def test_a_disabled_shim_is_the_bare_inner_connector(pair) -> None:
    """The sugar still resolves, hand-offs are pulled, and nothing of the shim's counts them."""
    sample = count(pair.router, Endpoint.COMPLETIONS, pair.prompt())
    assert sample.pulled, sample
    names = pair.metrics().names()
    assert any(name.startswith("vllm:nixl_") for name in names)
    assert {name for name in names if name.startswith(OURS)} <= {INFO}


def test_a_disabled_shim_says_so(pair) -> None:
    """`info` is exported also then, with its state."""
    assert pair.metrics().total(INFO, state="disabled") == 1


def test_a_disabled_shim_recovers_nothing(pair, bench) -> None:
    """On decode's generate route the params take vLLM's own way, which on 0.28.0 is none."""
    prompt = pair.prompt()
    asked = {**body(Endpoint.COMPLETIONS, prompt, 1), KEY: dict(ASK_PREFILL)}
    (reply,), _ = pair.router.post(pair.prefill.url, Endpoint.COMPLETIONS, asked)
    before = Tokens.of(pair.metrics())
    pair.router.post(
        pair.decode.url, Endpoint.GENERATE, {**body(Endpoint.GENERATE, prompt, 1), KEY: reply[KEY]}
    )
    gained = counted(pair.router, before, len(prompt.text))
    assert (gained.pulled == 0) == bench.has_bug


def test_a_plain_connector_beside_the_installed_plugin_is_untouched(pair, bench) -> None:
    """No metric of the shim's appears, and vLLM 0.28.0 still loses the params on generate."""
    exchange = pair.router.send(Endpoint.GENERATE, pair.prompt(), max_tokens=1)
    assert (exchange.handoff is None) == bench.has_bug
    assert not any(name.startswith(OURS) for name in pair.metrics(pair.prefill).names())
