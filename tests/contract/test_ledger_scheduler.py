"""The ledger against vLLM's real scheduler, one case of the issue at a time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from scheduling import BLOCK, STOP_TOKEN, Steps, make_config, make_request, make_scheduler
from scripted import Script, WatchedConnector
from vllm import __version__ as vllm_version
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from shim.connector.observe import Observe
from shim.ledger import Ledger
from shim.verdict import Ask, Facts, HandoffEnd, HandoffReason, Reason

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from recording import Recording  # lives beside the unit tests

LOAD = Facts(ask=Ask.LOAD)
HANDOFF = Facts(ask=Ask.HANDOFF)
MISSING = Facts(reason=Reason.PARAMS_MISSING)
FAILS_BY_REQUEST = hasattr(KVConnectorOutput(), "failed_recving")
PROMPT = list(range(8, 108))


class Engine:
    """A real scheduler whose scripted connector is observed."""

    def __init__(
        self,
        *,
        policy: str = "fail",
        depth: int = 1,
        blocks: int = 1000,
        silent_handoffs: bool = False,
        **config: Any,
    ) -> None:
        made = make_config("WatchedConnector", "scripted", policy=policy, asynchronous=depth > 1, **config)
        self.scheduler = make_scheduler(made, blocks=blocks, asynchronous=depth > 1)
        self.steps = Steps(self.scheduler, depth=depth)
        connector = self.scheduler.connector
        assert isinstance(connector, WatchedConnector)
        self.connector = connector
        self.seen = Recording()
        self.ledger = Ledger([self.seen], backoff=1, granule=BLOCK)
        self.ends: dict[str, HandoffEnd] = {}
        connector.observe = Observe(
            self.ledger,
            handoff_ends=lambda key: self.ends.get(key, HandoffEnd.UNKNOWN),
            silent_handoffs=silent_handoffs,
        )
        connector.facts = {}

    def add(
        self,
        facts: Facts,
        script: Script | None = None,
        request_id: str = "a",
        prompt: list[int] = PROMPT,
        **fields: Any,
    ) -> None:
        """The client's request arrives."""
        self.connector.facts[request_id] = facts
        if script is not None:
            self.connector.scripts[request_id] = script
        self.steps.add(make_request(request_id, list(prompt), **fields))

    def run(self, most: int = 50) -> None:
        """Step until every request is gone."""
        for _ in range(most):
            if not self.scheduler.requests:
                while self.steps.flying:
                    self.steps.update()
                return
            self.steps.step()
        msg = f"still here: {list(self.scheduler.requests)}"
        raise AssertionError(msg)

    def load_blocks(self, request_id: str, first: int) -> set[int]:
        """The blocks of a load in flight, from the one at this index on."""
        return set((self.connector.loading.get(request_id) or self.connector.beside[request_id])[first:])

    @property
    def verdicts(self) -> list[tuple[str, str]]:
        return [(v.outcome, v.reason) for v in self.seen.verdicts]

    @property
    def tokens(self) -> dict[tuple[str, str], int]:
        return dict(self.seen.counted)

    def settled(self) -> None:
        """Everything adds up, and nothing is left."""
        assert len(self.ledger) == 0
        assert len(self.seen.starts) == len(self.seen.loads)
        assert sum(self.seen.counted.values()) == sum(self.steps.computed.values())


depths = pytest.mark.parametrize("depth", [1, 2])
policies = pytest.mark.parametrize("policy", ["fail", "recompute"])


def received(*ids: str, invalid: set[int] | None = None) -> KVConnectorOutput:
    """What the workers report: loads ended, and blocks that are not right."""
    return KVConnectorOutput(finished_recving=set(ids) or None, invalid_block_ids=invalid or set())


@depths
def test_a_full_asynchronous_load(depth: int) -> None:
    """Remote, one token of tail, after answers that asked for patience."""
    engine = Engine(depth=depth)
    engine.add(LOAD, Script(offer=100, undecided=3))
    for _ in range(6):
        engine.steps.step()
    assert set(engine.connector.loading) == {"a"}
    assert engine.ledger.open == {}
    engine.steps.step(received("a"))
    engine.run()
    assert engine.verdicts == [("remote", "none")]
    assert engine.tokens == {("tail", "tail"): 1}
    engine.settled()


@depths
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_partial_load_and_chunks(depth: int, asynchronous: bool) -> None:
    """The rest of the prompt, in several chunks, is the fault."""
    engine = Engine(depth=depth)
    engine.add(LOAD, Script(offer=16, asynchronous=asynchronous))
    engine.steps.step()
    engine.steps.step(received("a") if asynchronous else None)
    engine.run()
    assert engine.verdicts == [("partial", "partial_match")]
    assert engine.tokens == {("fault", "partial_match"): 84}
    assert engine.seen.verdicts[0].loaded_tokens == 16
    engine.settled()


@depths
def test_a_full_synchronous_load(depth: int) -> None:
    """Remote, with what the connector leaves as tail."""
    engine = Engine(depth=depth)
    engine.add(LOAD, Script(offer=100, asynchronous=False))
    engine.run()
    assert engine.verdicts == [("remote", "none")]
    assert engine.tokens == {("tail", "tail"): 1}
    engine.settled()


@depths
@policies
@pytest.mark.parametrize("first", [0, 3])
def test_an_asynchronous_load_that_fails(depth: int, policy: str, first: int) -> None:
    """Blocks are reported invalid, with or without a good prefix, and the load ended in the same report."""
    engine = Engine(depth=depth, policy=policy)
    engine.add(LOAD, Script(offer=100))
    engine.steps.step()
    if depth > 1:
        engine.steps.step()
    engine.steps.update(received("a", invalid=engine.load_blocks("a", first))) if depth > 1 else (
        engine.steps.step(received("a", invalid=engine.load_blocks("a", first)))
    )
    engine.run()
    if policy == "fail":
        assert engine.verdicts == [("failed", "load_failed")]
        assert [load.result for load in engine.seen.loads] == ["failed"]
        assert engine.tokens == {}
    else:
        outcome, result = ("partial", "partial") if first else ("local_prefill", "failed")
        assert engine.verdicts == [(outcome, "load_failed")]
        assert [(load.result, load.loaded_tokens) for load in engine.seen.loads] == [(result, first * BLOCK)]
        assert engine.tokens == {("fault", "load_failed"): 100 - first * BLOCK}
    engine.settled()


@policies
@pytest.mark.skipif(not FAILS_BY_REQUEST, reason="vLLM 0.28.0 has no failed_recving")
def test_a_load_that_is_reported_failed_by_request(policy: str) -> None:
    """Connectors with several KV cache groups name the request, not blocks."""
    engine = Engine(policy=policy)
    engine.add(LOAD, Script(offer=100))
    engine.steps.step()
    engine.steps.step(KVConnectorOutput(finished_recving={"a"}, failed_recving={"a"}))
    engine.run()
    expected = ("failed", "load_failed") if policy == "fail" else ("local_prefill", "load_failed")
    assert engine.verdicts == [expected]
    assert engine.tokens == ({} if policy == "fail" else {("fault", "load_failed"): 100})
    engine.settled()


@policies
@pytest.mark.parametrize("first", [0, 3])
def test_a_synchronous_load_that_fails(policy: str, first: int) -> None:
    """The token that was computed beside it was computed for nothing, and counts."""
    engine = Engine(policy=policy)
    engine.add(LOAD, Script(offer=100, asynchronous=False))
    engine.steps.schedule()
    engine.steps.update(received(invalid=engine.load_blocks("a", first)))
    engine.run()
    if policy == "fail":
        assert engine.verdicts == [("failed", "load_failed")]
        assert engine.tokens == {("fault", "load_failed"): 1}
    else:
        assert engine.verdicts == [("partial" if first else "local_prefill", "load_failed")]
        assert engine.tokens == {("fault", "load_failed"): 101 - first * BLOCK}
    assert [load.result for load in engine.seen.loads] == [
        "partial" if first and policy != "fail" else "failed"
    ]
    engine.settled()


@policies
def test_a_request_that_shares_the_failed_blocks(policy: str) -> None:
    """The second hit the first's blocks in the local cache, in the very step that loaded them."""
    engine = Engine(policy=policy)
    engine.add(LOAD, Script(offer=100, asynchronous=False))
    engine.add(MISSING, request_id="b")
    engine.steps.schedule()
    engine.steps.update(received(invalid=engine.load_blocks("a", 0)))
    engine.run()
    outcome = "failed" if policy == "fail" else "local_prefill"
    assert (outcome, "load_failed") in engine.verdicts
    assert len(engine.verdicts) == 2
    engine.settled()


@depths
def test_an_abort_before_it_was_scheduled(depth: int) -> None:
    """Aborted at once, as EngineCore does for requests that the API server rejected."""
    engine = Engine(depth=depth)
    engine.add(LOAD, Script(offer=100))
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert engine.verdicts == [("aborted", "none")]
    engine.run()
    engine.settled()


@depths
def test_an_abort_while_it_waits_for_remote_kv(depth: int) -> None:
    """The wait ends for the client; the late report of its end is of nobody's."""
    engine = Engine(depth=depth)
    engine.add(LOAD, Script(offer=100))
    engine.steps.step()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert engine.verdicts == [("aborted", "none")]
    assert [load.result for load in engine.seen.loads] == ["aborted"]
    engine.steps.step(received("a"))
    engine.run()
    engine.settled()


@depths
def test_an_abort_in_the_middle_and_while_decoding(depth: int) -> None:
    """A prompt that is complete keeps its verdict; one that is not is aborted, and its tokens count."""
    engine = Engine(depth=depth)
    engine.add(MISSING, request_id="late", prompt=PROMPT[:20], max_tokens=50)
    engine.add(MISSING, request_id="early", prompt=list(range(100, 250)), max_tokens=50)
    engine.steps.step()
    engine.steps.step()
    engine.scheduler.finish_requests(["late", "early"], RequestStatus.FINISHED_ABORTED)
    engine.run()
    by_id = {v.request_id: (v.outcome, v.reason) for v in engine.seen.verdicts}
    assert by_id == {"late": ("local_prefill", "params_missing"), "early": ("aborted", "none")}
    engine.settled()


def test_a_prompt_whose_logprobs_are_wanted_is_computed() -> None:
    """vLLM 0.32 takes none of what the connector offers; 0.28.0 loads and would miss the logprobs."""
    engine = Engine()
    engine.add(LOAD, Script(offer=100), prompt_logprobs=1)
    engine.steps.step()
    if engine.connector.loading:
        assert vllm_version.startswith("0.28")
        engine.steps.step(received("a"))
        expected: Any = [("remote", "none")]
    else:
        expected = [("local_prefill", "unsupported_mode")]
    engine.run()
    assert engine.verdicts == expected
    engine.settled()


@depths
def test_a_reset_preempts_and_resumes_in_one_step(depth: int) -> None:
    """`reset_prefix_cache` takes the blocks between steps; the ask for new ones comes first."""
    engine = Engine(depth=depth)
    engine.add(LOAD, Script(offer=100), max_tokens=8)
    engine.steps.step()
    engine.steps.step(received("a"))
    engine.steps.step()
    engine.steps.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert engine.verdicts == [("remote", "none")]
    assert engine.tokens == {("tail", "tail"): 1, ("recomputed", "preempted"): 100}
    engine.settled()


@depths
def test_requests_that_run_out_of_blocks(depth: int) -> None:
    """Preempted while decoding: what is computed again counts apart, and there is no second verdict."""
    engine = Engine(depth=depth, blocks=16)
    for request_id, base in (("a", 8), ("b", 120)):
        engine.add(MISSING, request_id=request_id, prompt=list(range(base, base + 100)), max_tokens=40)
    engine.run(400)
    assert engine.verdicts == [("local_prefill", "params_missing")] * 2
    assert engine.tokens["fault", "params_missing"] == 200
    assert engine.tokens["recomputed", "preempted"] > 0
    engine.settled()


@depths
def test_an_id_used_again(depth: int) -> None:
    """The second request of an id is another request, and finds the prompt in the local cache."""
    engine = Engine(depth=depth)
    for _ in range(2):
        engine.add(LOAD, Script(offer=0))
        engine.run()
    assert engine.verdicts == [("local_prefill", "no_match"), ("local_intended", "local_cache")]
    engine.settled()


def test_a_streaming_session() -> None:
    """Later inputs come under the same id without `on_new_request`; one verdict, every token counted."""
    engine = Engine()
    engine.add(MISSING, resumable=True)
    for _ in range(4):
        engine.steps.step()
    engine.steps.add(make_request("a", list(range(200, 240)), resumable=True))
    for _ in range(4):
        engine.steps.step()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.verdicts == [("local_prefill", "params_missing")]
    assert engine.tokens["fault", "params_missing"] == 100
    assert engine.tokens["intended", "not_disaggregated"] >= 40
    engine.settled()


@pytest.mark.parametrize("end", list(HandoffEnd))
def test_a_handoff_is_issued_and_closed(end: HandoffEnd) -> None:
    """The connector's worker knows how it ended; a profile may ask it."""
    engine = Engine()
    engine.add(HANDOFF, Script(pins=True, handoff={"do_remote_prefill": True}), max_tokens=1)
    engine.steps.step()
    engine.steps.step()
    assert engine.verdicts == [("prefill", "none")]
    assert [(h.result, h.reason) for h in engine.seen.handoffs] == [("issued", "none")]
    assert len(engine.ledger) == 1
    engine.ends["a"] = end
    engine.steps.step(KVConnectorOutput(finished_sending={"a"}))
    assert [h.end for h in engine.seen.closed] == [end]
    assert engine.seen.oldests[-1] == (0.0, 0.0)
    engine.run()
    engine.settled()


@pytest.mark.parametrize(
    ("facts", "prompt", "token", "reason"),
    [
        (HANDOFF, PROMPT, 5, HandoffReason.CONNECTOR_RETURNS_NONE),
        (HANDOFF, PROMPT, STOP_TOKEN, HandoffReason.FINISHED_STOP),
        (HANDOFF, PROMPT[:5], 5, HandoffReason.SHORT_PROMPT),
        (Facts(ask=Ask.HANDOFF, streamed=True), PROMPT, 5, HandoffReason.STREAMED),
        (Facts(ask=Ask.HANDOFF, siblings=HandoffReason.N_GT_1), PROMPT, 5, HandoffReason.N_GT_1),
        (Facts(ask=Ask.HANDOFF, reason=Reason.PARAMS_MISSING), PROMPT, 5, HandoffReason.PARAMS_MISSING),
        (Facts(ask=Ask.HANDOFF, reason=Reason.PARAMS_INVALID), PROMPT, 5, HandoffReason.OTHER),
    ],
)
def test_a_handoff_is_missing(facts: Facts, prompt: list[int], token: int, reason: HandoffReason) -> None:
    """Each with why, at the request's end."""
    engine = Engine()
    engine.steps.token = token
    engine.add(facts, Script(), prompt=prompt, max_tokens=1)
    engine.run()
    assert [(h.result, h.reason) for h in engine.seen.handoffs] == [("missing", reason)]
    assert engine.verdicts == [("prefill", "none")]
    engine.settled()


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_handoff_of_a_request_that_did_not_end_well(status: RequestStatus) -> None:
    """vLLM drops what the connector returned."""
    engine = Engine()
    engine.add(HANDOFF, Script(handoff={"do_remote_prefill": True}))
    engine.scheduler.finish_requests("a", status)
    aborted = status == RequestStatus.FINISHED_ABORTED
    assert [h.reason for h in engine.seen.handoffs] == ["aborted" if aborted else "error"]
    assert engine.verdicts == [("aborted", "none") if aborted else ("failed", "other")]
    engine.run()
    engine.settled()


def test_a_silent_handoff_is_issued_by_keeping_the_blocks() -> None:
    """Mooncake returns no params: its router makes them up."""
    for silent, results in ((True, ["issued"]), (False, ["missing"])):
        engine = Engine(silent_handoffs=silent)
        engine.add(HANDOFF, Script(pins=True), prompt=PROMPT[:40], max_tokens=1)
        engine.steps.step()
        assert [h.result for h in engine.seen.handoffs] == results
        engine.steps.step(KVConnectorOutput(finished_sending={"a"}))
        engine.run()
        engine.settled()


def test_a_request_whose_admission_was_lost_is_explained() -> None:
    """A fault of the shim in `on_new_request` still leaves one verdict for the request."""
    engine = Engine()
    engine.connector.on_new_request = lambda request: None  # type: ignore[method-assign]
    engine.add(MISSING)
    engine.run()
    assert engine.verdicts == [("local_prefill", "shim_error")]
    engine.settled()


def test_a_step_is_done_once_for_each_that_was_built() -> None:
    """vLLM asks the scheduler's half for stats once per `update_from_output`, whatever the step holds."""
    engine = Engine(depth=2)
    calls: list[str] = []
    observe = engine.connector.observe
    for name in ("scheduled", "step_done"):
        inner = getattr(observe, name)

        def count(*args: Any, name: str = name, inner: Any = inner) -> None:
            calls.append(name)
            inner(*args)

        setattr(observe, name, count)
    engine.steps.schedule()
    engine.add(MISSING)
    for _ in range(5):
        engine.steps.step()
    while engine.steps.flying:
        engine.steps.update()
    assert calls.count("scheduled") == calls.count("step_done") == 6
