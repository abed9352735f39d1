"""Puts the scheduler half together from vLLM's config, once, when the connector is built."""

from __future__ import annotations

from typing import Any

from vllm import __version__ as vllm_version

from shim import __version__
from shim.config import ExpectRemote, read_settings
from shim.connector.admission import Admission
from shim.connector.children import Loaders
from shim.connector.ends import NixlEnds
from shim.connector.health import PeerHealth
from shim.connector.issue import Issuer, lease_of
from shim.connector.observe import Observe
from shim.connector.retries import Retries
from shim.connector.scheduler_half import SchedulerHalf
from shim.connector.screening import children_of, guard_for, options_of
from shim.ledger import Ledger
from shim.telemetry.catalog import ShimState
from shim.telemetry.log import LogObserver
from shim.telemetry.sinks import Sinks
from shim.telemetry.spans import SpanObserver
from shim.telemetry.tally import Tally


def build_half(connector: Any, vllm_config: Any, kv_cache_config: Any) -> SchedulerHalf:
    """The shim's half of a scheduler-side connector, whose inner part is already built.

    Raises:
        SettingsError: wrong settings; they stop the start.
    """
    config = vllm_config.kv_transfer_config
    settings = read_settings(config.kv_connector_extra_config)
    parallel = vllm_config.parallel_config
    # As the scheduler counts blocks (v1/core/sched/scheduler.py): context parallelism spreads one over ranks.
    block_size = (
        vllm_config.cache_config.block_size
        * parallel.decode_context_parallel_size
        * parallel.prefill_context_parallel_size
    )
    guard = guard_for(
        config,
        settings,
        kv_cache_config=kv_cache_config,
        block_size=block_size,
        connector=connector,
        tp_size=parallel.tensor_parallel_size,
    )
    retries = Retries(guard.claims, parallel.world_size)
    tally = Tally()
    model = vllm_config.model_config.served_model_name if vllm_config.model_config else ""
    spans = SpanObserver(config.kv_connector, config.kv_role, model)
    others = (PeerHealth(guard.breakers, tally), retries, LogObserver(config.kv_connector), spans)
    ledger = Ledger(
        [Sinks(tally, others)],
        backoff=guard.profile.back_off,
        granule=block_size,
        load_timeout=settings.load_timeout,
    )
    admission = Admission(
        guard,
        settings.expectation(config.kv_role),
        producer=config.kv_role == "kv_producer",
        normalize=settings.normalize_prefill,
    )
    names = [config.kv_connector, *(str(child.get("kv_connector")) for child in children_of(config))]
    lease = lease_of(names, options_of(config))
    issuer = Issuer(lease, spans.context_of)
    # A MultiConnector's sends end when all of its children's do, so it does not say which one did.
    ends = NixlEnds(lease, parallel.world_size) if config.kv_connector.startswith("Nixl") else None
    observe = Observe(
        ledger,
        handoff_ends=None if ends is None else ends.of,
        silent_handoffs=guard.profile.hands_off_silently,
        loader_of=Loaders(connector, block_size).of,
    )
    return SchedulerHalf(admission, observe, issuer, tally, ends, retries)


def info_labels(vllm_config: Any, state: ShimState = ShimState.ACTIVE) -> dict[str, str]:
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
