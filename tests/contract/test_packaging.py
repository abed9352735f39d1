"""Installing the shim beside a vLLM changes nothing of it, and brings only the shim."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    [made] = folder.glob("*.whl")
    return made


def test_the_wheel_holds_only_the_shim(wheel: Path) -> None:
    """One top-level package, with the dashboards as its data, and no test."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"shim"}
    assert any(name.endswith("fleet.json") for name in names)
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "kv_shim = shim.plugin:install" in text


def test_installing_changes_no_installed_package(wheel: Path, tmp_path: Path) -> None:
    """pip's own plan for this vLLM environment: the shim, and nothing else."""
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--report",
        str(report),
        str(wheel),
    ]
    subprocess.run(command, check=True, capture_output=True)
    planned = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    assert planned <= {"vllm-kv-shim"}
