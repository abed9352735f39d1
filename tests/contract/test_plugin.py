"""`kv_connector: "shim"` against real vLLM configs, in each form a user can write it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from shim import plugin
from shim.connector.mixin import ShimMixin


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin, as vLLM would have run it, twice."""
    monkeypatch.delenv("SHIM_DISABLE", raising=False)
    plugin.install()
    plugin.install()


def config(connector: str = "shim", **fields: Any) -> KVTransferConfig:
    """A transfer config as a user writes it."""
    return KVTransferConfig(kv_connector=connector, kv_role="kv_both", **fields)


def test_the_word_shim_wraps_nixl() -> None:
    """The default inner connector keeps its configured name, so vLLM's checks by name stay true."""
    made = config()
    assert (made.kv_connector, made.kv_connector_module_path) == ("NixlConnector", "shim.connector")
    cls = KVConnectorFactory.get_connector_class(made)
    inner = KVConnectorFactory.get_connector_class_by_name("NixlConnector")
    assert issubclass(cls, inner)
    assert cls.__mro__[1:3] == (ShimMixin, inner)
    assert cls.__name__ == "Shim_NixlPullConnector"
    assert KVConnectorFactory.get_connector_class(made) is cls
    assert KVConnectorFactory.get_connector_class_by_name(cls.__name__) is cls


def test_the_command_line_form() -> None:
    """`--kv-transfer-config` JSON goes through vLLM's own parser."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    text = json.dumps(
        {
            "kv_connector": "shim",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {"shim": {"connector": "OffloadingConnector"}},
        }
    )
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", "m", "--kv-transfer-config", text]))
    assert args.kv_transfer_config is not None
    assert args.kv_transfer_config.kv_connector == "OffloadingConnector"
    assert args.kv_transfer_config.kv_connector_module_path == "shim.connector"


def test_a_config_built_before_the_plugin_ran() -> None:
    """A KVTransferConfig made by a user's script, before vLLM loads plugins, works all the same."""
    code = (
        "from vllm.config import KVTransferConfig, VllmConfig\n"
        "early = KVTransferConfig(kv_connector='shim', kv_role='kv_both')\n"
        "assert early.kv_connector == 'shim'\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "made = VllmConfig(kv_transfer_config=early).kv_transfer_config\n"
        "print(made.kv_connector, made.kv_connector_module_path)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["NixlConnector", "shim.connector"]


def test_the_plugin_is_found_by_vllm() -> None:
    """The entry point is there, under the name the README gives for VLLM_PLUGINS."""
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.config import KVTransferConfig\n"
        "print(KVTransferConfig(kv_connector='shim', kv_role='kv_both').kv_connector)"
    )
    env = {**os.environ, "VLLM_PLUGINS": "kv_shim"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.splitlines()[-1] == "NixlConnector"


def test_the_official_long_form() -> None:
    """An inner name with `kv_connector_module_path` needs no sugar."""
    made = config("OffloadingConnector", kv_connector_module_path="shim.connector")
    assert made.kv_connector == "OffloadingConnector"
    assert issubclass(KVConnectorFactory.get_connector_class(made), ShimMixin)


def test_a_class_outside_vllm() -> None:
    """`package.module:Class` names an inner connector that vLLM does not register."""
    name = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector:ExampleConnector"
    made = config(kv_connector_extra_config={"shim": {"connector": name}})
    cls = KVConnectorFactory.get_connector_class(made)
    assert (made.kv_connector, cls.__name__) == (name, "Shim_ExampleConnector")


def test_children_of_a_multi_connector_are_wrapped_one_by_one() -> None:
    """Entries that say `shim` are rewritten, the others and the user's own dict are not touched."""
    extra = {
        "connectors": [
            {"kv_connector": "shim", "kv_role": "kv_both"},
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
        ]
    }
    made = config("MultiConnector", kv_connector_extra_config=extra)
    first, second = made.kv_connector_extra_config["connectors"]
    assert (first["kv_connector"], first["kv_connector_module_path"]) == ("NixlConnector", "shim.connector")
    assert second == {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    assert extra["connectors"][0]["kv_connector"] == "shim"
    assert plugin.uses_shim(made)


def test_two_ledgers_on_one_server_are_refused() -> None:
    """Two wrapped children would count every request twice; wrapping the parent counts it once."""
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("shim", "shim")]
    with pytest.raises(ValueError, match="wanted one ledger a server"):
        config("MultiConnector", kv_connector_extra_config={"connectors": children})
    around = {"shim": {"connector": "MultiConnector"}, "connectors": children}
    assert config(kv_connector_extra_config=around).kv_connector == "MultiConnector"


@pytest.mark.parametrize(
    ("connector", "bare"),
    [
        (None, ("NixlConnector", None)),
        ("OffloadingConnector", ("OffloadingConnector", None)),
        ("shim.fake:Inner", None),
        (
            "vllm.distributed.kv_transfer.kv_connector.v1.example_connector:ExampleConnector",
            ("ExampleConnector", "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"),
        ),
    ],
)
def test_disabled_is_the_bare_inner_connector(
    monkeypatch: pytest.MonkeyPatch, connector: str | None, bare: tuple[str, str | None] | None
) -> None:
    """SHIM_DISABLE=1: exactly what the user would have without us."""
    monkeypatch.setenv("SHIM_DISABLE", "1")
    section = {} if connector is None else {"connector": connector}
    if bare is None:
        with pytest.raises(ValueError, match="importable"):
            config(kv_connector_extra_config={"shim": section})
        return
    made = config(kv_connector_extra_config={"shim": section})
    assert (made.kv_connector, made.kv_connector_module_path) == bare
    assert not issubclass(KVConnectorFactory.get_connector_class(made), ShimMixin)


def test_disabled_long_form_is_the_inners_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the module path written out, the path still resolves, to the inner's class."""
    monkeypatch.setenv("SHIM_DISABLE", "1")
    made = config("OffloadingConnector", kv_connector_module_path="shim.connector")
    cls = KVConnectorFactory.get_connector_class(made)
    assert cls is KVConnectorFactory.get_connector_class_by_name("OffloadingConnector")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"connector": "NixlConector"}, ["'NixlConector'", "did you mean 'NixlConnector'?"]),
        ({"conector": "x"}, ["did you mean 'connector'?"]),
        ({"connector": "no.such.module:Thing"}, ["no.such.module", "PYTHONPATH"]),
        ({"connector": "json:JSONDecoder"}, ["KV connector class"]),
        ({"connector": "shim"}, ["'shim'", "registered"]),
    ],
)
def test_a_wrong_setting_stops_the_start(section: dict[str, Any], words: list[str]) -> None:
    """A plugin that raises is skipped by vLLM, a config that raises stops it: ours does the latter."""
    with pytest.raises(ValueError, match="kv_connector_extra_config") as caught:
        config(kv_connector_extra_config={"shim": section})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("connector", "extra", "words"),
    [
        ("NixlConnector", {"shim": {"expect_remote": "always"}}, "is not wrapped"),
        (
            "MultiConnector",
            {"shim": {}, "connectors": [{"kv_connector": "shim", "kv_role": "kv_both"}]},
            "is not wrapped",
        ),
        (
            "MultiConnector",
            {
                "connectors": [
                    {"kv_connector": "shim", "kv_role": "kv_both"},
                    {
                        "kv_connector": "MultiConnector",
                        "kv_connector_extra_config": {"connectors": [{"kv_connector": "shim"}]},
                    },
                ]
            },
            "one ledger a server",
        ),
    ],
)
def test_settings_nobody_would_read_stop_the_start(connector: str, extra: dict[str, Any], words: str) -> None:
    """A section beside a connector that is not wrapped, and a second ledger at any depth."""
    with pytest.raises(ValueError, match=words):
        config(connector, kv_connector_extra_config=extra)


def test_two_inner_connectors_are_one_too_many() -> None:
    """The long form names it already; another in the section would be ignored."""
    with pytest.raises(ValueError, match="remove one of the two"):
        config(
            "NixlConnector",
            kv_connector_module_path="shim.connector",
            kv_connector_extra_config={"shim": {"connector": "OffloadingConnector"}},
        )


def test_a_nested_entry_is_resolved() -> None:
    """One wrapped child at depth two, and the entrypoint's half is wanted for it."""
    deep = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "shim"}]},
    }
    made = config("MultiConnector", kv_connector_extra_config={"connectors": [deep]})
    [child] = made.kv_connector_extra_config["connectors"]
    [grandchild] = child["kv_connector_extra_config"]["connectors"]
    assert grandchild["kv_connector"] == "NixlConnector"
    assert plugin.uses_shim(made)


def test_a_disabled_child_leaves_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `info` can say `disabled` in whatever process gets the config."""
    monkeypatch.setenv("SHIM_DISABLE", "1")
    children = [{"kv_connector": "shim", "kv_role": "kv_both"}]
    made = config("MultiConnector", kv_connector_extra_config={"connectors": children})
    assert "shim" in made.kv_connector_extra_config
    assert not plugin.uses_shim(made)


def test_two_ways_to_say_it_at_once_are_refused() -> None:
    """`shim` with somebody else's module path is a contradiction."""
    with pytest.raises(ValueError, match="remove kv_connector_module_path"):
        config(kv_connector_module_path="my.module")


def test_the_module_is_no_trap_for_inspection() -> None:
    """Whoever probes the module for odd attributes gets AttributeError, nothing else."""
    import shim.connector

    for name in ("__file__x", "__wrapped__", "nonsense", "NixlConector", "a:b"):
        assert not hasattr(shim.connector, name)


@pytest.mark.parametrize("path", [None, "some.module"])
def test_servers_without_the_shim_are_left_alone(path: str | None) -> None:
    """Configs that don't name the shim come out as they went in, and no entrypoint hook is installed."""
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.config import KVTransferConfig, VllmConfig\n"
        "from fastapi import FastAPI\n"
        "made = KVTransferConfig(kv_connector='OffloadingConnector', kv_role='kv_both')\n"
        "VllmConfig(kv_transfer_config=made)\n"
        "print(made.kv_connector, made.kv_connector_module_path, made.kv_connector_extra_config,\n"
        "      hasattr(FastAPI.build_middleware_stack, '_kv_shim_installed'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "OffloadingConnector None {} False"
    made = config("NixlConnector", kv_connector_module_path=path)
    assert (made.kv_connector, made.kv_connector_module_path) == ("NixlConnector", path)


def test_using_the_shim_installs_the_entrypoint_once() -> None:
    """The settled config hooks middleware and hand-off into this process, however often it is built."""
    from fastapi import FastAPI
    from vllm.v1.engine.core_client import AsyncMPClient

    VllmConfig(kv_transfer_config=config())
    stack, add = FastAPI.build_middleware_stack, AsyncMPClient.add_request_async
    VllmConfig(kv_transfer_config=config())
    assert FastAPI.build_middleware_stack is stack
    assert AsyncMPClient.add_request_async is add
    assert stack._kv_shim_installed
