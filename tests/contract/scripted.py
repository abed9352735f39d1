"""An inner connector whose answers and failures are scripted, and a subclass that drives `Observe` bare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


@dataclass
class Script:
    """What the connector does with one request.

    Attributes:
        offer: prompt tokens the peer has, from the prompt's start; may lie below the local hit.
        asynchronous: loads between steps.
        undecided: how often it answers "ask again" first.
        pins: `request_finished` keeps the blocks.
        handoff: what `request_finished` returns.
        forgetful: offers once only, as NIXL does, which clears `do_remote_prefill`.
    """

    offer: int = 0
    asynchronous: bool = True
    undecided: int = 0
    pins: bool = False
    handoff: dict[str, Any] | None = None
    forgetful: bool = True


class ScriptedConnector(KVConnectorBase_V1):
    """Answers by `scripts`; keeps the blocks it is to load, for tests to report their ends and failures."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scripts: dict[str, Script] = {}
        self.loading: dict[str, list[int]] = {}  # asynchronous loads in flight, with their blocks
        self.beside: dict[str, list[int]] = {}  # synchronous loads of the step that is being built
        self.sending: set[str] = set()
        self.local: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        script = self.scripts.get(request.request_id, Script())
        if script.undecided:
            script.undecided -= 1
            return None, script.asynchronous
        most = request.num_prompt_tokens if script.asynchronous else request.num_prompt_tokens - 1
        self.local[request.request_id] = num_computed_tokens
        found = max(0, min(script.offer, most) - num_computed_tokens)
        return found, script.asynchronous and found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        script = self.scripts[request.request_id]
        (ids,) = blocks.get_block_ids()
        block = self._vllm_config.cache_config.block_size
        local = self.local[request.request_id]
        loaded = ids[local // block : -(-(local + num_external_tokens) // block)]
        (self.loading if script.asynchronous else self.beside)[request.request_id] = loaded
        if script.forgetful:
            script.offer = 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for request_id in connector_output.finished_recving or ():
            self.loading.pop(request_id, None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.beside.pop(request.request_id, None)
        self.local.pop(request.request_id, None)
        script = self.scripts.pop(request.request_id, Script())
        # vLLM frees at the first report, so a request must not be both loading and sending (scheduler.py,
        # _update_from_kv_xfer_finished).
        pins = script.pins and request.request_id not in self.loading
        if pins:
            self.sending.add(request.request_id)
        return pins, script.handoff

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Workers only."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Workers only."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Workers only."""

    def wait_for_save(self) -> None:
        """Workers only."""


class WatchedConnector(ScriptedConnector):
    """The scripted connector with `Observe` called as the shim's mixin calls it; `watch` it first."""

    observe: Any = None
    facts: dict[str, Any]

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self.observe.admitted(request, self.facts[request.request_id])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.observe.matched(request, num_computed_tokens, answer)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.observe.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        self.observe.scheduled(scheduler_output)
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        self.observe.output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        answer = super().request_finished(request, block_ids)
        self.observe.finished(request, answer)
        return answer

    def get_kv_connector_stats(self) -> None:
        self.observe.step_done()
