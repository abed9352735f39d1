"""The same through the wrapped connector: real scheduler, real mixin, counts as the API server gets them."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import Any

import pytest
from scheduling import Steps, make_config, make_request, make_scheduler
from scripted import Script, ScriptedConnector
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from shim import plugin
from shim.connector import wrap
from shim.telemetry.stats import ShimStats

LOAD = {"do_remote_prefill": True}
HANDOFF = {"do_remote_decode": True}
PROMPT = list(range(8, 108))


def wrapped(role: str, policy: str = "recompute") -> tuple[Steps, ScriptedConnector]:
    """A scheduler with the scripted connector wrapped, configured as a user would."""
    plugin.install()
    extra = json.dumps({"shim": {"connector": "scripted:ScriptedConnector"}})
    config = make_config("shim", role=role, policy=policy, extra=extra)
    steps = Steps(make_scheduler(config))
    connector = steps.scheduler.connector
    assert isinstance(connector, ScriptedConnector)
    assert type(connector) is not ScriptedConnector
    return steps, connector


def counted(steps: Steps, prefix: str) -> dict[str, int]:
    """All counters that begin so, over all steps."""
    total: Counter[str] = Counter()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for name, found in value.items():
                if isinstance(name, str) and name.startswith(prefix) and isinstance(found, int):
                    total[name] += found
                walk(found)

    for payload in steps.stats:
        walk(payload)
    return dict(total)


def finish(steps: Steps, transfers: KVConnectorOutput | None = None) -> None:
    """Step until the requests are gone, and once more for what the last has to report."""
    for _ in range(30):
        steps.step(transfers)
        transfers = None
        if not steps.scheduler.requests:
            steps.step()
            return
    raise AssertionError(list(steps.scheduler.requests))


@pytest.mark.parametrize("lost", [False, True])
def test_a_decode_servers_requests_are_counted(lost: bool) -> None:
    """With its params a request is remote with a tail of one; without them a fault, token by token."""
    steps, connector = wrapped("kv_consumer")
    if lost:
        steps.add(make_request("a", PROMPT))
        finish(steps)
        assert counted(steps, "requests|") == {"requests|local_prefill|params_missing": 1}
        assert counted(steps, "prompt_tokens|") == {"prompt_tokens|fault|params_missing": 100}
        return
    connector.scripts["a"] = Script(offer=100)
    steps.add(make_request("a", PROMPT, params=dict(LOAD)))
    steps.step()
    finish(steps, KVConnectorOutput(finished_recving={"a"}))
    assert counted(steps, "requests|") == {"requests|remote|none": 1}
    assert counted(steps, "prompt_tokens|") == {"prompt_tokens|tail|tail": 1}
    assert counted(steps, "loads_started") == {"loads_started": 1}


def test_a_failed_load_is_counted() -> None:
    """Under `recompute` the tokens vLLM had booked as remote are computed here."""
    steps, connector = wrapped("kv_consumer")
    connector.scripts["a"] = Script(offer=100)
    steps.add(make_request("a", PROMPT, params=dict(LOAD)))
    steps.step()
    invalid = set(connector.loading["a"])
    finish(steps, KVConnectorOutput(finished_recving={"a"}, invalid_block_ids=invalid))
    assert counted(steps, "requests|") == {"requests|local_prefill|load_failed": 1}
    assert counted(steps, "prompt_tokens|") == {"prompt_tokens|fault|load_failed": 100}


def test_a_prefill_servers_handoff_is_counted() -> None:
    """Issued, then closed when the connector lets go of the blocks."""
    steps, connector = wrapped("kv_producer")
    connector.scripts["a"] = Script(pins=True, handoff={"do_remote_prefill": True})
    steps.add(make_request("a", PROMPT, params=dict(HANDOFF), max_tokens=1))
    steps.step()
    steps.step()
    finish(steps, KVConnectorOutput(finished_sending={"a"}))
    assert counted(steps, "requests|") == {"requests|prefill|none": 1}
    assert counted(steps, "handoffs|") == {"handoffs|issued|none": 1}
    assert counted(steps, "handoffs_closed|") == {"handoffs_closed|unknown": 1}


GOOD = {
    **LOAD,
    "remote_block_ids": [list(range(7))],
    "remote_engine_id": "prefill",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


@pytest.mark.parametrize(
    ("params", "told"),
    [(GOOD, {"c": []}), ({**GOOD, "remote_host": None}, {}), (dict(HANDOFF), {})],
)
def test_a_clean_up_is_no_request(params: dict[str, Any], told: dict[str, Any]) -> None:
    """What the API server rejected is not counted, and NIXL frees prefill's blocks for it.

    It is screened all the same: the clean-up's params are the client's, and reach the inner's finish hook.
    """
    plugin.install()
    steps = Steps(make_scheduler(make_config("shim", role="kv_both")))
    connector = steps.scheduler.connector
    request = make_request("c", [0], max_tokens=1, params=dict(params))
    request.abort_immediately = True
    steps.add(request)
    steps.scheduler.finish_requests("c", RequestStatus.FINISHED_ABORTED)  # as core.py `add_request` does
    pulls = {name: list(one[1]) for name, one in connector.connector_scheduler._reqs_need_recv.items()}
    assert pulls == told
    steps.add(make_request("after", PROMPT))
    finish(steps)
    verdicts = {k: v for k, v in counted(steps, "requests|").items() if "|local_" not in k}
    assert verdicts == {}
    assert sum(counted(steps, "params|").values()) == 1
    for family in ("stamps|", "handoffs|", "errors|"):
        assert counted(steps, family) == {}


def nixl() -> Steps:
    """A decode server's scheduler with NIXL wrapped, under `fail`."""
    plugin.install()
    return Steps(make_scheduler(make_config("shim", role="kv_consumer", policy="fail")))


def pulled(steps: Steps) -> dict[str, int]:
    """The next step's loads, by request, with the number of blocks each is to read."""
    meta = steps.schedule().kv_connector_metadata
    return {name: sum(map(len, one.local_block_ids)) for name, one in meta.reqs_to_recv.items()}


def failing(steps: Steps, request_id: str) -> KVConnectorOutput:
    """What a worker reports of a load that failed, on either version."""
    assert steps.scheduler.requests[request_id].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    (blocks,) = steps.scheduler.kv_cache_manager.get_block_ids(request_id)
    return KVConnectorOutput(finished_recving={request_id}, invalid_block_ids=set(blocks))


def test_a_router_may_send_a_hand_off_again_after_a_load_that_failed() -> None:
    """Nobody read it, so prefill has it: a retry pulls, and vLLM's clean-up before it frees nothing."""
    steps = nixl()
    steps.add(make_request("first", PROMPT, params=dict(GOOD)))
    assert pulled(steps) == {"first": 7}
    steps.update(failing(steps, "first"))

    cleanup = make_request("cleanup", [0], max_tokens=1, params=dict(GOOD))
    cleanup.abort_immediately = True
    steps.add(cleanup)
    steps.scheduler.finish_requests("cleanup", RequestStatus.FINISHED_ABORTED)

    steps.add(make_request("second", PROMPT, params=dict(GOOD)))
    assert pulled(steps) == {"second": 7}
    steps.update(KVConnectorOutput(finished_recving={"second"}))
    finish(steps)
    assert counted(steps, "requests|") == {"requests|failed|load_failed": 1, "requests|remote|none": 1}


def test_a_hand_off_that_was_read_is_not_read_again() -> None:
    """The first reader's notification freed it."""
    steps = nixl()
    steps.add(make_request("first", PROMPT, params=dict(GOOD)))
    assert pulled(steps) == {"first": 7}
    steps.update(KVConnectorOutput(finished_recving={"first"}))
    steps.add(make_request("second", PROMPT, params=dict(GOOD)))
    assert "second" not in pulled(steps)
    steps.update()
    finish(steps)
    verdicts = counted(steps, "requests|")
    assert verdicts == {"requests|remote|none": 1, "requests|local_prefill|handoff_reused": 1}


def test_workers_say_which_loads_failed_on_them() -> None:
    """vLLM's aggregator adds them up for the scheduler; to the API server they do not travel."""
    if not hasattr(KVConnectorBase_V1, "get_transfer_results"):
        pytest.skip("vLLM 0.28 does not say on which worker a load failed")
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    class Failing(ScriptedConnector):
        failed: frozenset[str]

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            return KVConnectorTransferResults(set(), {"a", "b"}, set(self.failed))

    plugin.install()
    config = make_config("shim", extra=json.dumps({"shim": {"connector": "scripted:ScriptedConnector"}}))
    outputs = []
    for failed in ({"a", "b"}, {"a"}):
        worker = wrap._wrap(Failing)(config, KVConnectorRole.WORKER, None)
        worker.failed = frozenset(failed)
        results = worker.get_transfer_results(set())
        stats = pickle.loads(pickle.dumps(worker.get_kv_connector_stats()))
        assert worker.get_kv_connector_stats() is None
        report = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_stats=stats,
        )
        outputs.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=report))
    both = KVOutputAggregator(2).aggregate(outputs).kv_connector_output.kv_connector_stats
    assert both.failed_loads == {"a": 2, "b": 1}
    assert both.data == ShimStats().data
