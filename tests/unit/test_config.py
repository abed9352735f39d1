"""Settings: what an operator may write, and what a wrong one is told."""

import subprocess
import sys

import pytest

from shim.config import ExpectRemote, SettingsError, flag, read_settings


def test_no_settings_are_the_defaults() -> None:
    """A config without a shim section wraps NIXL and allows local prefills."""
    settings = read_settings(None)
    assert (settings.connector, settings.on_local_prefill, settings.allow_peers) == (
        "NixlConnector",
        "allow",
        (),
    )


@pytest.mark.parametrize(
    ("role", "expected"),
    [("kv_consumer", "always"), ("kv_producer", "never"), ("kv_both", "auto"), (None, "auto")],
)
def test_expectation_follows_the_role_unless_set(role: str | None, expected: str) -> None:
    """`expect_remote` defaults by role and is never overruled when set."""
    assert read_settings({}).expectation(role) is ExpectRemote(expected)
    assert read_settings({"shim": {"expect_remote": "never"}}).expectation(role) is ExpectRemote.NEVER


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"conector": "x"}, ["'conector'", "did you mean 'connector'?"]),
        ({"zzz": 1}, ["'zzz'", "wanted one of connector", "remove it"]),
        ({"load_timeout": "soon"}, ["load_timeout = 'soon'", "float", "correct load_timeout"]),
        ({"trusted_router_marks": ["ok", ""]}, ["trusted_router_marks", "length >= 1"]),
        ({"on_local_prefill": "perhaps"}, ["on_local_prefill = 'perhaps'"]),
        (5, ["found 5", "JSON object"]),
        ({"params_header": "X-KV"}, ["params_header", "allow_peers"]),
    ],
)
def test_a_wrong_setting_says_found_wanted_and_what_to_do(section: object, words: list[str]) -> None:
    """Every refusal names the place, what was found and the way out."""
    with pytest.raises(SettingsError) as caught:
        read_settings({"shim": section})
    for word in ['kv_connector_extra_config["shim"]', *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("true", True), ("0", False), ("", False), ("No", False)]
)
def test_switches_read_like_switches(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    """`SHIM_DISABLE=0` does not disable."""
    monkeypatch.setenv("SHIM_DISABLE", value)
    assert flag("SHIM_DISABLE") is on


def test_importing_the_package_is_light() -> None:
    """`import shim` and every pure module load neither torch nor vLLM."""
    code = (
        "import sys, shim, shim.config, shim.verdict, shim.ledger, shim.connector, shim.connector.recover, "
        "shim.connector.guard, shim.connector.observe, shim.telemetry.catalog, shim.telemetry.tally, "
        "shim.entrypoint, shim.entrypoint.handoff, shim.plugin; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'vllm')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
