"""`shim dashboards export`: from a checkout and from a built wheel."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shim.cli import dashboards

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> tuple[int, str]:
    """Exit code and output of the command."""
    result = CliRunner().invoke(dashboards.app, ["export", *map(str, arguments)])
    return result.exit_code, result.output


def tree(folder: Path) -> dict[str, bytes]:
    """Every file by relative name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_everything_is_written_as_it_is(tmp_path: Path) -> None:
    """Dashboards, rules and their tests, runbook and kits; the generator's code is not."""
    code, output = run(tmp_path / "out")
    assert code == 0, output
    written = tree(tmp_path / "out")
    for name in (
        "README.md",
        "runbook.md",
        "generated/fleet.json",
        "generated/alerts.yaml",
        "tests/ratio.yaml",
    ):
        assert written[name] == (ROOT / "dashboards" / name).read_bytes()
    assert "deploy/compose/compose.yaml" in written
    assert "deploy/kubernetes/kustomization.yaml" in written
    assert [name for name in written if name.endswith(".py")] == ["deploy/compose/router/router.py"]


def test_a_second_export_changes_nothing_and_says_so(tmp_path: Path) -> None:
    """Equal files are no clash."""
    run(tmp_path)
    before = tree(tmp_path)
    assert run(tmp_path)[0] == 0
    assert tree(tmp_path) == before


def test_changed_files_are_not_overwritten_unless_forced(tmp_path: Path) -> None:
    """An operator's thresholds survive an upgrade by accident."""
    run(tmp_path)
    mine = tmp_path / "generated" / "alerts.yaml"
    mine.write_text("mine")
    code, output = run(tmp_path)
    assert code == 1
    assert "generated/alerts.yaml" in output
    assert "--force" in output
    assert mine.read_text() == "mine"
    assert run(tmp_path, "--force")[0] == 0
    assert mine.read_text() != "mine"


def test_links_in_alerts_lead_to_the_grafana_that_was_named(tmp_path: Path) -> None:
    """In both rule files, and nowhere else does the kit's own address change."""
    run(tmp_path, "--grafana-url", "https://grafana.example.com/")
    for name in ("alerts.yaml", "alerts.prometheusrule.yaml"):
        text = (tmp_path / "generated" / name).read_text()
        assert "https://grafana.example.com/d/vllm-kv-shim-runbook?viewPanel=" in text
        assert dashboards.DEFAULT_GRAFANA not in text
    assert dashboards.DEFAULT_GRAFANA in (tmp_path / "deploy/compose/compose.yaml").read_text()


def test_an_installation_without_the_content_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No traceback."""
    monkeypatch.setattr(dashboards, "__file__", str(tmp_path / "shim" / "cli" / "dashboards.py"))
    code, output = run(tmp_path / "out")
    assert code == 1
    assert "install vllm-kv-shim again" in output


def test_the_default_address_is_the_generators() -> None:
    """Else `--grafana-url` would replace nothing."""
    sys.path.insert(0, str(ROOT))
    from dashboards import links

    assert links.GRAFANA_URL == dashboards.DEFAULT_GRAFANA


def test_the_wheel_holds_all_of_it_inside_shim(tmp_path: Path) -> None:
    """Built, unpacked and exported from there; nothing is installed beside `shim`."""
    if not (ROOT / "setup.py").is_file():
        pytest.skip("setup.py, which maps dashboards/ into the package, is not there")
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools below 77 cannot read this pyproject.toml")
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("shim", "dashboards"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*build, "-w", tmp_path, copy], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    assert {p.name for p in site.iterdir() if not p.name.endswith(".dist-info")} == {"shim"}
    # The finder of an editable installation comes before the path: take it out, or the checkout answers.
    code = (
        "import sys; sys.meta_path[:] = [m for m in sys.meta_path if 'ditable' not in repr(m)];"
        "from shim.cli.dashboards import app; app(['export', sys.argv[1]])"
    )
    out = tmp_path / "out"
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code, out], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run(tmp_path / "expected")
    assert tree(out) == tree(tmp_path / "expected")
    assert list((site / "shim" / "dashboards").glob("*.py")) == []
