"""The log sink: one useful line for many faults, and nothing of the client's as it came."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shim.telemetry.advice import ADVICE, RUNBOOK
from shim.telemetry.log import LOGGER, QUIET_SECONDS, LogObserver
from shim.telemetry.text import LIMIT, printable
from shim.verdict import (
    Endpoint,
    Facts,
    Handoff,
    HandoffReason,
    HandoffResult,
    Outcome,
    PeerKey,
    Reason,
    ReasonClass,
    Source,
    Verdict,
    reasons_of,
)

FAULTS = reasons_of(ReasonClass.OPERATOR, ReasonClass.CLIENT)
FACTS = Facts(
    source=Source.BODY, endpoint=Endpoint.CHAT, external_id="chatcmpl-7", peer=PeerKey("10.0.0.7", 5600, "")
)
VERDICT = Verdict(
    "chatcmpl-7-1f2e", Outcome.LOCAL_PREFILL, Reason.PARAMS_MISSING, FACTS, 100, 0, 0, 100, 1.0, 1.0, 2.0, 3.0
)
EVIL = "a\r\nb\x1b[2J\u202e\u2066\ud800\x00\x7f\u2028" + "x" * 1_000_000


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Lines:
    """An observer and the lines it wrote."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self.clock = Clock()
        self.observer = LogObserver("NixlConnector", self.clock)

    def of(self, level: int) -> list[str]:
        """Messages of a level, in order."""
        return [record.getMessage() for record in self._caplog.records if record.levelno == level]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """With the logger at DEBUG, as `VLLM_LOGGING_LEVEL=DEBUG` sets it."""
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    return Lines(caplog)


def test_the_advice_is_complete() -> None:
    """Every reason that somebody has to act on says what to do, and no other."""
    assert set(ADVICE) == set(FAULTS)
    for advice in ADVICE.values():
        assert advice.found
        assert advice.do[0].islower()  # the imperative, after a colon
        assert not advice.do.endswith(".")
        assert len(f"{advice.found}{advice.do}") < 400


def test_every_anchor_is_in_the_runbook() -> None:
    """A line that names an entry leads to one."""
    runbook = Path(__file__).parents[2] / RUNBOOK
    if not runbook.exists():
        pytest.skip("no runbook yet")
    text = runbook.read_text(encoding="utf-8")
    assert [reason.value for reason in ADVICE if f"### `{reason.value}`\n" not in text] == []


@pytest.mark.parametrize("reason", list(Reason))
def test_one_warning_for_a_fault_and_none_else(lines: Lines, reason: Reason) -> None:
    """The reason's class decides; the line has the advice and the numbers."""
    lines.observer.verdict(replace(VERDICT, reason=reason))
    if reason not in FAULTS:
        assert lines.of(logging.WARNING) == []
        return
    (line,) = lines.of(logging.WARNING)
    for part in (
        f"local_prefill, reason {reason.value}: ",
        ADVICE[reason].do,
        f"dashboards/runbook.md#{reason.value}",
        "prompt_tokens=100 computed=100 loaded=0 connector=NixlConnector",
        "endpoint=/v1/chat/completions",
        'peer="10.0.0.7:5600"',
        'request="chatcmpl-7"',
    ):
        assert part in line


def test_further_faults_are_counted_not_written(lines: Lines) -> None:
    """Within the quiet time only a number grows, and the next line tells it, once."""
    for _ in range(1000):
        lines.observer.verdict(VERDICT)
    lines.clock.now += QUIET_SECONDS - 0.1
    lines.observer.verdict(VERDICT)
    assert len(lines.of(logging.WARNING)) == 1
    lines.clock.now += 0.1
    lines.observer.verdict(VERDICT)
    lines.clock.now += QUIET_SECONDS
    lines.observer.verdict(VERDICT)
    assert [line.split("skipped=")[1].split()[0] for line in lines.of(logging.WARNING)] == ["0", "1000", "0"]


def test_reasons_do_not_silence_each_other(lines: Lines) -> None:
    """A flood of one reason, which a client may cause, hides no other."""
    for _ in range(50):
        lines.observer.verdict(replace(VERDICT, reason=Reason.PARAMS_INVALID))
    lines.observer.verdict(replace(VERDICT, reason=Reason.LOAD_FAILED))
    assert len(lines.of(logging.WARNING)) == 2


def test_a_clock_set_back_does_not_silence(lines: Lines) -> None:
    """With a wall clock that goes back, a line too many is better than hours without."""
    lines.observer.verdict(VERDICT)
    lines.clock.now -= 3600
    lines.observer.verdict(VERDICT)
    assert len(lines.of(logging.WARNING)) == 2


def test_one_debug_line_a_decision(lines: Lines) -> None:
    """Each verdict and each finished prefill, rate-limited by nothing."""
    lines.observer.verdict(replace(VERDICT, outcome=Outcome.REMOTE, reason=Reason.NONE))
    lines.observer.verdict(VERDICT)
    lines.observer.verdict(VERDICT)
    lines.observer.handoff(Handoff("p-1", FACTS, HandoffResult.MISSING, HandoffReason.STREAMED, 100, 1.0))
    first, _, _, last = lines.of(logging.DEBUG)
    assert "outcome=remote reason=none source=body endpoint=/v1/chat/completions prompt_tokens=100" in first
    assert "result=missing reason=streamed" in last


def test_the_logger_is_one_that_vllm_configures() -> None:
    """VLLM sets up no logger outside `vllm.`."""
    assert LOGGER.startswith("vllm.")


def test_hostile_strings_in_lines(lines: Lines) -> None:
    """Every line is one line of printable ASCII, short whatever was sent."""
    facts = replace(FACTS, external_id=EVIL, peer=PeerKey(EVIL, 1, EVIL), detail=EVIL)
    lines.observer.verdict(replace(VERDICT, facts=facts, reason=Reason.PARAMS_INVALID))
    lines.observer.verdict(replace(VERDICT, facts=replace(facts, external_id=""), request_id=EVIL))
    lines.observer.handoff(Handoff(EVIL, facts, HandoffResult.ISSUED, HandoffReason.NONE, 100, 1.0))
    written = lines.of(logging.WARNING) + lines.of(logging.DEBUG)
    assert len(written) == 5
    for line in written:
        assert line.isascii()
        assert line.isprintable()
        assert len(line) < 1200
        assert "a??b?[2J" in line


def test_a_client_cannot_write_a_field(lines: Lines) -> None:
    """What it sends stands after every field of ours."""
    facts = replace(FACTS, external_id='x" reason=none outcome=remote %s %d', detail="%n")
    lines.observer.verdict(replace(VERDICT, facts=facts))
    for line in lines.of(logging.WARNING) + lines.of(logging.DEBUG):
        ours, _ = line.split('detail="')
        assert "remote " not in ours
        assert "params_missing" in ours


@given(st.one_of(st.text(), st.text(alphabet=st.characters(categories=["Cs", "Cc", "Cf", "Zl", "Zp"]))))
def test_any_string_becomes_printable(text: str) -> None:
    """Never longer than the limit, never anything but ASCII from space to tilde, one character for each."""
    made = printable(text)
    assert len(made) == min(len(text), LIMIT)
    assert all(" " <= character <= "~" for character in made)
    assert all(mine in {theirs, "?"} for mine, theirs in zip(made, text, strict=False))


@pytest.mark.parametrize("value", [None, 10**5000, b"x", {"a": ["b"]}, 1.5], ids=type)
def test_what_is_no_string_is_named_by_its_type(value: object) -> None:
    """Its text may be as long as it likes; it is never made."""
    assert printable(value) == f"<{type(value).__name__}>"
