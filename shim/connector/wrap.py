"""The class factory: a dynamic subclass `(ShimMixin, inner)` of any KV connector.

What the mixin does not override *is* the inner's: new vLLM methods, properties, class methods,
`SupportsHMA` and per-layer worker hooks stay exact and cost nothing.
"""

from __future__ import annotations

import difflib
import importlib
from functools import cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.utils.func_utils import supports_kw

from shim.config import DISABLE_ENV, SECTION, SettingsError, flag
from shim.connector.mixin import ShimMixin

CLASS_PREFIX = "Shim_"


def shim_class(name: str) -> type[Any]:
    """The class vLLM gets for the configured inner connector `name`.

    Args:
        name: a name registered in vLLM's factory, or `package.module:Class`.

    Returns:
        One and the same class at every call; with `SHIM_DISABLE` set, the inner's own.

    Raises:
        SettingsError: no such connector.
    """
    inner: Any = inner_class(name)
    return inner if flag(DISABLE_ENV) else _wrap(inner)


def inner_class(name: str) -> type[Any]:
    """The connector class that `name` means without the shim.

    Raises:
        SettingsError: no such connector; names the nearest right one.
    """
    module_name, colon, attribute = name.rpartition(":")
    if colon:
        return _imported(name, module_name, attribute)
    registry = KVConnectorFactory._registry  # noqa: SLF001  # vLLM lists its names nowhere else
    known = [entry for entry in registry if not entry.startswith(CLASS_PREFIX)]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        advice = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
        msg = (
            f'kv_connector_extra_config["{SECTION}"]["connector"]: found {name!r}, wanted a connector '
            f'registered in this vLLM or "package.module:Class"; {advice}'
        )
        raise SettingsError(msg)
    return KVConnectorFactory.get_connector_class_by_name(name)  # type: ignore[no-any-return]


def _imported(name: str, module_name: str, attribute: str) -> type[Any]:
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        msg = (
            f'kv_connector_extra_config["{SECTION}"]["connector"]: found {name!r}, wanted an importable '
            f'"package.module:Class"; {type(error).__name__}: {error}; check PYTHONPATH and the spelling'
        )
        raise SettingsError(msg) from error
    if not isinstance(found, type) or not supports_kw(found, "kv_cache_config"):
        msg = (
            f'kv_connector_extra_config["{SECTION}"]["connector"]: found {name!r}, wanted a KV connector class '
            f"whose constructor takes kv_cache_config; give the class that vLLM itself would load"
        )
        raise SettingsError(msg)
    return found


@cache
def _wrap(inner: Any) -> type[Any]:
    """Make and register the subclass; keyed by class, so that two names of one connector share it."""
    # Made through the inner's own metaclass (ABCMeta), which would else set __module__ to `abc`.
    cls: type[Any] = type(inner)(
        CLASS_PREFIX + inner.__name__,
        (ShimMixin, inner),
        {"__module__": "shim.connector", "__doc__": inner.__doc__},
    )
    # MultiConnector looks children's stats up in the registry, by class name (multi_connector.py,
    # build_kv_connector_stats).
    KVConnectorFactory._registry[cls.__name__] = lambda: cls  # noqa: SLF001
    return cls
