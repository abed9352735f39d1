"""What `kv_connector_module_path: "shim.connector"` names: each attribute is a wrapped KV connector.

`getattr(shim.connector, "NixlConnector")` gives the dynamic subclass of that connector, made on demand.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """The wrapped class of the inner connector `name`; AttributeError for anything that is no connector.

    `inspect` and the import system probe modules for all kinds of attributes, so nothing else may be raised.
    """
    if name.startswith("_"):
        raise AttributeError(name)
    from shim.config import SettingsError  # noqa: PLC0415  # importing this package must load no vLLM
    from shim.connector.wrap import shim_class  # noqa: PLC0415

    try:
        return shim_class(name)
    except (SettingsError, ImportError) as error:
        raise AttributeError(str(error)) from error
