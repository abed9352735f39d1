"""The hooks that the shim overrides; everything else of a wrapped class is the inner connector's.

Each hook calls the inner exactly once, and hands on its result or its exception unchanged; the one answer
the shim may replace is `get_num_new_matched_tokens`, by "nothing", for a request that must prefill locally,
and it may add its stamp to a hand-off.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from shim.connector.build import build_half, info_labels
from shim.connector.listener import defend
from shim.telemetry.prometheus import ShimPromMetrics
from shim.telemetry.stats import ShimStats, split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shim.connector.scheduler_half import SchedulerHalf
    from shim.ledger import Ledger
    from shim.telemetry.tally import Tally

_inside: ContextVar[bool] = ContextVar("kv_shim_inside", default=False)


@contextmanager
def _building() -> Iterator[bool]:
    """Whether the wrapped connector being built is the outermost one.

    MultiConnector builds its children while it is built itself; the outer one keeps ledger and metrics.
    """
    token = _inside.set(True)
    try:
        yield token.old_value is not True
    finally:
        _inside.reset(token)


class ShimMixin:
    """Comes first in a wrapped class; `super()` is the inner connector."""

    _half: SchedulerHalf | None = None
    _ledger: Ledger | None = None
    _tally: Tally
    _failed_loads: dict[str, int] | None = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        with _building() as outermost:
            super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        # Looked up once: these two run in every step.
        self._inner_meta = super().build_connector_meta  # type: ignore[misc]
        self._inner_stats = super().get_kv_connector_stats  # type: ignore[misc]
        if outermost and role == KVConnectorRole.SCHEDULER:
            self._half = build_half(self, vllm_config, kv_cache_config)
            self._ledger, self._tally = self._half.ledger, self._half.tally
            defend(self)
        elif outermost:  # of one wrapped inside another only the outer reports, or a load would fail twice
            self._failed_loads = {}

    # Worker side.

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What this worker sent and received; which loads failed here goes to the scheduler with the stats.

        0.28 has no such hook: there a load that failed says nowhere on which workers.
        """
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
        if self._failed_loads is not None and results.failed_recving:
            self._failed_loads.update(dict.fromkeys(results.failed_recving, 1))
        return results

    # Scheduler side.

    def on_new_request(self, request: Any) -> None:
        """Recover and screen the params before anything else reads them."""
        half = self._half
        if half is not None:
            half.admit(request)
        try:
            super().on_new_request(request)  # type: ignore[misc]
        except Exception as error:
            self._inner_failed(error)
            raise

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The inner's answer, or nothing for a request that must prefill locally."""
        half = self._half
        if half is not None:
            half.admit_unseen(request)
        try:
            answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(  # type: ignore[misc]
                request, num_computed_tokens
            )
        except Exception as error:
            self._inner_failed(error)
            raise
        return answer if half is None else half.matched(request, num_computed_tokens, answer)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were allocated, `num_external_tokens` of them for a load."""
        half = self._half
        if half is not None:
            half.admit_unseen(request)
        try:
            super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]
        except Exception as error:
            self._inner_failed(error)
            raise
        if half is not None:
            half.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """A step was scheduled: the inner's metadata, untouched.

        Runs in every step, so what a step without news costs is written out here: one count.
        """
        try:
            meta = self._inner_meta(scheduler_output)
        except Exception as error:
            self._inner_failed(error)
            raise
        ledger = self._ledger
        if ledger is not None:
            if ledger.open or scheduler_output.preempted_req_ids:
                self._half.scheduled(scheduler_output)  # type: ignore[union-attr]  # they come together
            else:
                ledger.steps += 1
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers reported loads and sends."""
        try:
            super().update_connector_output(connector_output)  # type: ignore[misc]
        except Exception as error:
            self._inner_failed(error)
            raise
        half = self._half
        if half is not None:
            half.output(connector_output)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request ended, on whatever path."""
        return self._finish(super().request_finished, request, block_ids)  # type: ignore[misc]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """`request_finished` for inner connectors that support several KV cache groups."""
        return self._finish(super().request_finished_all_groups, request, block_ids)  # type: ignore[misc]

    def _finish(
        self, inner: Callable[[Any, Any], tuple[bool, dict[str, Any] | None]], request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        half = self._half
        if half is not None:
            half.finishing(request)
        try:
            answer = inner(request, block_ids)
        except Exception as error:
            self._inner_failed(error)
            raise
        return answer if half is None else half.finished(request, answer)

    # Both sides.

    def get_kv_connector_stats(self) -> ShimStats | None:
        """The inner's stats with the shim's beside them; the scheduler asks once per processed step."""
        try:
            inner = self._inner_stats()
        except Exception as error:
            self._inner_failed(error)
            raise
        ledger = self._ledger
        if ledger is not None:
            if ledger.completing or ledger.unconfirmed:
                self._half.step_done()  # type: ignore[union-attr]  # they come together
            elif ledger.done < ledger.steps:
                ledger.done += 1  # a step without news: see build_connector_meta
            if self._tally.changed:
                return ShimStats(self._tally.take(), inner)
        if self._failed_loads:
            failed, self._failed_loads = self._failed_loads, {}
            return ShimStats(None, inner, failed)
        return None if inner is None else ShimStats(None, inner)

    # API process.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ShimStats:
        """The stats object of a wire payload; the inner's part is parsed by the inner."""
        ours, inner = split(data)
        return ShimStats(ours, super().build_kv_connector_stats(inner) if inner is not None else None)  # type: ignore[misc]

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ShimPromMetrics:
        """The inner's Prometheus metrics with the shim's beside them."""
        with _building() as outermost:
            inner = super().build_prom_metrics(  # type: ignore[misc]
                vllm_config, metric_types, labelnames, per_engine_labelvalues
            )
        info = info_labels(vllm_config) if outermost else None
        return ShimPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, inner=inner, info=info
        )

    def _inner_failed(self, error: Exception) -> None:
        """Count an exception of the inner's, which passes on unchanged."""
        if self._half is not None:
            self._half.inner_failed(error)
