"""The `vllm.general_plugins` entry point: makes `kv_connector: "shim"` mean something.

vLLM runs `install` in every process, possibly several times, and logs and skips a plugin that raises; so
`install` only wraps two `__post_init__`s, and a wrong setting raises later, where it stops the start.
"""

from __future__ import annotations

import functools
from typing import Any

from shim import config as settings_of
from shim.config import SECTION, Settings, SettingsError, flag, read_settings

MODULE = "shim.connector"
"""What `kv_connector_module_path` names; its module-level `__getattr__` makes the wrapped classes."""

MULTI = "MultiConnector"
_INSTALLED = "_kv_shim_installed"


def install() -> None:
    """Teach this process's vLLM the name `shim`. Idempotent; changes nothing for servers that don't use it."""
    from vllm.config import KVTransferConfig, VllmConfig  # noqa: PLC0415  # `import shim` must stay light

    _before_post_init(KVTransferConfig, resolve)
    _before_post_init(VllmConfig, _settle)


def resolve(config: Any) -> None:
    """Rewrite the sugar in a `KVTransferConfig`, in place, before vLLM looks at the connector's name.

    `kv_connector: "shim"` becomes the inner connector's own name plus `kv_connector_module_path`, so that
    vLLM's checks by name stay true; the same for the entries of a `MultiConnector`. With `SHIM_DISABLE` set
    it becomes the bare inner connector.

    Raises:
        SettingsError: wrong settings, or an inner connector that does not exist.
    """
    if config is None or config.kv_connector is None:
        return
    name, path = config.kv_connector, config.kv_connector_module_path
    if _is_ours(name, path):
        config.kv_connector, config.kv_connector_module_path = _target(
            name, path, config.kv_connector_extra_config
        )
        # Tells later processes, which get the config as rewritten, that it was ours: also when disabled.
        config.kv_connector_extra_config = {SECTION: {}, **config.kv_connector_extra_config}
    if config.kv_connector == MULTI:
        children = config.kv_connector_extra_config.get("connectors")
        ours = [child for child in children if _is_our_entry(child)] if isinstance(children, list) else []
        if len(ours) > 1 and not _is_ours(name, path):
            msg = (
                f"{MULTI}: found {len(ours)} entries wrapped by the shim, wanted one ledger a server; set "
                f'kv_connector to "{SECTION}" with {{"{SECTION}": {{"connector": "{MULTI}"}}}} instead'
            )
            raise SettingsError(msg)
        if ours:
            # A new dict: the one the user handed in may serve another config too.
            config.kv_connector_extra_config = {
                **config.kv_connector_extra_config,
                "connectors": [_entry(child) for child in children],
            }


def uses_shim(config: Any) -> bool:
    """Whether a `KVTransferConfig`, or a child of its `MultiConnector`, is wrapped by the shim."""
    if config is None or config.kv_connector is None:
        return False
    children = config.kv_connector_extra_config.get("connectors")
    return _is_ours(config.kv_connector, config.kv_connector_module_path) or (
        isinstance(children, list) and any(map(_is_our_entry, children))
    )


def _is_ours(name: object, path: object) -> bool:
    return name == SECTION or path == MODULE


def _is_our_entry(entry: object) -> bool:
    return isinstance(entry, dict) and _is_ours(
        entry.get("kv_connector"), entry.get("kv_connector_module_path")
    )


def _entry(entry: Any) -> Any:
    if not _is_our_entry(entry):
        return entry
    name, path = _target(
        entry["kv_connector"],
        entry.get("kv_connector_module_path"),
        entry.get("kv_connector_extra_config"),
    )
    return {**entry, "kv_connector": name, "kv_connector_module_path": path}


def _target(name: str, path: str | None, extra_config: Any) -> tuple[str, str | None]:
    """The name and module path to put in place of what the user wrote."""
    from shim.connector.wrap import inner_class  # noqa: PLC0415  # needs vLLM

    if path not in (None, MODULE):
        msg = (
            f'kv_connector: found "{SECTION}" together with kv_connector_module_path = {path!r}, wanted one of '
            f"them; remove kv_connector_module_path and name the inner connector in "
            f'kv_connector_extra_config["{SECTION}"]["connector"]'
        )
        raise SettingsError(msg)
    settings = read_settings(extra_config)
    inner = settings.connector if name == SECTION else name
    inner_class(inner)  # raises with the nearest right name
    if not flag(settings_of.DISABLE_ENV):
        return inner, MODULE
    module, colon, attribute = inner.rpartition(":")
    return (attribute, module) if colon else (inner, None)


def _settle(vllm_config: Any) -> None:
    """Before `VllmConfig` looks at its parts: configs built before the plugin ran, and the entrypoint half."""
    config = vllm_config.kv_transfer_config
    resolve(config)
    ours = uses_shim(config) or (config is not None and SECTION in config.kv_connector_extra_config)
    if ours or flag(settings_of.ENTRYPOINT_ENV):
        from shim.entrypoint import install as install_entrypoint  # noqa: PLC0415  # needs vLLM

        install_entrypoint(_entrypoint_settings(config), config)


def _entrypoint_settings(config: Any) -> Settings:
    """The settings of the outermost wrapped connector: the server's own, or its first wrapped child's."""
    if config is None:
        return Settings()
    extra = config.kv_connector_extra_config
    children = [child for child in extra.get("connectors") or () if _is_our_entry(child)]
    if SECTION not in extra and children:
        extra = children[0].get("kv_connector_extra_config")
    return read_settings(extra)


def _before_post_init(cls: type[Any], first: Any) -> None:
    """Have `first(instance)` run before `cls.__post_init__`, once per process however often we are called."""
    original = cls.__post_init__
    if getattr(original, _INSTALLED, False):
        return

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        first(self)
        original(self, *args, **kwargs)

    setattr(post_init, _INSTALLED, True)
    cls.__post_init__ = post_init
