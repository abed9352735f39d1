"""What a LoRA adapter *is*, whatever it is called: by its weights prefill and decode can tell two apart."""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

WEIGHTS = "adapter_model.safetensors"
"""The only format that can be looked into without running it (vllm/lora/lora_model.py reads others too)."""
_SCALING = ("r", "lora_alpha", "use_rslora", "use_dora")
"""What of `adapter_config.json` changes KV; the rest are names and training's."""
_HEADER_LIMIT = 16 << 20
_SAMPLE = 64
"""Bytes looked at in the middle of each tensor: two adapters that were trained apart differ in all of them."""


def fingerprint(path: str) -> str:
    """A digest of the adapter at `path`; empty if there is no such file or it can't be read.

    Takes each tensor's name, type, shape and some of its bytes, in the order of names, so that it is the same
    however the file was written. Read once a file; a file that changes is read again.

    Args:
        path: the adapter's folder, as in vLLM's `LoRARequest.lora_path`; a hub's name gives nothing.
    """
    file = Path(path) / WEIGHTS
    try:
        state = file.stat()
        return _read(str(file), state.st_mtime_ns, state.st_size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, msgspec.MsgspecError):
        return ""


@lru_cache(maxsize=256)
def _read(name: str, _changed: int, _size: int) -> str:
    file = Path(name)
    config = msgspec.json.decode((file.parent / "adapter_config.json").read_bytes())
    hasher = blake2b(repr([config.get(option) for option in _SCALING]).encode(), digest_size=16)
    with file.open("rb") as weights:
        (length,) = struct.unpack("<Q", weights.read(8))
        if length > _HEADER_LIMIT:
            return ""
        tensors: dict[str, Any] = msgspec.json.decode(weights.read(length))
        tensors.pop("__metadata__", None)
        for tensor, about in sorted(tensors.items()):
            start, end = about["data_offsets"]
            weights.seek(8 + length + max(start, (start + end - _SAMPLE) // 2))
            sample = weights.read(min(_SAMPLE, end - start))
            hasher.update(repr((tensor, about["dtype"], about["shape"], sample)).encode())
    return hasher.hexdigest()
