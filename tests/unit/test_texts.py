"""Every name that a text gives is there: commands, metrics, values, settings, alerts, links, files."""

from pathlib import Path

import pytest
import texts


@pytest.mark.parametrize("where", sorted(texts.texts()))
def test_whatever_a_text_names_exists(where: str) -> None:
    """README, runbook, changelog, alerts, panels, advice: an operator can do and find what they say."""
    assert texts.unknown(texts.texts()[where], texts.where(where)) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("run `shim doctor` there", "command shim doctor"),
        ("`shim watch <decode>` shows it", "command shim watch <decode>"),
        ("`shim dashboards draw DIR`", "command shim dashboards draw DIR"),
        ("`shim dashboards export DIR --colour`", "command shim dashboards export --colour"),
        ("```\nshim doctor\n```", "command shim doctor"),
        ("`make tests`", "make tests"),
        ("```\nmake demo everything\n```", "make everything"),
        ("`python -m dashboards.paint`", "module dashboards.paint"),
        ("`python tests/writeme.py`", "file tests/writeme.py"),
        ("`kubctl apply -k deploy`", "program kubctl"),
        ("see vllm:kv_shim_losses_total", "metric vllm:kv_shim_losses_total"),
        ("see kv_shim_request_total", "metric kv_shim_request_total"),
        ("`lost_total`", "name lost_total"),
        ("`kv_shim:loss_ratio`", "metric kv_shim:loss_ratio"),
        ("`vllm:kv_transfers_total`", "name vllm:kv_transfers_total"),
        ('`stamps_total{result="unequal"}`', "label result=unequal"),
        ('kv_shim_requests_total{outcome="remote",reason="no_reason"}', "label reason=no_reason"),
        ('reason=~"no_match|no_luck"', "label reason=no_luck"),
        ('`kv_shim_info{state="incompatible"}`', "label state=incompatible"),
        ("state `incompatible` means that", "name incompatible"),
        ("set `allow_all`", "name allow_all"),
        ("set `load_timeout: forever`", "name forever"),
        ('```\n{"shim": {"conector": "NixlConnector"}}\n```', "setting conector"),
        ("`SHIM_OFF=1`", "env SHIM_OFF"),
        ("with SHIM_STAMPKEY set", "env SHIM_STAMPKEY"),
        ("`OTEL_EXPORTER_ENDPOINT`", "name OTEL_EXPORTER_ENDPOINT"),
        ("as KVShimSomethingElse", "alert KVShimSomethingElse"),
        ("[the runbook](dashboards/runbooks.md)", "link dashboards/runbooks.md"),
        ("[entry](dashboards/runbook.md#kvshimnothing)", "link dashboards/runbook.md#kvshimnothing"),
        ("[above](#no-such-heading)", "link #no-such-heading"),
        ("http://localhost:3000/d/vllm-kv-shim-overview", "uid vllm-kv-shim-overview"),
        ("in `shim/doctor.py`", "file shim/doctor.py"),
        ("in shim/telemetry/logs.py:12", "file shim/telemetry/logs.py"),
        ("`deploy/nomad`", "name deploy/nomad"),
        ("`outlook.json`", "name outlook.json"),
    ],
)
def test_a_made_up_name_is_found(text: str, found: str) -> None:
    """One of each kind, in each place where it is looked for."""
    assert found in texts.unknown(f"# Heading\n\n{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        "`shim dashboards export DIR --grafana-url https://grafana.example.com`",
        "`make unit contract`",
        '`vllm:kv_shim_load_wait_seconds_bucket{result="loaded"}` and `load_wait_seconds`',
        "`SHIM_DISABLE=1`, `expect_remote: auto`, `KVShimSilent`, `allow_peers`, `vllm.kv_transfer.reason`",
        "[heading](#heading), [runbook](dashboards/runbook.md#kvshimsilent), tests/unit/test_texts.py",
    ],
)
def test_a_name_that_is_there_is_not(text: str) -> None:
    """What exists is not reported."""
    assert texts.unknown(f"# Heading\n\n{text}\n") == []


def test_the_texts_are_all_there() -> None:
    """None is left out by a path that changed."""
    names = set(texts.texts())
    wanted = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "BENCHMARKS.md", "Makefile", "alert KVShimSilent"}
    wanted |= {"dashboards/runbook.md", "dashboards/README.md", "dashboards/tests/shim.yaml", "advice no_match"}
    assert wanted <= names
    assert any(name.startswith("panel fleet: ") for name in names)
    assert all(isinstance(path, Path) and path.is_file() for path in texts.PAGES)
