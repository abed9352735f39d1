"""Admission: what the engine's own facts make of what screening found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from handoffs import BLOCK, PROMPT, nixl

from shim.config import ExpectRemote, Settings
from shim.connector.admission import Admission
from shim.connector.guard import Guard
from shim.connector.profiles import profile_for
from shim.connector.recover import KV_SHIM, Attached, is_set
from shim.verdict import Ask, Endpoint, HandoffReason, Reason, Source


@dataclass
class Sampling:
    """Stands in for vLLM's SamplingParams, which unit tests can't import."""

    extra_args: dict[str, Any] | None = None


@dataclass
class Request:
    """Stands in for vLLM's Request."""

    request_id: str
    sampling_params: Sampling
    kv_transfer_params: Any = None
    num_prompt_tokens: int = PROMPT
    max_tokens: int = 16
    ec_transfer_params: Any = field(default=None)
    trace_headers: Any = None


@pytest.fixture
def admission() -> Admission:
    """A decode server's, on which missing params are a fault."""
    guard = Guard(
        profile_for("NixlConnector"),
        Settings(),
        group_count=1,
        block_size=BLOCK,
        is_producer=False,
        is_consumer=True,
        stamp_key=b"",
    )
    return Admission(guard, ExpectRemote.ALWAYS, producer=False)


def admit(admission: Admission, request_id: str, params: Any = None, **attached: Any) -> tuple[Reason, Any]:
    """A request's reason, and what the inner connector may see of its params."""
    described = Attached(endpoint=Endpoint.GENERATE, **attached)
    request = Request(request_id, Sampling({KV_SHIM: described}), params)
    return admission.admit(request).facts.reason, request.kv_transfer_params


def test_children_have_one_reason_however_their_params_came(admission: Admission) -> None:
    """Case 14: from the body only the first child gets them; through `extra_args` all come with them."""
    siblings = {"siblings": HandoffReason.N_GT_1}
    first = admit(admission, "0_a", kv=nixl(), source=Source.BODY, **siblings)
    later = [admit(admission, f"{n}_a", sibling=n, **siblings) for n in (1, 2, 3)]
    assert first == (Reason.NONE, nixl())
    assert later == [(Reason.HANDOFF_REUSED, None)] * 3

    other = nixl(remote_request_id="cmpl-2")
    given = [admit(admission, f"{n}_b", dict(other), sibling=n, **siblings) for n in range(4)]
    assert given == [(Reason.NONE, other), *[(Reason.HANDOFF_REUSED, None)] * 3]


def test_beam_steps_are_one_fault_an_http_request(admission: Admission) -> None:
    """There are many, and no router could have sent them with params of their own."""
    reasons = [admit(admission, f"beam-{n}", sibling=n)[0] for n in (1, 2, 3)]
    assert reasons == [Reason.UNSUPPORTED_MODE, Reason.NOT_DISAGGREGATED, Reason.NOT_DISAGGREGATED]


def test_a_router_that_tried_is_named(admission: Admission) -> None:
    """Case 5: the mark is there, the params are not."""
    request = Request("a", Sampling({KV_SHIM: Attached(mark="tried")}))
    facts = admission.admit(request).facts
    assert facts.reason is Reason.PARAMS_MISSING
    assert "tried" in facts.detail


def test_what_a_client_wrote_in_our_place_leaves_the_request_local(admission: Admission) -> None:
    """The metadata is as hostile as the params."""
    request = Request("a", Sampling({KV_SHIM: {"endpoint": "/x", "kv": [1]}}))
    facts = admission.admit(request).facts
    assert (facts.ask, facts.reason, request.sampling_params.extra_args) == (
        Ask.NOTHING,
        Reason.PARAMS_MISSING,
        None,
    )


@pytest.mark.parametrize(
    ("value", "is_flag"), [(True, True), (1, True), (False, False), (0, False), (None, False), ("true", False),
                           (1.0, False), ([], False), (2, False)]
)  # fmt: skip
def test_flags_are_read_as_screening_reads_them(value: object, is_flag: bool) -> None:
    """The API server and EngineCore must agree on what asks for a hand-off."""
    assert is_set({"do_remote_decode": value}, "do_remote_decode") is is_flag
    assert not is_set(value, "do_remote_decode")


CALLER = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
CURRENT = "00-" + "c" * 32 + "-" + "d" * 16 + "-01"


@pytest.mark.parametrize(
    ("trace_headers", "parent", "state"),
    [
        ({"traceparent": CALLER, "tracestate": "v=1"}, CALLER, "v=1"),
        ({"traceparent": CALLER}, CALLER, ""),
        ({"traceparent": "00-junk", "tracestate": "v=1"}, CURRENT, "here=1"),
        ({}, CURRENT, "here=1"),
        (None, CURRENT, "here=1"),
    ],
)
def test_the_engine_requests_own_trace_comes_first(
    admission: Admission, trace_headers: Any, parent: str, state: str
) -> None:
    """gRPC, Dynamo and Ray hand the caller's context to the engine; the API server's own is the next best."""
    attached = Attached(traceparent=CURRENT, tracestate="here=1")
    request = Request("a", Sampling({KV_SHIM: attached}), trace_headers=trace_headers)
    facts = admission.admit(request).facts
    assert (facts.traceparent, facts.tracestate) == (parent, state)
