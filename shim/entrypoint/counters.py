"""Counts what only the API server can see, on objects made when vLLM's Prometheus logger is built."""

from __future__ import annotations

from typing import Any

from shim.patch import wrap_once
from shim.telemetry.catalog import ENTRYPOINT, INFO, EntrypointEvent, ShimState
from shim.telemetry.faults import FAULTS
from shim.verdict import Endpoint

_series: dict[tuple[str, str], Any] = {}


def count(event: EntrypointEvent, endpoint: Endpoint) -> None:
    """Count one event; before the logger is built (or without one) there is nowhere to count it."""
    series = _series.get((event, Endpoint.OTHER if endpoint is Endpoint.ENGINE else endpoint))
    if series is not None:
        series.inc()


def contained(where: str, error: Exception, endpoint: Endpoint = Endpoint.OTHER) -> None:
    """Count a fault of ours in the API server, and say what it was; the request goes on."""
    count(EntrypointEvent.HOOK_ERROR, endpoint)
    FAULTS.say(where, error)


def install(logger_class: type[Any], *, disabled: bool) -> None:
    """Have `PrometheusStatLogger` create our series after its own: it unregisters all `vllm:` names first.

    Args:
        logger_class: vLLM's, also the base of its Ray variant.
        disabled: `SHIM_DISABLE` is set: nothing is counted, and `info` says so.
    """

    def make(original: Any) -> Any:
        def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, *args, **kwargs)
            try:
                (_export_disabled if disabled else _create)(self, vllm_config)
            except Exception as error:  # noqa: BLE001  # see below
                # A registry that refuses our names must not keep the server from starting.
                FAULTS.say("making the entrypoint's metrics, of which there are none now,", error)

        return init

    wrap_once(logger_class, "__init__", make)


def _create(stat_logger: Any, vllm_config: Any) -> None:
    family = stat_logger._counter_cls(  # noqa: SLF001  # vLLM's seam for Ray's metric classes
        name=ENTRYPOINT.full_name,
        documentation=ENTRYPOINT.help,
        labelnames=["model_name", *ENTRYPOINT.labels],
    )
    model = vllm_config.model_config.served_model_name
    _series.clear()
    _series.update({(values[0], values[1]): family.labels(model, *values) for values in ENTRYPOINT.series})


def _export_disabled(stat_logger: Any, vllm_config: Any) -> None:
    from shim.connector.build import info_labels  # noqa: PLC0415  # needs vLLM

    info = info_labels(vllm_config, state=ShimState.DISABLED)
    family = stat_logger._gauge_cls(  # noqa: SLF001  # see _create
        name=INFO.full_name,
        documentation=INFO.help,
        labelnames=["model_name", "engine", *INFO.labels],
        multiprocess_mode="max",
    )
    for values in stat_logger.per_engine_labelvalues.values():
        family.labels(*values, *(info[label] for label in INFO.labels)).set(1)
