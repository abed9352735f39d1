"""Screened params on vLLM's real `Scheduler` with the real NIXL and Mooncake schedulers.

No exception out of the engine's loop, no request left waiting, the block pool back to its start. A worker
is played that checks what the real one would choke on, and reports what it was told to load or send.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduling import BLOCK, Steps, make_config, make_request, make_scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from shim.config import Settings
from shim.connector.guard import Guard
from shim.connector.profiles import profile_for
from shim.connector.profiles.layout import layout
from shim.verdict import Ask, Reason

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from handoffs import changed, mooncake, mutated, nixl  # the folder has to be on the path first

EXAMPLES = int(os.environ.get("SHIM_FUZZ_EXAMPLES", "40"))
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
PATIENCE = 40
NIXL = ("NixlConnector", "NixlPushConnector")


@dataclass
class Rig:
    """One engine's scheduler, its guard, and the worker that is played for it."""

    name: str
    role: str = "kv_both"
    extra: str = "{}"
    screening: bool = True
    ids: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        config = make_config(self.name, role=self.role, extra=self.extra)
        self.scheduler = make_scheduler(config, blocks=200)
        self.steps = Steps(self.scheduler)
        self.connector = self.scheduler.connector
        self.free = self.pool()
        self.told: set[str] = set()
        self.queued: set[str] = set()
        transfer = config.kv_transfer_config
        groups = layout(self.scheduler.kv_cache_config, BLOCK)
        self.guard = Guard(
            profile_for(self.name),
            Settings(),
            group_count=len(groups),
            block_size=BLOCK,
            is_producer=transfer.is_kv_producer,
            is_consumer=transfer.is_kv_consumer,
            groups=groups,
            extra_config=transfer.kv_connector_extra_config,
            stamp_key=b"",
        )
        asked = self.connector.get_num_new_matched_tokens

        def answer(request: Any, computed: int) -> Any:
            inner = asked(request, computed)
            local = request.request_id in self.told or self.guard.spent(request.kv_transfer_params)
            return (0, False) if local and self.screening else inner

        self.connector.get_num_new_matched_tokens = answer

    def pool(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, params: object, prompt: list[int], *, max_tokens: int = 1, immediately: bool = False) -> Any:
        """A request as the mixin admits it: screened before the connector sees anything."""
        request = make_request(f"r{next(self.ids)}", prompt, max_tokens=max_tokens)
        # Not through SamplingParams: 0.28 takes anything there, 0.32 refuses 65-bit integers itself.
        request.kv_transfer_params = params
        screened = None
        if self.screening:
            screened = self.guard.screen(request.request_id, params, prompt_tokens=len(prompt))
            request.kv_transfer_params = screened.params
            if screened.tell:
                self.told.add(request.request_id)
        self.steps.add(request)
        if immediately:  # core.py `add_request`: the clean-up of what the API server rejected
            self.abort(request)
        return screened, request

    def abort(self, request: Any) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        output = self.steps.schedule()
        received, sent = self.work(output.kv_connector_metadata)
        self.queued |= received
        for request in self.scheduler.requests.values():
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                assert request.request_id in self.queued, "waits for a load that nobody was told to do"
        known = self.scheduler.requests
        report = KVConnectorOutput(
            finished_recving={r for r in received if r in known} or None,
            finished_sending={r for r in sent if r in known} or None,
        )
        self.steps.update(report)

    def run(self) -> None:
        """Until nothing is left, as long as that takes a sound engine."""
        for _ in range(PATIENCE):
            if not self.scheduler.requests:
                break
            self.step()
        self.step()
        assert not self.scheduler.requests, "left waiting"
        assert self.pool() == self.free, "blocks lost"

    def work(self, meta: Any) -> tuple[set[str], set[str]]:
        """What a worker would do with a step's metadata: loads and sends that it will report."""
        if self.name not in NIXL:
            return self.work_mooncake(meta)
        received = set()
        for request_id, one in meta.reqs_to_recv.items():
            check_nixl(one, pull=self.name == "NixlConnector")
            if getattr(one, "awaiting_kvs", False) or any(one.local_block_ids):
                received.add(request_id)
        for beat in meta.heartbeat_by_engine.values():
            assert ",".join(beat.req_ids).encode()
        return received, set(meta.reqs_to_send)

    def work_mooncake(self, meta: Any) -> tuple[set[str], set[str]]:
        received = set()
        for engine_id, requests in meta.reqs_to_recv.items():
            assert engine_id.encode()
            for request_id, one in requests.items():
                assert (one.remote_bootstrap_addr + "/query").encode()
                assert one.transfer_id.encode()
                if any(one.local_block_ids):
                    received.add(request_id)
        sent = {request_id for request_id, (_, blocks) in meta.reqs_to_send.items() if any(blocks)}
        return received, sent


def check_nixl(one: Any, *, pull: bool) -> None:
    """What nixl/pull_worker.py and base_worker.py do with these outside every try."""
    remote = one.remote
    assert f"{remote.request_id}:1".encode()
    assert f"tcp://{remote.host}:{remote.port}".encode()
    assert hash(remote.engine_id)
    assert len(remote.block_ids) >= 0
    assert 1 <= one.tp_size <= 64
    assert 1 <= one.pp_size <= 16
    assert remote.blocks_expiry_time is None or remote.blocks_expiry_time + 1.0
    if pull and any(one.local_block_ids):
        assert len(remote.block_ids) == len(one.local_block_ids)
        for local, theirs in zip(one.local_block_ids, remote.block_ids, strict=True):
            assert len(local) <= len(list(theirs))
            assert all(type(i) is int and 0 <= i < 2**31 for i in theirs)


READBACK = ("NixlConnector", "kv_both", '{"bidirectional_kv_xfer": true, "kv_recompute_threshold": 1}')
RIGS: dict[tuple[str, ...], Rig] = {}


def rig(*key: str) -> Rig:
    """One engine for all examples; a new one after one that broke it."""
    return RIGS.pop(key, None) or Rig(*key)


def prompts() -> Any:
    """Prompts that share prefixes with one another at random."""
    return st.builds(
        lambda seed, n: [10 + (seed + i) % 200 for i in range(n)], st.integers(0, 3), st.integers(1, 120)
    )


ACTIONS = st.sampled_from(["run", "run", "abort before", "abort after a step", "immediately"])


def requests_of(base: dict[str, Any]) -> Any:
    """Scripts of one to three requests, good and bad, and what befalls them."""
    good = st.just(base) | st.just({"do_remote_decode": True, "transfer_id": "x"}) | st.just(None)
    fitting = st.builds(lambda n: ("fit", n), st.just(0))
    return st.lists(st.tuples(mutated(base) | good | fitting, prompts(), ACTIONS), min_size=1, max_size=3)


def play(one: Rig, key: tuple[str, ...], base: dict[str, Any], script: list[Any]) -> None:
    """Run a script on an engine, and keep the engine if it survives."""
    late = []
    one.guard.claims._claims.clear()
    for number, (params, prompt, action) in enumerate(script):
        given_params = fitted(base, prompt, number) if isinstance(params, tuple) else params
        _, request = one.add(given_params, list(prompt), immediately=action == "immediately")
        if action == "abort before":
            one.abort(request)
        elif action == "abort after a step":
            late.append(request)
    if late:
        one.step()
        for request in late:
            one.abort(request)
    one.run()
    RIGS[key] = one  # it has survived


def fitted(base: dict[str, Any], prompt: list[int], number: int) -> dict[str, Any]:
    """A good hand-off for this very prompt."""
    if "remote_block_ids" not in base:
        return changed(base, {"transfer_id": f"x{number}"})
    return nixl(
        len(prompt),
        remote_request_id=f"q{number}",
        do_remote_prefill=base["do_remote_prefill"],
        do_remote_decode=base["do_remote_decode"],
    )


@pytest.mark.parametrize("name", NIXL)
@given(script=requests_of(nixl()))
@FUZZ
def test_no_params_kill_or_hang_nixl(name, script):
    """Whatever comes, the engine's loop goes on and ends where it began."""
    play(rig(name), (name,), nixl(), script)


@given(script=requests_of(nixl(do_remote_prefill=False, do_remote_decode=True)))
@FUZZ
def test_no_read_back_kills_or_hangs_nixl(script):
    """Turn 2 of `bidirectional_kv_xfer`: prefill loads, too."""
    play(rig(*READBACK), READBACK, nixl(do_remote_prefill=False, do_remote_decode=True), script)


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
@given(script=requests_of(mooncake()))
@settings(FUZZ, max_examples=max(20, EXAMPLES // 2))
def test_no_params_kill_or_hang_mooncake(role, script):
    """In any role."""
    key = ("MooncakeConnector", role)
    play(rig(*key), key, mooncake(), script)


PROMPT = [10 + i % 200 for i in range(100)]


@pytest.mark.parametrize("name", NIXL)
def test_a_good_hand_off_is_loaded(name):
    """The fuzz would pass a guard that lets nothing through."""
    one = Rig(name)
    screened, request = one.add(nixl(), PROMPT)
    one.step()

    assert screened.reason is Reason.NONE
    assert request.request_id in one.queued
    one.run()
    assert one.steps.computed[request.request_id] == 1


def test_mooncake_loads_a_good_hand_off():
    """Likewise."""
    one = Rig("MooncakeConnector", "kv_consumer")
    _, request = one.add(mooncake(), PROMPT)
    one.run()

    assert request.request_id in one.queued
    assert one.steps.computed[request.request_id] == 1


@pytest.mark.parametrize("name", NIXL)
@pytest.mark.parametrize("prompt", [PROMPT[:50], [*PROMPT, *PROMPT]])
def test_a_hand_off_for_another_prompt_tells_prefill_and_loads_nothing(name, prompt):
    """The inner runs with 0 external tokens, and so notifies."""
    one = Rig(name)
    screened, request = one.add(nixl(), list(prompt))
    seen = []
    work = one.work
    one.work = lambda meta: seen.append(dict(meta.reqs_to_recv)) or work(meta)
    one.run()

    assert screened.tell
    assert one.steps.computed[request.request_id] == len(prompt)
    recvs = [metas[request.request_id] for metas in seen if request.request_id in metas]
    assert len(recvs) == 1
    assert recvs[0].remote.request_id == "cmpl-1"
    assert not any(recvs[0].local_block_ids)


def test_a_reused_hand_off_tells_prefill_nothing():
    """A second notification would free what the first request still reads."""
    one = Rig("NixlConnector")
    _, first = one.add(nixl(), list(PROMPT))
    screened, second = one.add(nixl(), list(PROMPT))
    recvs: list[str] = []
    work = one.work
    one.work = lambda meta: recvs.extend(meta.reqs_to_recv) or work(meta)
    one.run()

    assert screened.reason is Reason.HANDOFF_REUSED
    assert recvs == [first.request_id]
    assert second.request_id in one.steps.computed


def test_what_one_engine_issues_another_loads():
    """Prefill's own answer, as vLLM makes it, passes the screen and fits."""
    prefill, decode = Rig("NixlConnector"), Rig("NixlConnector")
    issued: list[Any] = []
    finished = prefill.connector.request_finished_all_groups

    def capture(request: Any, blocks: Any) -> Any:
        answer = finished(request, blocks)
        issued.append(answer[1])
        return answer

    prefill.connector.request_finished_all_groups = capture
    for n in (1, 15, 16, 17, 31, 32, 33, 100, 112, 113):
        prompt = [20 + n] * n
        _, request = prefill.add({"do_remote_decode": True}, prompt)
        prefill.run()
        # Hosts are this machine's in a real hand-off; vLLM's default here is "localhost".
        screened, loading = decode.add(issued[-1], list(prompt))
        assert screened.reason is Reason.NONE, (n, screened)
        assert screened.ask is Ask.LOAD
        decode.run()
        assert loading.request_id in decode.queued
        assert request.request_id in prefill.steps.computed


def test_a_read_back_is_loaded_once():
    """vLLM promises it again for a prompt of one token, and then waits for a load that it never queues."""
    one = Rig(*READBACK)
    _, request = one.add(nixl(1, do_remote_prefill=False, do_remote_decode=True), [10])
    one.run()
    assert request.request_id in one.queued

    one.screening = False
    one.add(nixl(1, do_remote_prefill=False, do_remote_decode=True), [10])
    with pytest.raises(AssertionError, match="left waiting"):
        one.run()


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        nixl(remote_host=...),
        nixl(remote_block_ids=[[1]]),
        nixl(remote_request_id=["x"]),
    ],
)
def test_without_screening_the_rig_finds_what_kills(params):
    """The rig itself must be able to fail."""
    one = Rig("NixlConnector", screening=False)

    def engine() -> None:
        one.add(params, list(PROMPT))
        one.run()

    with pytest.raises((AssertionError, TypeError, KeyError)):
        engine()
