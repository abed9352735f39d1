"""Makes the guard for a vLLM config: the one place that knows where vLLM keeps what the rules depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shim.connector.guard import Guard
from shim.connector.profiles import profile_for
from shim.connector.profiles.layout import layout

if TYPE_CHECKING:
    from shim.config import Settings
    from shim.connector.profiles import Profile


def guard_for(
    config: Any,
    settings: Settings,
    *,
    kv_cache_config: Any = None,
    block_size: int | None = None,
    connector: Any = None,
) -> Guard:
    """The screening rules of the inner connector that a `KVTransferConfig` names.

    Args:
        config: vLLM's, as rewritten: it names the inner connector.
        settings: the operator's.
        kv_cache_config: vLLM's; None in the API server, where block counts can't be checked.
        block_size: tokens a block of the scheduler's holds; None likewise.
        connector: the connector in the scheduler; None likewise.
    """
    known = kv_cache_config is not None and block_size is not None
    scheduler = getattr(connector, "connector_scheduler", None)
    back_off = getattr(scheduler, "_prefill_backoff", None)  # NIXL's, from 0.31 on
    return Guard(
        profile_of(config),
        settings,
        group_count=None if kv_cache_config is None else len(kv_cache_config.kv_cache_groups),
        block_size=block_size,
        groups=layout(kv_cache_config, block_size) if known and block_size else None,
        is_producer=config.is_kv_producer,
        is_consumer=config.is_kv_consumer,
        engine_id=config.engine_id,
        backoff=0 if back_off is None else int(back_off()),
        extra_config=config.kv_connector_extra_config,
        host_buffer=bool(getattr(scheduler, "use_host_buffer", False)),
    )


def profile_of(config: Any) -> Profile:
    """The profile of the connector that a `KVTransferConfig` names; of its children for a `MultiConnector`."""
    children = config.kv_connector_extra_config.get("connectors") or ()
    names = [str(child.get("kv_connector")) for child in children if isinstance(child, dict)]
    return profile_for(config.kv_connector, names)
