"""Owns what each fault's reason tells an operator to do; log lines use it, and documents may.

Pure Python; imports no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from shim.telemetry.catalog import HANDOFFS
from shim.verdict import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

RUNBOOK: Final = "dashboards/runbook.md"
"""Has an entry for each reason, whose anchor is the reason's name."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What a reason says to the operator.

    Attributes:
        found: what the shim saw, to follow the outcome and a colon.
        do: what to do about it, in the imperative.
    """

    found: str
    do: str


ADVICE: Mapping[Reason, Advice] = MappingProxyType(
    {
        Reason.PARAMS_MISSING: Advice(
            "no kv_transfer_params reached decode",
            f"see on prefill whether it issued a hand-off ({HANDOFFS.wire_name}); if so, make the router copy "
            "kv_transfer_params from prefill's answer into decode's request; mark requests that are meant to "
            "be local (trusted_router_marks)",
        ),
        Reason.PARAMS_EMPTY: Advice(
            "kv_transfer_params came null or empty: prefill gave the router no hand-off",
            f'look at {HANDOFFS.wire_name}{{result="missing"}} on prefill: its reason says why',
        ),
        Reason.PARAMS_NOT_REMOTE: Advice(
            "kv_transfer_params ask for no load",
            "make the router send decode the params of prefill's answer, not those of its request to prefill",
        ),
        Reason.PEER_UNAVAILABLE: Advice(
            "loads from this peer failed one after another, so it is not asked for now",
            "check that the prefill server runs and that its side-channel port can be reached from here",
        ),
        Reason.HANDOFF_EXPIRED: Advice(
            "prefill's lease on the blocks had run out when decode admitted the request",
            "shorten decode's queue or lengthen the lease on prefill; see that both clocks agree",
        ),
        Reason.NO_MATCH: Advice(
            "the connector found nothing to load for this prompt",
            "run the same model, tokenizer, chat template, block size and vLLM version on prefill and decode",
        ),
        Reason.PARTIAL_MATCH: Advice(
            "only part of the prompt could be loaded",
            "see that prefill and decode get the same prompt, and that a store has not evicted it",
        ),
        Reason.LOAD_FAILED: Advice(
            "the transfer failed after it had begun",
            "look above for the connector's own error; check the peer and the network path; in a roll-out, "
            "drain prefill at the router first",
        ),
        Reason.LOAD_TIMEOUT: Advice(
            "the wait for remote KV reached load_timeout",
            "check the peer and the network; if waits are just long, raise load_timeout",
        ),
        Reason.SHIM_ERROR: Advice(
            "the shim raised an exception and took the params away to be safe",
            "report the line logged with it, which names exception and frames; SHIM_DISABLE=1 runs the bare "
            "connector meanwhile",
        ),
        Reason.OTHER: Advice(
            "nothing was loaded and no known reason fits",
            "report it with this request's DEBUG lines (VLLM_LOGGING_LEVEL=DEBUG)",
        ),
        Reason.PARAMS_INVALID: Advice(
            "kv_transfer_params break this connector's rules",
            "correct whoever makes them, client or router; run the same vLLM version on prefill and decode",
        ),
        Reason.PEER_DENIED: Advice(
            "kv_transfer_params name a peer that this server may not contact",
            "if it is a prefill server of yours, add its network to allow_peers; if not, find out who sent it",
        ),
        Reason.HANDOFF_REUSED: Advice(
            "this hand-off has been used before",
            "make retries go through prefill again, and send one prompt and n=1 with a hand-off",
        ),
        Reason.HANDOFF_MISMATCH: Advice(
            "the hand-off belongs to another prompt",
            "see that nothing changes the prompt between prefill and decode, and that the router does not mix "
            "up answers",
        ),
        Reason.UNSUPPORTED_MODE: Advice(
            "a request of this form can load no remote KV",
            "send such requests (n>1, prompt lists, prompt_logprobs) without a hand-off and marked as local, "
            "or in a form that can",
        ),
    }
)
"""What to do, for every reason of the operator's and the client's class (tests/unit/test_log.py)."""
