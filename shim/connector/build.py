"""Puts the scheduler half together from vLLM's config, once, when the connector is built."""

from __future__ import annotations

from typing import Any

from vllm import __version__ as vllm_version

from shim import __version__
from shim.config import ExpectRemote, read_settings
from shim.connector.admission import Admission
from shim.connector.guard import Guard
from shim.connector.health import PeerHealth
from shim.connector.issue import Issuer, lease_of
from shim.connector.observe import Observe
from shim.connector.profiles import profile_for
from shim.connector.scheduler_half import SchedulerHalf
from shim.ledger import Ledger
from shim.telemetry.log import LogObserver
from shim.telemetry.sinks import Sinks
from shim.telemetry.spans import SpanObserver
from shim.telemetry.tally import Tally


def build_half(vllm_config: Any, kv_cache_config: Any) -> SchedulerHalf:
    """The shim's half of a scheduler-side connector.

    Raises:
        SettingsError: wrong settings; they stop the start.
    """
    config = vllm_config.kv_transfer_config
    settings = read_settings(config.kv_connector_extra_config)
    profile = profile_for(config.kv_connector, _children(config))
    block_size = vllm_config.cache_config.block_size
    guard = Guard(
        profile,
        settings,
        group_count=None if kv_cache_config is None else len(kv_cache_config.kv_cache_groups),
        block_size=block_size,
        is_producer=config.is_kv_producer,
        is_consumer=config.is_kv_consumer,
        engine_id=config.engine_id,
    )
    tally = Tally()
    model = vllm_config.model_config.served_model_name if vllm_config.model_config else ""
    spans = SpanObserver(config.kv_connector, config.kv_role, model)
    others = (PeerHealth(guard.breakers, tally), LogObserver(config.kv_connector), spans)
    ledger = Ledger([Sinks(tally, others)], backoff=profile.back_off, granule=block_size)
    admission = Admission(guard, settings.expectation(config.kv_role), producer=config.kv_role == "kv_producer")
    lease = lease_of(config.kv_connector, config.kv_connector_extra_config)
    issuer = Issuer(lease, spans.context_of)
    return SchedulerHalf(admission, Observe(ledger), issuer, tally)


def info_labels(vllm_config: Any, state: str = "active") -> dict[str, str]:
    """The labels of `kv_shim_info`, in the API process."""
    config = vllm_config.kv_transfer_config
    expect: ExpectRemote = read_settings(config.kv_connector_extra_config).expectation(config.kv_role)
    return {
        "version": __version__,
        "vllm_version": vllm_version,
        "connector": str(config.kv_connector),
        "kv_role": str(config.kv_role),
        "failure_policy": str(config.kv_load_failure_policy),
        "expect_remote": expect,
        "state": state,
    }


def _children(config: Any) -> list[str]:
    children = config.kv_connector_extra_config.get("connectors") or []
    return [str(child.get("kv_connector")) for child in children if isinstance(child, dict)]
