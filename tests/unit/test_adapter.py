"""A LoRA adapter's fingerprint."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING

import pytest

from shim.entrypoint.adapter import WEIGHTS, fingerprint

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {"r": 8, "lora_alpha": 16, "base_model_name_or_path": "here"}
TENSORS = {"a": bytes(range(200)), "b": bytes(300)}


def adapter(
    folder: Path, tensors: dict[str, bytes] = TENSORS, metadata: object = None, **config: object
) -> str:
    """An adapter's folder, written as safetensors writes it."""
    folder.mkdir(exist_ok=True)
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return str(folder)


def test_an_adapter_is_known_by_its_weights_alone(tmp_path: Path) -> None:
    """Not by its path, its base model's path, the order of its tensors, or what else is written beside them."""
    one = fingerprint(adapter(tmp_path / "one"))
    turned = dict(reversed(TENSORS.items()))
    other = adapter(tmp_path / "two", turned, metadata={"format": "pt"}, base_model_name_or_path="there")

    assert one
    assert fingerprint(other) == one


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({**TENSORS, "a": bytes(200)}, {}),
        ({**TENSORS, "c": b"x"}, {}),
        ({**TENSORS, "b": bytes(301)}, {}),
        (TENSORS, {"lora_alpha": 32}),
    ],
)
def test_another_adapter_is_another(
    tmp_path: Path, tensors: dict[str, bytes], config: dict[str, object]
) -> None:
    """Bytes, tensors, shapes and scaling count."""
    assert fingerprint(adapter(tmp_path / "one")) != fingerprint(adapter(tmp_path / "two", tensors, **config))


def test_a_reloaded_adapter_is_read_again(tmp_path: Path) -> None:
    """`load_inplace` puts new weights under the same path."""
    path = adapter(tmp_path / "one")
    before = fingerprint(path)
    adapter(tmp_path / "one", {**TENSORS, "a": bytes(200)})
    os.utime(tmp_path / "one" / WEIGHTS, ns=(1, 1))

    assert fingerprint(path) not in {"", before}


@pytest.mark.parametrize(
    "junk", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"null", struct.pack("<Q", 9) + b'{"a": 1}}']
)
def test_what_cannot_be_read_proves_nothing(tmp_path: Path, junk: bytes) -> None:
    """No file, a hub's name, another format, or a broken one."""
    path = adapter(tmp_path / "one")
    (tmp_path / "one" / WEIGHTS).write_bytes(junk)

    assert fingerprint(path) == ""
    assert fingerprint("org/adapter") == ""
