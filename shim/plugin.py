"""The `vllm.general_plugins` entry point: makes `kv_connector: "shim"` mean something.

vLLM runs `install` in every process, possibly several times, and logs and skips a plugin that raises; so
`install` only wraps two `__post_init__`s, and a wrong setting raises later, where it stops the start.
"""

from __future__ import annotations

from typing import Any

from shim import config as settings_of
from shim.config import SECTION, Settings, SettingsError, flag, read_settings
from shim.patch import wrap_once
from shim.telemetry.faults import FAULTS

MODULE = "shim.connector"
"""What `kv_connector_module_path` names; its module-level `__getattr__` makes the wrapped classes."""

MULTI = "MultiConnector"


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
    name, path, extra = config.kv_connector, config.kv_connector_module_path, config.kv_connector_extra_config
    disabled = flag(settings_of.DISABLE_ENV)
    ours, inside = _is_ours(name, path), _wrapped_inside(extra)
    if ours:
        config.kv_connector, config.kv_connector_module_path = _target(name, path, extra)
    elif inside > 1:
        msg = (
            f"{MULTI}: found {inside} entries wrapped by the shim, wanted one ledger a server; set "
            f'kv_connector to "{SECTION}" with {{"{SECTION}": {{"connector": "{MULTI}"}}}} instead'
        )
        raise SettingsError(msg)
    elif SECTION in extra and not disabled:
        msg = (
            f'kv_connector_extra_config["{SECTION}"]: found settings, but kv_connector = {name!r} is not '
            f'wrapped, wanted "{SECTION}" there; set kv_connector to "{SECTION}", or move the settings to the '
            "entry that is wrapped"
        )
        raise SettingsError(msg)
    if inside:
        # New dicts: the ones the user handed in may serve another config too.
        extra = config.kv_connector_extra_config = _rewritten(extra)
    if ours or (inside and disabled):
        # Tells later processes, which get the config as rewritten, that it was ours: also when disabled.
        config.kv_connector_extra_config = {SECTION: {}, **extra}


def uses_shim(config: Any) -> bool:
    """Whether a `KVTransferConfig`, or a child of its `MultiConnector`, is wrapped by the shim."""
    if config is None or config.kv_connector is None:
        return False
    return (
        _is_ours(config.kv_connector, config.kv_connector_module_path)
        or _wrapped_inside(config.kv_connector_extra_config) > 0
    )


def _is_ours(name: object, path: object) -> bool:
    return name == SECTION or path == MODULE


def _is_our_entry(entry: object) -> bool:
    return isinstance(entry, dict) and _is_ours(
        entry.get("kv_connector"), entry.get("kv_connector_module_path")
    )


def _children(extra_config: Any) -> list[Any]:
    children = extra_config.get("connectors") if isinstance(extra_config, dict) else None
    return children if isinstance(children, list) else []


def _wrapped_inside(extra_config: Any) -> int:
    """How many entries of a `MultiConnector` are wrapped, at whatever depth."""
    entries = [child for child in _children(extra_config) if isinstance(child, dict)]
    return sum(
        _is_our_entry(child) + _wrapped_inside(child.get("kv_connector_extra_config")) for child in entries
    )


def _rewritten(extra_config: dict[str, Any]) -> dict[str, Any]:
    """A `MultiConnector`'s options with the sugar of its entries resolved, at whatever depth."""
    return {**extra_config, "connectors": [_entry(child) for child in _children(extra_config)]}


def _entry(entry: Any) -> Any:
    extra = entry.get("kv_connector_extra_config") if isinstance(entry, dict) else None
    if isinstance(extra, dict) and _wrapped_inside(extra):
        entry = {**entry, "kv_connector_extra_config": _rewritten(extra)}
    if not _is_our_entry(entry):
        return entry
    name, path = _target(entry["kv_connector"], entry.get("kv_connector_module_path"), extra)
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
    section = (extra_config or {}).get(SECTION, {})
    if settings.connector != inner and isinstance(section, dict) and "connector" in section:
        msg = (
            f'kv_connector_extra_config["{SECTION}"]["connector"]: found {settings.connector!r} beside '
            f"kv_connector = {name!r}, wanted one inner connector; remove one of the two"
        )
        raise SettingsError(msg)
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

        settings = _entrypoint_settings(config)
        try:
            install_entrypoint(settings, config, vllm_config.model_config)
        except SettingsError:
            raise
        except Exception as error:  # noqa: BLE001  # the server starts as without this half
            FAULTS.say("starting its entrypoint, which is not there now,", error)


def _entrypoint_settings(config: Any) -> Settings:
    """The settings of the wrapped connector: the server's own, or its wrapped child's."""
    extra = None if config is None else config.kv_connector_extra_config
    while extra is not None and SECTION not in extra:
        inside = [
            child
            for child in _children(extra)
            if _is_our_entry(child)
            or (isinstance(child, dict) and _wrapped_inside(child.get("kv_connector_extra_config")))
        ]
        extra = inside[0].get("kv_connector_extra_config") if inside else None
    return read_settings(extra)


def _before_post_init(cls: type[Any], first: Any) -> None:
    """Have `first(instance)` run before `cls.__post_init__`."""

    def make(original: Any) -> Any:
        def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
            first(self)
            original(self, *args, **kwargs)

        return post_init

    wrap_once(cls, "__post_init__", make)
