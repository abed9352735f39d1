"""Write the random Llama models that the demo and the end-to-end tests serve; no hub is asked.

Run as a script by the Python of a vLLM environment, which has torch and transformers:
`python -m shim.cli.model small large --into .models`. A model that is already there is kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 312
"""Tokens: 256 bytes, the special ones, and merges; one sentence gives just enough for these."""

SPECIAL = ("<pad>", "<s>", "</s>")

CONTEXT = 8192

SENTENCE = "the quick brown fox jumps over the lazy dog while the prefill server keeps the blocks"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_COMPLETE = "complete.json"


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama's shape; `heads` divides `hidden` into heads of 64, which CPU attention takes."""

    hidden: int
    layers: int

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.hidden // 64


SIZES = {
    # 2.7 M parameters: starts fast; for tests that measure no time.
    "small": Size(hidden=256, layers=4),
    # 21 M: a prefill of 3,500 tokens takes seconds on a CPU, so that a local one shows.
    "large": Size(hidden=512, layers=8),
}


def model_path(folder: Path, size: str) -> Path:
    """Where the model of this size lives inside `folder`."""
    return folder / f"llama-{size}"


def is_written(folder: Path, size: str) -> bool:
    """Whether this model was written in full, by this version of the recipe."""
    marker = model_path(folder, size) / _COMPLETE
    return marker.is_file() and marker.read_text() == _recipe(size)


def write(folder: Path, size: str) -> Path:
    """Write the model of this size into `folder` unless it is there, and return its path.

    `initializer_range` is 0.1: with the default of 0.02 such a model repeats one token whatever the
    prompt, and comparing outputs would prove nothing. The weights are float32, since bfloat16 ends
    in SIGILL inside CPU attention on machines with AMX.
    """
    target = model_path(folder, size)
    if is_written(folder, size):
        return target
    # By name: these come with vLLM, not with the shim, and their types tell nothing here.
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    shape = SIZES[size]
    torch.manual_seed(20240607)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 2,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    folder.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that a run that was broken off leaves no half model.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "model"
        model.save_pretrained(made)
        _tokenizer(transformers).save_pretrained(made)
        (made / _COMPLETE).write_text(_recipe(size))
        if target.exists():
            shutil.rmtree(target)
        os.replace(made, target)  # noqa: PTH105  # atomic, unlike Path.rename on every platform
    return target


def _tokenizer(transformers: Any) -> Any:
    tokenizers: Any = importlib.import_module("tokenizers")
    level: Any = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCE], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )


def _recipe(size: str) -> str:
    shape = SIZES[size]
    return json.dumps({"recipe": 1, "hidden": shape.hidden, "layers": shape.layers})


def main(arguments: list[str] | None = None) -> int:
    """Write the models named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m shim.cli.model", description=__doc__)
    parser.add_argument("sizes", nargs="+", choices=sorted(SIZES))
    parser.add_argument("--into", type=Path, required=True, help="the folder that holds the models")
    options = parser.parse_args(arguments)
    for size in options.sizes:
        write(options.into, size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
