"""The road of the issue: every hand-off used on both routes, at the speed of completions.

0.28.0 drops the params on `/inference/v1/generate`; 0.32.0 has two API servers, either of which may
get a request.
"""

from __future__ import annotations

import pytest
from servers import DROPPED, ERRORS, PARAMS, REQUESTS, shim

from shim.cli.measure import TAIL, interleave, merge
from shim.verdict import Endpoint

ROUTES = (Endpoint.COMPLETIONS, Endpoint.GENERATE)
ROUNDS = 8
LENGTH = 3500
AIM = 1.05
BATCHES = 8


@pytest.fixture(scope="module")
def pair(bench):
    """The shim on both sides; a prefill of 3,500 tokens takes seconds."""
    count = 1 if bench.has_bug else 2
    sides = {"prefill": "never", "decode": "always"}
    specs = [
        bench.spec(side, "large", kv_transfer_config=shim(expect_remote=expect), api_servers=count)
        for side, expect in sides.items()
    ]
    return bench.pair(*specs)


@pytest.fixture(scope="module")
def traffic(pair, request):
    """Sixteen hand-offs, the routes in turns, after one that sets the connection up."""
    pair.router.send(Endpoint.COMPLETIONS, pair.prompt(64), max_tokens=1)
    before = pair.metrics()
    rows = interleave(pair.router, ROUTES, ROUNDS, LENGTH, pair.source)
    return rows, before, pair.metrics()


def test_sixteen_of_sixteen_hand_offs_are_used_and_nothing_is_prefilled_again(traffic) -> None:
    """Prefill's KV reaches decode on both routes, by vLLM's own count of tokens."""
    rows, _, _ = traffic
    assert sum(row.handoffs for row in rows.values()) == 2 * ROUNDS
    assert sum(row.pulls for row in rows.values()) == 2 * ROUNDS
    for row in rows.values():
        assert row.tokens.pulled >= ROUNDS * (LENGTH - TAIL)
        assert row.tokens.local <= ROUNDS * TAIL


def test_the_shim_counts_sixteen_remote_prompts_and_no_error(traffic) -> None:
    """Every decode has a verdict, and the inner connector's own metrics stay beside it."""
    _, before, after = traffic
    assert after.total(REQUESTS, outcome="remote") - before.total(REQUESTS, outcome="remote") == 2 * ROUNDS
    assert after.total(REQUESTS) - before.total(REQUESTS) == 2 * ROUNDS
    assert after.total(ERRORS) == 0
    assert after.total(DROPPED) == 0
    assert any(name.startswith("vllm:nixl_") for name in after.names())


def test_the_params_of_generate_come_from_the_body_where_vllm_drops_them(traffic, bench) -> None:
    """The source says whose work it was: the shim's on 0.28.0, vLLM's own on 0.32.0."""
    _, before, after = traffic
    source = "body" if bench.has_bug else "extra_args"
    for endpoint, wanted in ((Endpoint.GENERATE, source), (Endpoint.COMPLETIONS, "extra_args")):
        labels = {"endpoint": endpoint.value, "source": wanted}
        assert after.total(PARAMS, **labels) - before.total(PARAMS, **labels) == ROUNDS


def test_generate_is_as_fast_as_completions(traffic, pair, bench, record_property, capsys) -> None:
    """The ratio of median decode times; upstream's own fix reached 1.04."""
    rows, _, _ = traffic
    ratio = slowdown(rows)
    for _ in range(1, BATCHES):
        if ratio <= AIM:
            break
        # Eight samples of half a second on a busy machine prove little: as many again, and all count.
        rows = merge(rows, interleave(pair.router, ROUTES, ROUNDS, LENGTH, pair.source))
        ratio = slowdown(rows)
    medians = ", ".join(f"{name.value} {row.median_seconds:.3f} s" for name, row in rows.items())
    figure = f"vLLM {bench.environment.version}: median decode {medians}; ratio {ratio:.3f} (aim {AIM})"
    record_property("ratio", figure)
    with capsys.disabled():
        print(f"\n{figure}")  # noqa: T201  # the figure is what this test is for
    assert ratio <= AIM


def slowdown(rows) -> float:
    """Generate's median decode time over completions'."""
    return rows[Endpoint.GENERATE].median_seconds / rows[Endpoint.COMPLETIONS].median_seconds
