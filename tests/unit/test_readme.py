"""The README tells the truth: its tables are the code's, its configs are valid, its commands exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import readme

from shim.config import ExpectRemote, read_settings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_the_tables_are_the_codes() -> None:
    """`python tests/readme.py` would change nothing."""
    assert readme.written(TEXT) == TEXT


@pytest.mark.parametrize("config", re.findall(r"--kv-transfer-config '(\{.*?\})'", TEXT, re.DOTALL))
def test_the_configs_are_valid(config: str) -> None:
    """What an operator copies is accepted, and each side says what it expects."""
    parsed = json.loads(config)
    assert parsed["kv_connector"] == "shim"
    settings = read_settings(parsed["kv_connector_extra_config"])
    wanted = {"kv_consumer": ExpectRemote.ALWAYS, "kv_producer": ExpectRemote.NEVER}[parsed["kv_role"]]
    assert settings.expectation(None) is wanted


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)$", TEXT, re.MULTILINE))
def test_the_make_targets_exist(target: str) -> None:
    """`make -n` knows each of them; tests/e2e/test_demo.py runs what `make demo` runs."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_export_command_writes_what_it_says(tmp_path: Path) -> None:
    """`shim dashboards export` leaves dashboards, rules and runbook in a folder."""
    assert "shim dashboards export observability" in TEXT
    command = [sys.executable, "-m", "shim.cli", "dashboards", "export", str(tmp_path / "observability")]
    subprocess.run(command, check=True, capture_output=True)
    names = {path.name for path in (tmp_path / "observability").rglob("*")}
    assert {"fleet.json", "instance.json", "alerts.yaml", "runbook.md", "compose.yaml"} <= names


def test_every_link_leads_somewhere() -> None:
    """Relative links name files of this repository."""
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if not link.startswith("http")]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
