"""Never worse than without: a fault of ours fails no request, and the inner is called exactly once."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from shim import plugin
from shim.connector import wrap
from shim.connector.admission import Admission
from shim.connector.guard import Guard
from shim.connector.issue import Issuer
from shim.connector.observe import Observe
from shim.telemetry.faults import FAULTS
from shim.telemetry.log import LOGGER, LogObserver
from shim.telemetry.spans import SpanObserver
from shim.telemetry.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = f"{__name__}:Recording"


class Boom(RuntimeError):  # noqa: N818  # it is thrown, not reported
    """Thrown on purpose."""


class Recording(KVConnectorBase_V1, SupportsHMA):
    """An inner connector that counts its calls, and raises where told."""

    fails: frozenset[str] = frozenset()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.calls: Counter[str] = Counter()

    def _called(self, hook: str, answer: Any = None) -> Any:
        self.calls[hook] += 1
        if hook in self.fails:
            raise Boom(hook)
        return answer

    def on_new_request(self, request: Any) -> None:
        self._called("on_new_request")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return self._called("get_num_new_matched_tokens", (7, True))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._called("update_state_after_alloc")

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self._called("build_connector_meta", META)

    def update_connector_output(self, connector_output: Any) -> None:
        self._called("update_connector_output")

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        return self._called("request_finished", (True, HANDOFF))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self._called("request_finished_all_groups", (True, HANDOFF))

    def get_kv_connector_stats(self) -> Any:
        return self._called("get_kv_connector_stats")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Not called here."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Not called here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Not called here."""

    def wait_for_save(self) -> None:
        """Not called here."""


META = KVConnectorMetadata()
HANDOFF = {"do_remote_prefill": True}
STEP = SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={"r": 4})
OUTPUT = SimpleNamespace(
    invalid_block_ids=set(), finished_recving={"r"}, finished_sending=None, failed_recving=None
)


class Lines(logging.Handler):
    """What the shim logs, as it is written; vLLM's root logger passes nothing on to pytest's."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record) + "\n"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """The lines from here on, of faults that may have been said before, too."""
    monkeypatch.setattr(FAULTS, "_said", {})
    handler = Lines()
    logging.getLogger(LOGGER).addHandler(handler)
    yield handler
    logging.getLogger(LOGGER).removeHandler(handler)


def request(**params: Any) -> Request:
    """A decode request with a good hand-off."""
    made = Request(
        "r",
        list(range(40)),
        SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": {"do_remote_prefill": True, **params}}),
        None,
    )
    made.status = RequestStatus.FINISHED_LENGTH_CAPPED
    return made


def hooks(one: Request) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """Every scheduler-side hook the shim overrides: its arguments, and what the inner answers."""
    return {
        "on_new_request": ((one,), None),
        "get_num_new_matched_tokens": ((one, 0), (7, True)),
        "update_state_after_alloc": ((one, None, 7), None),
        "build_connector_meta": ((STEP,), META),
        "update_connector_output": ((OUTPUT,), None),
        "get_kv_connector_stats": ((), None),
        "request_finished": ((one, [1]), (True, HANDOFF)),
        "request_finished_all_groups": ((one, ([1],)), (True, HANDOFF)),
    }


HOOKS = list(hooks(request()))


@pytest.fixture(scope="module")
def vllm_config() -> VllmConfig:
    """A config that names the recording connector."""
    plugin.install()
    config = KVTransferConfig(
        kv_connector="shim", kv_role="kv_both", kv_connector_extra_config={"shim": {"connector": HERE}}
    )
    return VllmConfig(kv_transfer_config=config)


@pytest.fixture
def connector(vllm_config: VllmConfig) -> Any:
    """The wrapped recording connector, scheduler side, as vLLM builds it."""
    return wrap.shim_class(HERE)(vllm_config, KVConnectorRole.SCHEDULER, None)


def boom(*_: Any, **__: Any) -> Any:
    """Raise."""
    raise Boom


def errors(connector: Any) -> dict[str, int]:
    """The counted errors since the last look, by hook."""
    payload = connector._half.tally.take() or {"counters": {}}
    return {k.split("|")[1]: v for k, v in payload["counters"].items() if k.startswith("errors|")}


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_calls_the_inner_once_and_hands_on_its_answer(connector: Any, hook: str) -> None:
    """Without faults the shim is invisible."""
    args, answer = hooks(request())[hook]
    got = getattr(connector, hook)(*args)
    if hook == "get_kv_connector_stats":
        assert got is None
    else:
        assert got == answer
    assert connector.calls == {hook: 1}


EVERYTHING_OF_OURS = [
    (Admission, "admit"),
    (Admission, "finishing"),
    (Issuer, "stamped"),
    *[
        (Observe, name)
        for name in ("admitted", "matched", "allocated", "scheduled", "output", "finished", "step_done")
    ],
]


@pytest.mark.parametrize("hook", HOOKS)
def test_when_all_of_the_shim_fails_the_inner_still_answers(
    connector: Any, hook: str, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    """Every part of ours throws at once: the inner's own result comes out, called once, errors are counted."""
    for owner, name in EVERYTHING_OF_OURS:
        monkeypatch.setattr(owner, name, boom)
    args, answer = hooks(request())[hook]
    got = getattr(connector, hook)(*args)
    assert connector.calls == {hook: 1}
    if hook in {"get_kv_connector_stats", "build_connector_meta"}:
        return  # a step without news has nothing of ours to fail; see the tests with news below
    # What could not be screened must not be loaded either.
    assert got == ((0, False) if hook == "get_num_new_matched_tokens" else answer)
    assert sum(errors(connector).values()) >= 1
    assert "Boom at shim/connector/scheduler_half.py" in lines.text
    assert "do_remote_prefill" not in lines.text


def test_a_fault_that_has_a_clients_values_in_it_is_said_without_them(
    connector: Any, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    """Params are the usual reason of a fault: the log has the types and frames, and nothing of the params."""

    def screen(_guard: Guard, _request_id: str, params: Any, **_: Any) -> Any:
        try:
            return params["remote_host"] + 1
        except TypeError as error:
            raise ValueError(params, str(params)) from error

    monkeypatch.setattr(Guard, "screen", screen)
    host, token = "10.9.8.7.example", 987654321
    for number in range(5):
        one = request(remote_host=host, prompt_token_ids=[token])
        one.request_id = f"r{number}"
        connector.on_new_request(one)
    assert errors(connector) == {"screen": 5}
    (line,) = lines.text.splitlines()
    assert "in screen was contained" in line
    assert "ValueError at shim/connector/scheduler_half.py" in line
    assert "shim/connector/admission.py" in line
    assert ", from TypeError at test_containment.py" in line
    assert not any(value in line for value in (host, str(token), "remote_host", "do_remote_prefill"))


def test_a_step_with_news_that_fails_fails_nothing(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request in prefill: its step is built and its output processed while our part throws in both."""
    one = request()
    connector.on_new_request(one)
    connector.update_state_after_alloc(one, None, 0)
    monkeypatch.setattr(Observe, "scheduled", boom)
    assert connector.build_connector_meta(STEP) is META
    monkeypatch.setattr(Observe, "step_done", boom)
    connector._half.ledger.completing["r"] = 1
    connector.get_kv_connector_stats()
    assert connector.calls["build_connector_meta"] == connector.calls["get_kv_connector_stats"] == 1
    assert connector.get_kv_connector_stats().ours["counters"]["errors|stats"] == 1


@pytest.mark.parametrize("name", ["add", "verdict", "load_started"])
def test_a_sink_that_fails_fails_nothing(
    vllm_config: VllmConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics are the least of a request's worries."""
    original = getattr(Tally, name)

    def flaky(self: Tally, *args: Any) -> Any:
        if name == "add" and str(args[0]).startswith("errors"):
            return original(self, *args)
        raise Boom

    monkeypatch.setattr(Tally, name, flaky)
    monkeypatch.setattr(LogObserver, "verdict", boom)
    monkeypatch.setattr(SpanObserver, "load_ended", boom)
    connector = wrap.shim_class(HERE)(vllm_config, KVConnectorRole.SCHEDULER, None)
    one = request()
    for hook, (args, answer) in hooks(one).items():
        if hook in {"get_kv_connector_stats", "request_finished"}:
            continue
        assert getattr(connector, hook)(*args) == answer
    assert sum(errors(connector).values()) >= 1


def test_a_fault_after_admission_leaves_the_inners_answer(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what could not be screened is kept from loading."""
    one = request()
    connector.on_new_request(one)
    monkeypatch.setattr(Admission, "spent", boom)
    assert connector.get_num_new_matched_tokens(one, 0) == (7, True)
    assert errors(connector) == {"match": 1}


def test_failing_to_screen_fails_closed(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be screened, the inner does not see: no params, a local prefill, `shim_error`."""
    monkeypatch.setattr(Admission, "admit", boom)
    one = request()
    connector.on_new_request(one)
    assert one.kv_transfer_params is None
    assert one.sampling_params is not None
    assert one.sampling_params.extra_args is None
    assert errors(connector) == {"screen": 1}


@pytest.mark.parametrize("hook", HOOKS)
def test_the_inners_own_exception_passes_unchanged(connector: Any, hook: str, lines: Lines) -> None:
    """What the inner raises is the user's to see, as without us; it is only counted."""
    connector.fails = frozenset({hook})
    args, _ = hooks(request())[hook]
    with pytest.raises(Boom, match=hook):
        getattr(connector, hook)(*args)
    assert connector.calls == {hook: 1}
    assert errors(connector)["inner"] == 1
    assert "the inner connector raised" in lines.text
    assert f"in Recording.{hook} > " in lines.text


ELSEWHERE = {"build_kv_connector_stats", "build_prom_metrics", "get_transfer_results"}
"""What the shim overrides besides hooks of the scheduler's: how the API server makes stats and metrics, and
once a step on workers, which loads failed there."""


def test_nothing_else_is_overridden(connector: Any) -> None:
    """Of all that vLLM calls on a connector the rest is the inner's own: worker hooks, properties and so on."""
    of_vllm = {name for cls in (KVConnectorBase_V1, SupportsHMA) for name in dir(cls) if name[0] != "_"}
    wrapped = {
        name
        for name in of_vllm
        if inspect.getattr_static(type(connector), name) is not inspect.getattr_static(Recording, name)
    }
    assert wrapped == {*HOOKS} | (ELSEWHERE & of_vllm)  # 0.28 has no get_transfer_results
    assert {"start_load_kv", "wait_for_save", "bind_connector_metadata", "role"} <= of_vllm - wrapped


def test_an_inner_whose_hooks_call_each_other_is_counted_once(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some connectors implement one finish hook by the other: still one verdict."""
    monkeypatch.setattr(
        Recording, "request_finished_all_groups", lambda self, one, ids: self.request_finished(one, ids[0])
    )
    one = request()
    connector.on_new_request(one)
    assert connector.request_finished_all_groups(one, ([1],)) == (True, HANDOFF)
    payload = connector._half.tally.take()
    assert sum(v for k, v in payload["counters"].items() if k.startswith("requests|")) == 1
    assert connector.calls["request_finished"] == 1
