"""The alert rules, run by promtool: valid, their tests pass, and no number in them can change unseen."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

yaml = pytest.importorskip("yaml")

from dashboards import alerts, generate  # the repository's folder has to be on the path first  # noqa: E402  # the repository's folder has to be on the path first
from dashboards.limits import LIMITS, Limits  # noqa: E402  # the repository's folder has to be on the path first

FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'
TESTS = sorted((ROOT / "dashboards" / "tests").glob("*.yaml"))
CASES = [case for path in TESTS for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]]
PROMTOOL = shutil.which("promtool")


@pytest.fixture(scope="module", autouse=True)
def _promtool() -> None:
    """Missing is an error in CI and a skip on a desk."""
    if PROMTOOL is None:
        if os.environ.get("CI"):
            pytest.fail("promtool not found; apt-get install prometheus")
        pytest.skip("promtool not found; apt-get install prometheus")


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs it to the end."""
    # promtool writes a small database for every case; on a disk the waiting for it takes most of the time.
    memory = Path("/dev/shm")
    env = {**os.environ, "TMPDIR": str(memory)} if memory.is_dir() else None
    command = [PROMTOOL, *map(str, arguments)]
    out, err = (
        subprocess.PIPE,
        subprocess.STDOUT,
    )  # in one stream: promtool names the file in one, the failure in the other
    return subprocess.run(command, stdout=out, stderr=err, text=True, check=False, timeout=600, env=env)


def written(folder: Path, name: str, limits: Limits, only: set[str], *, firing: bool = False) -> Path:
    """Rules and rule tests cut down to these alerts: what can't matter to them costs no time.

    With `firing`, only cases in which one of them fires at some time: a higher threshold or another waiting
    time can show in no other.
    """
    kept = [alert.rule() for alert in alerts.alerts(limits) if alert.name in only]
    text = "\n".join(rule["expr"] for rule in kept)
    needed = [rule for rule in alerts.recordings() if _recorded(rule) in text]
    rules = folder / f"{name}.rules.yaml"
    rules.write_text(
        generate.to_yaml({"groups": [{"name": "cut", "rules": [*needed, *kept]}]}), encoding="utf-8"
    )
    read = set(re.findall(r"vllm:\w+", text + "\n".join(rule["expr"] for rule in needed)))
    cases = []
    for case in CASES:
        series = [item for item in case["input_series"] if item["series"].split("{")[0] in read]
        checks = [cut for check in case["promql_expr_test"] if (cut := _cut(check, only))]
        fires = any(check["exp_samples"] for check in checks)
        if series and checks and (fires or not firing):
            cases.append({**case, "input_series": series, "promql_expr_test": checks})
    tests = folder / f"{name}.yaml"
    content = {"rule_files": [rules.name], "evaluation_interval": "1m", "tests": cases}
    tests.write_text(generate.to_yaml(content), encoding="utf-8")
    return tests


def _recorded(rule: dict[str, Any]) -> str:
    window = rule.get("labels", {}).get("window")
    return f'{rule["record"]}{{window="{window}"}}' if window else rule["record"]


def _cut(check: dict[str, Any], only: set[str]) -> dict[str, Any] | None:
    if check["expr"] != FIRING:
        return None
    names = "|".join(sorted(only))
    expected = [item for item in check["exp_samples"] if re.findall(r'"(\w+)"', item["labels"])[0] in only]
    return {**check, "expr": FIRING.replace("{", f'{{alertname=~"{names}",', 1), "exp_samples": expected}


def passes(tests: list[Path]) -> dict[str, bool]:
    """Runs these files in one go; which of them pass."""
    out = promtool("test", "rules", *tests).stdout
    found = re.findall(r"Unit Testing: +(\S+)\n+ +(SUCCESS|FAILED)", out)
    return {Path(path).stem: result == "SUCCESS" for path, result in found}


def changes() -> list[tuple[str, float]]:
    """Every number of the alerts, up and down; a duration by one evaluation, a threshold by 30 %."""
    found: list[tuple[str, float]] = []
    for field in dataclasses.fields(Limits):
        value = getattr(LIMITS, field.name)
        if field.name.endswith("_for"):
            found += [(field.name, value - 60), (field.name, value + 60)]
        elif field.name == "objective":
            found += [(field.name, 0.987), (field.name, 0.993)]
        elif value == 0:
            found.append((field.name, 5))  # nothing lies below "any at all"
        else:
            found += [(field.name, value * 0.7), (field.name, value * 1.3)]
    return found


def test_the_rules_are_valid() -> None:
    """promtool reads the committed rules without a complaint."""
    done = promtool("check", "rules", ROOT / "dashboards" / "generated" / "alerts.yaml")
    assert done.returncode == 0, done.stdout
    assert f"{len(alerts.recordings()) + len(alerts.alerts())} rules found" in done.stdout


def test_the_rule_tests_pass() -> None:
    """Firing, not yet, silent and over: as written in dashboards/tests."""
    done = promtool("test", "rules", *TESTS)
    assert done.returncode == 0, done.stdout


def affected(limits: Limits) -> set[str]:
    """The alerts that other limits change."""
    pairs = zip(alerts.alerts(), alerts.alerts(limits), strict=True)
    return {was.name for was, now in pairs if was != now}


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """For each change, whether the rule tests still pass with it; and for each without it, as `same-…`."""
    folder = tmp_path_factory.mktemp("changed")
    tests = []
    for name, value in changes():
        changed = dataclasses.replace(LIMITS, **{name: value})
        shows_when_firing = name != "objective" and (name.endswith("_for") or value > getattr(LIMITS, name))
        only = affected(changed)
        tests.append(written(folder, f"{name}={value:g}", changed, only, firing=shows_when_firing))
    sets = {frozenset(affected(dataclasses.replace(LIMITS, **{name: value}))) for name, value in changes()}
    tests += [written(folder, "same-" + "+".join(sorted(only)), LIMITS, set(only)) for only in sets]
    return passes(tests)


def test_the_rule_tests_pass_cut_down_to_some_alerts(survived: dict[str, bool]) -> None:
    """Cutting the tests down fails nothing by itself."""
    same = {name: passed for name, passed in survived.items() if name.startswith("same-")}
    assert len(same) > len(alerts.alerts()) / 2
    assert all(same.values()), same


@pytest.mark.parametrize("change", [f"{name}={value:g}" for name, value in changes()])
def test_a_changed_number_fails_a_rule_test(change: str, survived: dict[str, bool]) -> None:
    """Each threshold and each waiting time is held from both sides."""
    assert not survived[change]


def test_every_number_of_an_alert_is_one_of_the_limits() -> None:
    """Nothing is compared with a number that the test above leaves alone, 0 (is there any) aside."""
    shifted = dataclasses.replace(
        LIMITS, **{name: value for name, value in changes() if not name.endswith("_for")}
    )
    for was, now in zip(alerts.alerts(), alerts.alerts(shifted), strict=True):
        for before, after in zip(_compared(was.expr), _compared(now.expr), strict=True):
            assert before == "0" or before != after, was.name


def _compared(expr: str) -> list[str]:
    return re.findall(r"[<>]=?\s*([0-9.]+)", expr)


def test_every_alert_is_tested_firing_and_over() -> None:
    """Each alert is expected somewhere, and in some test is no longer expected at a later time."""
    fired: set[str] = set()
    ended: set[str] = set()
    for case in CASES:
        before: set[str] = set()
        for check in case["promql_expr_test"]:
            if check["expr"] == FIRING:
                now = set(re.findall(r'alertname="(\w+)"', str(check["exp_samples"])))
                ended |= before - now
                fired |= now
                before = now
    names = {alert.name for alert in alerts.alerts()}
    assert fired == names
    assert ended == names


def test_the_names_of_rule_tests_are_sentences_and_unique() -> None:
    """A failing test says what no longer holds."""
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names)
    assert all(len(name.split()) > 2 for name in names)
