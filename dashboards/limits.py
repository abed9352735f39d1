"""Every number an alert compares with or waits for; the rule tests fail when one of them is changed."""

from __future__ import annotations

from dataclasses import dataclass

RATIO_WINDOWS = ("5m", "30m", "1h", "6h")
"""The windows over which the ratio is recorded."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds (ratios as fractions, rates per second, ages in seconds) and waiting times (`*_for`)."""

    ratio_floor: float = 0.1  # requests/s below which a ratio says nothing
    ratio_warning: float = 0.05
    ratio_warning_for: int = 600
    ratio_critical: float = 0.25
    ratio_critical_for: int = 300
    objective: float = 0.99
    burn_fast: float = 14.4
    burn_fast_for: int = 120
    burn_slow: float = 6.0
    burn_slow_for: int = 900
    nothing_pulled_for: int = 600
    params_broken: float = 0.05
    params_broken_for: int = 600
    client_params: float = 0.05
    client_params_for: int = 900
    breaker_open: float = 0
    breaker_open_for: int = 60
    load_age: float = 60
    load_age_for: int = 60
    pinned_age: float = 120
    pinned_age_for: int = 60
    missing_share: float = 0.5
    missing_share_for: int = 600
    expired_share: float = 0.05
    expired_share_for: int = 600
    reads_after_expiry: float = 0
    shim_errors: float = 0
    silent_requests: float = 5  # vLLM's successes in 10 minutes
    silent_for: int = 600
    stats_dropped: float = 0
    shim_missing_for: int = 600
    unexplained_share: float = 0.25
    unexplained_floor: float = 20  # tokens/s
    unexplained_for: int = 600


LIMITS = Limits()
