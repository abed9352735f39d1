"""Makes the guard for a vLLM config: the one place that knows where vLLM keeps what the rules depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shim.connector.guard import Guard
from shim.connector.profiles import profile_for
from shim.connector.profiles.layout import layout

if TYPE_CHECKING:
    from shim.config import Settings
    from shim.connector.claims import Claims
    from shim.connector.profiles import Profile


def guard_for(
    config: Any,
    settings: Settings,
    *,
    kv_cache_config: Any = None,
    block_size: int | None = None,
    connector: Any = None,
    claims: Claims | None = None,
    tp_size: int = 1,
) -> Guard:
    """The screening rules of the inner connector that a `KVTransferConfig` names.

    Args:
        config: vLLM's, as rewritten: it names the inner connector.
        settings: the operator's.
        kv_cache_config: vLLM's; None in the API server, where block counts can't be checked.
        block_size: tokens a block of the scheduler's holds; None likewise.
        connector: the connector in the scheduler; None likewise.
        claims: whose a hand-off is; a new table by default.
        tp_size: this server's tensor parallel size.
    """
    known = kv_cache_config is not None and block_size is not None
    schedulers = [
        each.connector_scheduler
        for each in (connector, *getattr(connector, "_connectors", ()))
        if hasattr(each, "connector_scheduler")
    ]
    # NIXL's, from 0.31 on.
    back_offs = [int(each._prefill_backoff()) for each in schedulers if hasattr(each, "_prefill_backoff")]  # noqa: SLF001
    return Guard(
        profile_of(config),
        settings,
        group_count=None if kv_cache_config is None else len(kv_cache_config.kv_cache_groups),
        block_size=block_size,
        groups=layout(kv_cache_config, block_size) if known and block_size else None,
        is_producer=config.is_kv_producer,
        is_consumer=config.is_kv_consumer,
        engine_id=config.engine_id,
        backoff=max(back_offs, default=0),
        extra_config=options_of(config),
        host_buffer=any(getattr(each, "use_host_buffer", False) for each in schedulers),
        claims=claims,
        tp_size=tp_size,
    )


def profile_of(config: Any) -> Profile:
    """The profile of the connector that a `KVTransferConfig` names; of its children for a `MultiConnector`."""
    names = [str(child.get("kv_connector")) for child in children_of(config)]
    return profile_for(config.kv_connector, names)


def children_of(config: Any) -> list[dict[str, Any]]:
    """The entries of a `MultiConnector`'s `connectors`; empty for any other connector."""
    children = config.kv_connector_extra_config.get("connectors") or ()
    return [child for child in children if isinstance(child, dict)]


def options_of(config: Any) -> dict[str, Any]:
    """The connector's own options; with those of its children for a `MultiConnector`, whose names differ."""
    options: dict[str, Any] = {}
    for child in children_of(config):
        options |= child.get("kv_connector_extra_config") or {}
    options |= config.kv_connector_extra_config
    return options
