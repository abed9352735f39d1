"""Lets vLLM's Mooncake connector start on a machine without an accelerator; on the tests' servers' path only.

Its worker asks `torch.accelerator.current_device_index()`, which raises there, before anything is moved.
"""

import importlib.abc
import sys

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"


class NoAccelerator(importlib.abc.MetaPathFinder):
    """Finds nothing: it patches torch when the connector is about to be imported, not in every process."""

    def find_spec(self, fullname, path, target=None):
        """Called for every module that is not imported yet."""
        if fullname == CONNECTOR:
            import torch

            torch.accelerator.current_device_index = lambda: 0


sys.meta_path.insert(0, NoAccelerator())
