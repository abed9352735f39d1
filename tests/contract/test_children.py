"""Several connectors on decode: what is said of a load is said of the child that made it.

A real `MultiConnector` over the real NIXL connector and a scripted one, which stands for a CPU tier: real
ones need a GPU to load from. Only the workers' reports are played.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scheduling import Steps, make_config, make_request, make_scheduler
from scripted import Script, ScriptedConnector
from test_ledger_wrapped import counted, finish
from vllm.v1.outputs import KVConnectorOutput

from shim import plugin

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from handoffs import nixl  # the folder has to be on the path first

CPU = {"kv_connector": "ScriptedConnector", "kv_connector_module_path": "scripted", "kv_role": "kv_both"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
PROMPT = list(range(8, 108))


def several(*children: dict[str, Any]) -> tuple[Steps, ScriptedConnector]:
    """A decode server with these children around one wrapped `MultiConnector`, and its scripted child."""
    plugin.install()
    extra = json.dumps({"shim": {"connector": "MultiConnector"}, "connectors": children})
    steps = Steps(make_scheduler(make_config("shim", role="kv_consumer", policy="recompute", extra=extra)))
    connector = steps.scheduler.connector
    assert connector is not None
    (cpu,) = [child for child in connector._connectors if isinstance(child, ScriptedConnector)]
    return steps, cpu


def load(steps: Steps, cpu: ScriptedConnector, number: int, *, by_cpu: bool, fails: bool) -> None:
    """One request of its own hand-off from one prefill server, whose load ends so."""
    name = f"r{number}"
    prompt = [number, *PROMPT[1:]]
    if by_cpu:
        cpu.scripts[name] = Script(offer=len(prompt))
    params = nixl(len(prompt), remote_request_id=f"prefill-{number}")
    steps.add(make_request(name, prompt, params=params))
    steps.step()
    request = steps.scheduler.requests[name]
    (blocks,) = steps.scheduler.kv_cache_manager.get_block_ids(name)
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    finish(steps, KVConnectorOutput(finished_recving={name}, invalid_block_ids=set(blocks) if fails else set()))


def test_another_childs_failures_open_no_breaker_of_the_peer() -> None:
    """Three failed loads of the CPU tier say nothing of prefill; three of NIXL's own do."""
    steps, cpu = several(CPU, NIXL)
    for number in range(3):
        load(steps, cpu, number, by_cpu=True, fails=True)
    assert counted(steps, "peer_transitions|") == {}
    for number in range(3, 6):
        load(steps, cpu, number, by_cpu=False, fails=True)
    assert counted(steps, "peer_transitions|") == {"peer_transitions|open": 1}


def test_another_childs_successes_do_not_speak_for_the_peer() -> None:
    """Two failures of NIXL's, a success of the CPU tier, and NIXL's third: the breaker opens."""
    steps, cpu = several(CPU, NIXL)
    for number, by_cpu in enumerate((False, False, True, False)):
        load(steps, cpu, number, by_cpu=by_cpu, fails=not by_cpu)
    assert counted(steps, "peer_transitions|") == {"peer_transitions|open": 1}
