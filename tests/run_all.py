"""Run every layer in its environment and end with one line that sums them up; `make test` calls it.

`python3 tests/run_all.py .envs`. Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / ".cache" / "junit"
PRINTING = threading.Lock()
OLD, NEW = "0.28.0", "0.32.0"
SOAK = "make soak"
"""In place of a version: minutes of chaos and of scraping, beyond what a run of everything may take."""
BESIDE = (
    ("contract", NEW),
    ("contract", OLD),
    ("unit", NEW),
)
"""Run two at a time: they start no servers and measure no times."""
ALONE = (
    ("e2e", OLD),
    ("e2e", NEW),
)
ONLY = {
    "tests/contract/test_rules.py": NEW,  # promtool's: no vLLM changes them
    "tests/contract/test_rules_live.py": NEW,
    "tests/contract/test_packaging.py": OLD,  # the lowest versions of everything beside us
    "tests/e2e/test_demo.py": OLD,  # where the bug lives
    "tests/e2e/test_off.py": OLD,
    "tests/e2e/test_left_behind.py": NEW,
    "tests/e2e/test_defence.py": SOAK,  # plain 0.32.0 dies of what is sent there
    "tests/e2e/test_screen.py": SOAK,
    "tests/e2e/test_mooncake.py": NEW,
    "tests/e2e/test_stopped.py": SOAK,
}
"""Tests that one version is enough for: a start of servers costs most of a minute."""
CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
)


@dataclass(frozen=True)
class Result:
    """What one run gave; a run that broke off counts as one failure."""

    name: str
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.name}: {self.passed} passed, {self.failed} failed{skipped} in {self.seconds:.0f} s"


def check(envs: Path, command: tuple[str, ...]) -> Result:
    """One of the checks of style and types, in the newer environment."""
    tool, *arguments = command
    name = " ".join(command)
    code, seconds = run(name, [str(envs / f"vllm-{NEW}" / "bin" / tool), *arguments], beside=False)
    return Result(name, seconds, passed=int(code == 0), failed=int(code != 0))


def layer(envs: Path, folder: str, version: str, *, beside: bool = False) -> Result:
    """One folder of tests with one vLLM, counted from pytest's own report."""
    name = f"{folder} (vLLM {version})"
    report = REPORTS / f"{folder}-{version}.xml"
    report.unlink(missing_ok=True)
    python = str(envs / f"vllm-{version}" / "bin" / "python")
    ignored = [f"--ignore={path}" for path, only in ONLY.items() if only != version]
    command = [python, "-m", "pytest", "-q", f"tests/{folder}", f"--junitxml={report}", *ignored]
    code, seconds = run(name, [*command, "--durations=12"], beside=beside)
    if not report.exists():
        return Result(name, seconds, failed=1)
    suite = ET.parse(report).getroot().find("testsuite")
    tests, failures, errors, skipped = (
        int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    # A run without tests, or one that pytest itself ended, is no success.
    if code and not failed:
        failed = 1
    return Result(name, seconds, max(tests - failures - errors - skipped, 0), failed, skipped)


def say(text: str) -> None:
    """Print now, and in one piece whoever else prints."""
    with PRINTING:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def run(name: str, command: list[str], *, beside: bool) -> tuple[int, float]:
    """Run a command in this clone, with this clone's shim wherever the environments live.

    Args:
        name: for the heading.
        command: what to run.
        beside: something else runs too, so what this one prints comes in one piece at its end.
    """
    began = time.monotonic()
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])
    say(f"\n== {name}" + (" (begun)" if beside else ""))
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE if beside else None,
        stderr=subprocess.STDOUT if beside else None,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    if beside:
        say(f"\n== {name}\n{done.stdout.rstrip()}")
    return done.returncode, seconds


def main(envs: Path) -> int:
    """Run it all."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    results = [check(envs, command) for command in CHECKS]
    with ThreadPoolExecutor(2) as pool:
        results += pool.map(lambda one: layer(envs, *one, beside=True), BESIDE)
    results += [layer(envs, folder, version) for folder, version in ALONE]
    say("\n== all")
    for result in results:
        say(str(result))
    failed = sum(result.failed for result in results)
    say(f"{sum(result.passed for result in results)} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
