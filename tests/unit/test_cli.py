"""The demo's parts without a server: the router's requests, the arithmetic, the tables and exit codes."""

from __future__ import annotations

import io
import json
import random

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from shim.cli import app
from shim.cli.demo import Plan, run
from shim.cli.fleet import Environment, FleetError, Spec, nixl
from shim.cli.measure import Row, Sample, count, interleave, merge
from shim.cli.metrics import Scrape, Tokens
from shim.cli.narrate import Narrator
from shim.cli.router import ASK_PREFILL, KEY, Exchange, Prompt, Router, RouterError, body
from shim.cli.tables import Phase, increases, risen, traffic
from shim.telemetry.catalog import REQUESTS
from shim.verdict import Endpoint

ROUTES = (Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.GENERATE, Endpoint.RESPONSES, Endpoint.MESSAGES)
HANDOFF = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "127.0.0.1"}
BY_SOURCE = """\
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {local}
vllm:prompt_tokens_by_source_total{{engine="0",source="external_kv_transfer"}} {pulled}
vllm:prompt_tokens_by_source_total{{engine="1",source="external_kv_transfer"}} 5.0
"""


class FakeServers:
    """A prefill and a decode server in one: remembers requests, counts tokens as vLLM does."""

    def __init__(self, handoff=HANDOFF) -> None:
        self.handoff = handoff
        self.asked: list[tuple[str, str, dict]] = []
        self.headers: list[httpx.Headers] = []
        self.local = 0
        self.pulled = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        if request.url.path == "/metrics":
            return httpx.Response(200, text=BY_SOURCE.format(local=self.local, pulled=self.pulled))
        asked = json.loads(request.content)
        self.asked.append((request.url.host, request.url.path, asked))
        self.headers.append(request.headers)
        if request.url.host == "prefill":
            return httpx.Response(200, json={"choices": [], KEY: self.handoff})
        if asked.get(KEY):
            self.pulled += 100
        else:
            self.local += 100
        usage = {"prompt_tokens": 100}
        reply = {"choices": [{"token_ids": [7, 8]}], "usage": usage}
        if asked.get("stream"):
            lines = [json.dumps({"choices": [{"token_ids": [token]}]}) for token in (7, 8)]
            text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
            return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})
        return httpx.Response(200, json=reply)


@pytest.fixture
def servers():
    """Those that hand over."""
    return FakeServers()


@pytest.fixture
def router(servers):
    """Between them."""
    with httpx.Client(transport=httpx.MockTransport(servers)) as client:
        yield Router("http://prefill", "http://decode", client)


@pytest.fixture
def source():
    """Of prompts."""
    return random.Random(1)


@pytest.mark.parametrize("endpoint", ROUTES)
def test_prefill_is_asked_for_one_token_and_its_params_go_to_decode_as_they_are(
    router, servers, source, endpoint
) -> None:
    """The two steps of vLLM's protocol, on the same route."""
    exchange = router.send(endpoint, Prompt.random(10, source), max_tokens=9)
    (first_host, first_path, first), (second_host, second_path, second) = servers.asked
    assert (first_host, second_host) == ("prefill", "decode")
    assert first_path == second_path == endpoint.value
    assert first[KEY] == ASK_PREFILL
    assert second[KEY] == HANDOFF
    assert exchange.handoff == HANDOFF
    lengths = [
        ask.get("max_tokens", ask.get("max_output_tokens", ask.get("sampling_params", {}).get("max_tokens")))
        for ask in (first, second)
    ]
    assert lengths == [1, 9]


@pytest.mark.parametrize("lose", [False, True])
def test_without_params_the_request_goes_to_decode_without_the_key(source, lose) -> None:
    """As llm-d's sidecar does, whether prefill gave none or they were lost on purpose."""
    servers = FakeServers(handoff=HANDOFF if lose else None)
    with httpx.Client(transport=httpx.MockTransport(servers)) as client:
        router = Router("http://prefill", "http://decode", client)
        exchange = router.send(Endpoint.GENERATE, Prompt.random(10, source), lose=lose)
    assert KEY not in servers.asked[1][2]
    assert (exchange.handoff is not None) == lose


def test_only_the_callers_trace_context_is_passed_on(router, servers, source) -> None:
    """To both servers; no other header of the caller's."""
    headers = {"Traceparent": "00-aa-bb-01", "tracestate": "x=1", "authorization": "secret"}
    router.send(Endpoint.CHAT, Prompt.random(10, source), headers=headers)
    for sent in servers.headers:
        assert sent["traceparent"] == "00-aa-bb-01"
        assert sent["tracestate"] == "x=1"
        assert "authorization" not in sent


def test_a_stream_is_read_to_its_end(router, source) -> None:
    """The tokens of all of its events, without the end mark."""
    exchange = router.send(Endpoint.GENERATE, Prompt.random(10, source), stream=True)
    assert exchange.output == (7, 8)
    assert len(exchange.chunks) == 2


def test_a_refusal_names_the_route_and_the_status(source) -> None:
    """With the beginning of what the server said."""
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(403, text="no"))) as client:
        router = Router("http://prefill", "http://decode", client)
        with pytest.raises(RouterError, match=r"/inference/v1/generate: found status 403, wanted 200: no"):
            router.send(Endpoint.GENERATE, Prompt.random(10, source))


def test_a_route_that_generates_nothing_is_refused(source) -> None:
    """Rather than sent somewhere."""
    with pytest.raises(RouterError, match="engine"):
        body(Endpoint.ENGINE, Prompt.random(10, source), 1)


def test_the_texts_of_responses_and_messages_are_read_streamed_or_not() -> None:
    """The routes that tell no tokens."""
    whole = ({"output": [{"content": [{"text": "ab"}]}]},)
    parts = tuple({"type": "response.output_text.delta", "delta": letter} for letter in "ab")
    assert {Exchange(Endpoint.RESPONSES, None, 0, 0, chunks).output for chunks in (whole, parts)} == {"ab"}
    whole = ({"content": [{"type": "text", "text": "ab"}]},)
    parts = tuple({"type": "content_block_delta", "delta": {"text": letter}} for letter in "ab")
    assert {Exchange(Endpoint.MESSAGES, None, 0, 0, chunks).output for chunks in (whole, parts)} == {"ab"}


def test_tokens_are_summed_over_engines_by_source() -> None:
    """Two engines pulled; one computed."""
    scrape = Scrape.parse(BY_SOURCE.format(local=3, pulled=40))
    assert Tokens.of(scrape) == Tokens(pulled=45, local=3, cached=0)
    assert scrape.by("vllm:prompt_tokens_by_source_total", "engine") == {("0",): 43.0, ("1",): 5.0}
    assert scrape.total("vllm:no_such_metric") == 0


def test_each_request_gets_its_own_share_of_the_counters(router, servers, source) -> None:
    """Taken around it, so that routes that take turns are told apart."""
    servers.pulled, servers.local = 1000, 1000
    kept = count(router, Endpoint.GENERATE, Prompt.random(10, source))
    lost = count(router, Endpoint.GENERATE, Prompt.random(10, source), lose=True)
    assert (kept.tokens, kept.pulled) == (Tokens(pulled=100), True)
    assert (lost.tokens, lost.pulled) == (Tokens(local=100), False)


def test_routes_take_turns(router, servers, source) -> None:
    """Whatever else the machine does hits all alike, and none is always first."""
    rows = interleave(router, ROUTES[:2], 3, 10, source)
    one, two = (endpoint.value for endpoint in ROUTES[:2])
    assert [path for host, path, _ in servers.asked if host == "decode"] == [one, two, two, one, one, two]
    assert [row.pulls for row in rows.values()] == [3, 3]
    assert len({str(ask) for _, _, ask in servers.asked}) == 12, "no prompt twice"


def sample(endpoint: Endpoint, seconds: float, tokens: Tokens, handoff=HANDOFF) -> Sample:
    """One exchange that took so long and got its tokens so."""
    return Sample(Exchange(endpoint, handoff, 0.0, seconds, ()), tokens)


def phase(title: str, generate_seconds: float, **tokens: int) -> Phase:
    """Completions at 0.5 s and generate at this many."""
    return Phase(
        title,
        {
            Endpoint.COMPLETIONS: Row(
                Endpoint.COMPLETIONS, (sample(Endpoint.COMPLETIONS, 0.5, Tokens(pulled=3500)),)
            ),
            Endpoint.GENERATE: Row(
                Endpoint.GENERATE,
                tuple(sample(Endpoint.GENERATE, generate_seconds, Tokens(**tokens), None) for _ in range(2)),
            ),
        },
    )


def test_the_table_has_a_line_for_each_route_of_each_phase() -> None:
    """Hand-offs, tokens both ways, the median and its ratio to completions."""
    console = Console(width=140, file=io.StringIO())
    console.print(traffic("0.28.0", 3500, [phase("plain NIXL", 2.29, local=3500)]))
    line = next(
        text for text in console.file.getvalue().splitlines() if "generate" in text and "0 of 2" in text
    )
    assert [cell.strip() for cell in line.strip("│").split("│")][1:] == [
        "/inference/v1/generate",
        "0 of 2",
        "0",
        "7,000",
        "2.29 s",
        "4.58",
    ]


def test_more_of_the_same_counts_together() -> None:
    """As many again, and none is left out."""
    first, second = phase("a", 1.0, local=1), phase("a", 3.0, local=2)
    both = Phase("a", merge(first.rows, second.rows))
    assert both.ratio(Endpoint.GENERATE) == both.slowest() == 4.0
    assert both.rows[Endpoint.GENERATE].tokens == Tokens(local=6)


SHIM_COUNTS = """\
# TYPE vllm:kv_shim_requests counter
vllm:kv_shim_requests_total{{engine="0",outcome="remote",reason="none"}} 7
vllm:kv_shim_requests_total{{engine="0",outcome="local_prefill",reason="params_missing"}} {lost}
"""


def test_only_series_that_rose_are_shown() -> None:
    """With their labels and by how much."""
    before, after = (Scrape.parse(SHIM_COUNTS.format(lost=lost)) for lost in (0, 3))
    assert list(increases(REQUESTS, before, after)) == [(("local_prefill", "params_missing"), 3.0)]
    console = Console(width=140, file=io.StringIO())
    console.print(risen((REQUESTS,), before, after, "lost"))
    assert "outcome=local_prefill, reason=params_missing" in console.file.getvalue()
    assert "remote" not in console.file.getvalue()


def test_a_log_gets_a_line_for_news_and_one_now_and_then_for_waiting() -> None:
    """Twelve seconds of waiting are two lines, and the next thing is one more."""
    now = 0.0
    console = Console(width=80, file=io.StringIO())
    with Narrator(console, clock=lambda: now) as narrator:
        for second in range(12):
            now = float(second)
            narrator(f"starting: {second} s")
        narrator.prefixed("shim: ")("request 1")
    assert console.file.getvalue().splitlines() == ["starting: 0 s", "starting: 10 s", "shim: request 1"]


def test_a_python_without_vllm_stops_the_demo_with_what_to_do(tmp_path) -> None:
    """And a code that is not 0."""
    console = Console(width=200, file=io.StringIO())
    plan = Plan(tmp_path / "python", tmp_path, tmp_path, rounds=1, length=64)
    assert run(plan, console) == 1
    assert "make env" in console.file.getvalue()
    with pytest.raises(FleetError, match="no working Python"):
        Environment.of(tmp_path / "python")


@pytest.mark.parametrize(("version", "scale_out"), [("0.28.0", False), ("0.30.1", True), ("0.32.0", True)])
def test_a_server_gets_the_options_of_its_version_and_none_of_the_shells_settings(
    tmp_path, monkeypatch, version, scale_out
) -> None:
    """What another vLLM was set up with must not make this one something else."""
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.setenv("SHIM_DISABLE", "1")
    monkeypatch.setenv("KEPT", "1")
    spec = Spec(name="x", environment=Environment(tmp_path, version), model=tmp_path, kv_transfer_config=nixl())
    command = spec.command(1234)
    assert ("--enable-scale-out" in command) == scale_out
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert json.loads(command[command.index("--kv-transfer-config") + 1])["kv_connector"] == "NixlConnector"
    environ = spec.environ(5678)
    assert "VLLM_PLUGINS" not in environ
    assert "SHIM_DISABLE" not in environ
    assert environ["KEPT"] == "1"
    assert environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5678"


def test_several_api_servers_need_vllms_serve_command(tmp_path) -> None:
    """The module that one server runs ignores their number."""
    spec = Spec(name="x", environment=Environment(tmp_path, "0.32.0"), model=tmp_path, api_servers=2)
    command = spec.command(1234)
    assert "vllm.entrypoints.openai.api_server" not in command
    assert command[-2:] == ["--api-server-count", "2"]


def test_the_command_lists_its_subcommands() -> None:
    """Without importing what they need."""
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output
