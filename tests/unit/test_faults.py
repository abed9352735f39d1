"""What the log says of a contained fault: what and where it was, and nothing that came with a request."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Any

from shim.connector.peers import AllowList
from shim.entrypoint import counters, gate
from shim.entrypoint.middleware import Reply, RequestContext
from shim.telemetry import faults
from shim.telemetry.faults import CAUSES, CHAIN, FAULTS, FRAMES, Faults, described
from shim.telemetry.log import QUIET_SECONDS
from shim.telemetry.sinks import Sinks
from shim.telemetry.tally import Tally
from shim.verdict import Endpoint, Observer, Reason

if TYPE_CHECKING:
    import pytest

SECRET = "10.9.8.7-prompt-of-a-client"


class Clock:
    """Moves when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def deep(levels: int) -> None:
    """Raise some frames down, from a cause that also names a value."""
    if levels:
        deep(levels - 1)
        return
    try:
        {}[SECRET]
    except KeyError as error:
        raise ValueError(SECRET, {"remote_host": SECRET}) from error


def caught(levels: int = 0) -> BaseException:
    """An exception as a contained fault has it."""
    try:
        deep(levels)
    except ValueError as error:
        return error
    raise AssertionError


def test_types_causes_and_frames_are_named_and_no_value() -> None:
    """Enough to find the fault by; the message, the arguments and the source line stay out."""
    text = described(caught())
    assert text.startswith("ValueError at test_faults.py:")
    assert " in caught > test_faults.py:" in text
    assert text.endswith(" in deep")
    assert ", from KeyError at test_faults.py:" in text
    assert SECRET not in text
    assert "remote_host" not in text


def test_the_shims_own_files_have_their_place_and_no_path_of_the_machine() -> None:
    """`shim/connector/peers.py:12`, wherever the package is installed; of others the file's name."""
    try:
        AllowList([None])  # type: ignore[list-item]
    except AttributeError as error:
        text = described(error)
    assert "shim/connector/peers.py:" in text
    assert " /" not in text
    assert "site-packages" not in text


def test_a_context_counts_unless_it_is_hidden() -> None:
    """As Python's own traceback has it."""

    def raised(*, hide: bool) -> BaseException:
        try:
            try:
                {}[SECRET]
            except KeyError:
                if hide:
                    raise OSError(SECRET) from None
                raise OSError(SECRET)  # noqa: B904  # what is tested
        except OSError as error:
            return error

    assert "OSError" in described(raised(hide=False))
    assert ", from KeyError" in described(raised(hide=False))
    assert "KeyError" not in described(raised(hide=True))


def test_a_line_is_bounded_however_deep_the_fault() -> None:
    """A recursion's thousand frames and a chain that bites its tail make no long line."""
    assert described(caught(200)).count(" in deep") == FRAMES + 1
    first, second = KeyError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert described(first) == "KeyError at no frame, from ValueError at no frame"
    chain = [RuntimeError() for _ in range(10)]
    for one, other in itertools.pairwise(chain):
        one.__cause__ = other
    assert described(chain[0]).count("RuntimeError") == CHAIN


def test_the_same_cause_is_said_seldom_with_the_number_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """A fault in every step is a line in half a minute, and another fault is said at once."""
    clock = Clock()
    said = Faults(clock)
    for _ in range(1000):
        said.say("step", caught())
    said.say("screen", caught())
    said.say("step", KeyError())
    assert [record.getMessage().count("skipped=0") for record in caplog.records] == [1, 1, 1]
    clock.now = QUIET_SECONDS
    said.say("step", caught())
    assert caplog.records[-1].getMessage().endswith("skipped=999")
    assert SECRET not in caplog.text


def test_memory_is_bounded() -> None:
    """Exceptions of ever new types are forgotten."""
    said = Faults(Clock())
    for number in range(CAUSES * 3):
        said.say("step", type(f"E{number}", (Exception,), {})())
    assert len(said._said) <= CAUSES


def test_saying_it_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called where nothing may raise."""

    def fails(*_: Any) -> Any:
        raise RuntimeError

    monkeypatch.setattr(faults, "described", fails)
    Faults().say("step", caught())


class Deaf(Observer):
    """A sink that fails with a value in its message."""

    def verdict(self, verdict: Any) -> None:
        """Raise."""
        raise ValueError(SECRET, verdict)


def test_a_sinks_fault_is_said_and_names_the_sink(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted, too; and where the tally fails as well, that is said."""
    monkeypatch.setattr(FAULTS, "_said", {})
    tally = Tally()
    monkeypatch.setattr(tally, "error", lambda *_: {}["no"])
    Sinks(tally, [Deaf()]).verdict(None)  # type: ignore[arg-type]
    lines = [record.getMessage() for record in caplog.records]
    (of_the_sink,) = [line for line in lines if "in Deaf.verdict was contained" in line]
    assert "ValueError at shim/telemetry/sinks.py" in of_the_sink
    (of_the_tally,) = [line for line in lines if "in the tally was contained" in line]
    assert "KeyError" in of_the_tally
    assert SECRET not in caplog.text


def test_the_api_server_counts_and_says(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault at the entrypoint is an event of its route, and a line."""
    monkeypatch.setattr(FAULTS, "_said", {})
    counted: list[Any] = []
    monkeypatch.setattr(counters, "count", lambda *event: counted.append(event))
    counters.contained("the hand-off", caught(), Endpoint.CHAT)
    assert counted == [("hook_error", Endpoint.CHAT)]
    assert caplog.records[0].levelno == logging.ERROR
    assert "ValueError" in caplog.text
    assert SECRET not in caplog.text


async def _through(send: Any, *messages: dict[str, Any]) -> None:
    for message in messages:
        await send(message)


START = {"type": "http.response.start", "status": 200, "headers": []}
BODY = {"type": "http.response.body", "body": b"{}"}


def test_a_refusal_that_fails_lets_the_answer_pass(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own reply goes out, whole, once."""
    monkeypatch.setattr(FAULTS, "_said", {})
    monkeypatch.setattr(gate, "refusal", lambda _: {}["no"])
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(_through(gate.Gate(lambda: Reason.PARAMS_MISSING, send), START, BODY))
    assert sent == [START, BODY]
    assert "its refusal was contained" in caplog.text


def test_a_reply_that_cannot_be_watched_goes_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks for the hand-off in it fails no reply."""
    monkeypatch.setattr(FAULTS, "_said", {})
    monkeypatch.setattr(Reply, "lacks_handoff", lambda *_: {}["no"])
    sent: list[dict[str, Any]] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await _through(send, START, BODY)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    asyncio.run(RequestContext(app)({"type": "http", "path": "/", "headers": []}, receive, send))
    assert sent == [START, BODY]
    assert "watching a reply was contained" in caplog.text
