"""What a stamp may refuse, on vLLM's own request classes: only what proves another prompt."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from scheduling import Steps, make_config, make_scheduler
from test_ledger_wrapped import counted
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from shim import plugin, stamp
from shim.connector.recover import KV_SHIM
from shim.entrypoint import handoff
from shim.entrypoint.middleware import HttpRequest, _current
from shim.telemetry.catalog import StampResult

PROMPT = list(range(8, 108))
ASK = {"do_remote_decode": True}
CAT, DOG = "c" * 64, "d" * 64
HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(1, 8))],
    "remote_engine_id": "engine-p",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": len(PROMPT),
}


def picture(identifier: str, mm_hash: str | None = None) -> MultiModalFeatureSpec:
    """One at the prompt's second block, as vLLM's input processor makes it."""
    position = PlaceholderRange(offset=16, length=32)
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=position, mm_hash=mm_hash or identifier
    )


def adapter(name: str, folder: Any = None) -> LoRARequest:
    """A LoRA by this name, whose weights are in a folder or cannot be read."""
    return LoRARequest(lora_name=name, lora_int_id=1, lora_path=str(folder or "org/adapter"))


def arriving(params: object, body: bytes = b"{}", **fields: Any) -> EngineCoreRequest:
    """An engine request on its way out of an API server that serves this body, over vLLM's own wire."""
    made = {
        "request_id": "r",
        "external_req_id": "r",
        "prompt_token_ids": PROMPT,
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=2, extra_args={"kv_transfer_params": params}),
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
        **fields,
    }
    known = {field.name for field in msgspec.structs.fields(EngineCoreRequest)}
    request = EngineCoreRequest(**{name: value for name, value in made.items() if name in known})
    http = HttpRequest({"type": "http", "path": "/v1/chat/completions", "headers": []})
    http.remember(body)
    token = _current.set(http)
    try:
        handoff.attach(request)
    finally:
        _current.reset(token)
    sent: EngineCoreRequest = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
    return sent


@pytest.fixture
def compared(monkeypatch):
    """What decode counts for a stamp that prefill made of one request and decode checks with another."""
    plugin.install()
    monkeypatch.setattr(handoff.server, "hashing", "0.32.0 blake3 model")

    def run(prefill: dict[str, Any], decode: dict[str, Any]) -> tuple[StampResult, int]:
        asked = arriving(ASK, **prefill).sampling_params.extra_args[KV_SHIM]
        prompt = msgspec.convert(asked["prompt"], stamp.Prompt)
        made = stamp.encode(stamp.make(prompt, issued=time.time(), lease=30.0))
        extra = json.dumps({"shim": {"connector": "NixlConnector"}})
        steps = Steps(make_scheduler(make_config("shim", role="kv_consumer", extra=extra)))
        received = arriving({**HANDOFF, stamp.KEY: made}, **decode)
        # The picture's encoder is not at stake: the scheduler plays without one.
        request = Request(
            request_id="r",
            prompt_token_ids=received.prompt_token_ids,
            sampling_params=received.sampling_params,
            pooling_params=None,
        )
        connector = steps.scheduler.connector
        connector.on_new_request(request)
        loaded, _ = connector.get_num_new_matched_tokens(request, 0)
        connector.request_finished(request, [])
        payload = connector.get_kv_connector_stats()
        assert payload is not None
        steps.stats.append(payload.data)
        ((name, _),) = counted(steps, "stamps|").items()
        return StampResult(name.partition("|")[2]), loaded

    return run


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"mm_features": [picture(CAT)]}, {}),
        ({"mm_features": [picture(CAT)]}, {"mm_features": [picture("placeholder-0")]}),
        (
            {"mm_features": [picture(CAT)]},
            {"mm_features": [picture(DOG)], "body": b'{"features": {"mm_hashes": {"image": ["d"]}}}'},
        ),
        (
            {"mm_features": [picture("renderer0-mm-1-image-0")]},
            {"mm_features": [picture("renderer0-mm-7-image-0")]},
        ),
        ({"cache_salt": "pepper"}, {}),
        ({}, {"cache_salt": "pepper"}),
        ({"lora_request": adapter("alice")}, {"lora_request": adapter("alice-v1")}),
        ({"lora_request": adapter("alice")}, {}),
    ],
)
def test_what_one_side_lacks_or_renames_is_pulled_as_without_the_shim(compared, prefill, decode) -> None:
    """Placeholder tokens prefilled in place of the picture would be a wrong answer with status 200."""
    assert compared(prefill, decode) == (StampResult.INCOMPARABLE, len(PROMPT))


@pytest.mark.parametrize(
    "both",
    [
        {},
        {"mm_features": [picture(CAT)]},
        {"mm_features": [picture("alice:" + CAT, CAT)], "lora_request": adapter("alice")},
        {"cache_salt": "pepper"},
    ],
)
def test_one_prompt_on_both_sides_is_ok(compared, both) -> None:
    """The stamp still finds it to be so."""
    assert compared(both, both) == (StampResult.OK, len(PROMPT))


def test_another_picture_at_the_same_place_is_not_pulled(compared) -> None:
    """Both sides have hashed what they see."""
    assert compared({"mm_features": [picture(CAT)]}, {"mm_features": [picture(DOG)]}) == (
        StampResult.MISMATCH,
        0,
    )


def test_another_adapter_by_the_same_name_is_not_pulled(compared, tmp_path) -> None:
    """Both sides have read its weights, written here with safetensors itself."""
    for name, fill in (("one", 1.0), ("same", 1.0), ("other", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
        save_file({"a.lora_A.weight": torch.full((8, 8), fill)}, tmp_path / name / "adapter_model.safetensors")
    one = {"lora_request": adapter("alice", tmp_path / "one")}

    assert compared(one, {"lora_request": adapter("alice", tmp_path / "other")}) == (StampResult.MISMATCH, 0)
    assert compared(one, {"lora_request": adapter("alice", tmp_path / "same")}) == (StampResult.OK, len(PROMPT))
