"""Real vLLM schedulers for tests, without a worker: `Steps` plays the model runner."""

from __future__ import annotations

import json
import tempfile
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
STOP_TOKEN = 7
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


@cache
def _model_dir() -> tempfile.TemporaryDirectory[str]:
    """A model that has a config and no weights."""
    folder = tempfile.TemporaryDirectory(prefix="kv-shim-model-")
    Path(folder.name, "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return folder


@cache
def make_config(
    connector: str,
    module_path: str | None = None,
    *,
    role: str = "kv_both",
    policy: str = "fail",
    asynchronous: bool = False,
    batched_tokens: int = 64,
    seqs: int = 8,
    extra: str = "{}",
) -> VllmConfig:
    """A config as EngineCore has it.

    Args:
        connector: `kv_connector`.
        module_path: `kv_connector_module_path`.
        role: `kv_role`.
        policy: `kv_load_failure_policy`.
        asynchronous: schedule ahead of outputs.
        batched_tokens: prompt tokens a step may compute; prompts beyond it are chunked.
        seqs: requests that may run at once.
        extra: `kv_connector_extra_config`, as JSON (a config is made once per set of arguments).
    """
    model = ModelConfig(
        model=_model_dir().name, skip_tokenizer_init=True, dtype="float32", max_model_len=1024, seed=0
    )
    transfer = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=module_path,
        kv_role=role,  # type: ignore[arg-type]
        kv_load_failure_policy=policy,  # type: ignore[arg-type]
        kv_connector_extra_config=json.loads(extra),
        kv_buffer_device="cpu",
    )
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=batched_tokens,
            max_model_len=1024,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )


def make_scheduler(config: VllmConfig, *, blocks: int = 1000, asynchronous: bool = False) -> Scheduler:
    """A real scheduler with its connector; `blocks` KV blocks in all, one of them vLLM's null block."""
    config.cache_config.num_gpu_blocks = blocks
    group = KVCacheGroupSpec(
        ["layer"], FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    )
    made: type[Scheduler] = AsyncScheduler if asynchronous else Scheduler
    return made(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


@cache
def _hasher() -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int = 2,
    params: object = None,
    prompt_logprobs: int | None = None,
    resumable: bool = False,
) -> Request:
    """A request as EngineCore makes it; `params` are its `kv_transfer_params`."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=[STOP_TOKEN],
        ignore_eos=True,
        prompt_logprobs=prompt_logprobs,
        extra_args=None if params is None else {"kv_transfer_params": params},
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=_hasher(),
        resumable=resumable,
    )


class Steps:
    """Runs a scheduler as EngineCore's busy loop does, with `depth` steps in flight.

    Attributes:
        computed: prompt tokens computed, by request id, read off each step by itself.
        token: what every request samples next.
        finished: ids whose outputs said that they are finished.
        stats: the connector's stats payloads, as they would go to the API server.
    """

    def __init__(self, scheduler: Scheduler, *, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.token = 5
        self.computed: dict[str, int] = {}
        self.finished: list[str] = []
        self.stats: list[dict[str, Any]] = []
        self.flying: deque[Any] = deque()

    def add(self, request: Request) -> None:
        """The client's request reaches the engine."""
        self.scheduler.add_request(request)

    def schedule(self) -> Any:
        """Build one step and send it to the workers."""
        output = self.scheduler.schedule()
        starts = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, count in output.num_scheduled_tokens.items():
            prompt = self.scheduler.requests[request_id].num_prompt_tokens
            new = min(starts[request_id] + count, prompt) - starts[request_id]
            self.computed[request_id] = self.computed.get(request_id, 0) + max(0, new)
        self.flying.append((output, self._sampled(output)))
        return output

    def _sampled(self, output: Any) -> list[list[int]]:
        """One token for each request whose tokens are all computed after this step."""
        requests = self.scheduler.requests
        return [
            [] if requests[request_id].is_prefill_chunk else [self.token]
            for request_id in output.num_scheduled_tokens
        ]

    def update(self, transfers: KVConnectorOutput | None = None) -> None:
        """Process the oldest step's output; `transfers` is what the workers' connectors report with it."""
        output, sampled = self.flying.popleft()
        ids = list(output.num_scheduled_tokens)
        results = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
                kv_connector_output=transfers,
            ),
        )
        for result in results.values():
            stats = result.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self.stats.append(stats.kv_connector_stats)
            self.finished += [one.request_id for one in result.outputs if one.finish_reason is not None]

    def step(self, transfers: KVConnectorOutput | None = None) -> Any:
        """Build a step and, with as many in flight as may be, process the oldest."""
        output = self.schedule()
        while len(self.flying) >= self.depth:
            self.update(transfers)
            transfers = None
        return output
