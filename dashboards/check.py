"""Sends every PromQL expression of the dashboards and rules to a Prometheus and says what is wrong with it.

`python -m dashboards.check http://localhost:9090` looks at a running fleet; tests use `check`.
Standard library and PyYAML only.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

GENERATED = Path(__file__).parent / "generated"

VARIABLES = {
    **dict.fromkeys(("cluster", "namespace", "job", "role", "model_name", "instance", "engine"), ".*"),
    "__rate_interval": "5m",
    "__range": "1h",
}
"""What stands for Grafana's variables, unless told otherwise."""

MAY_BE_ABSENT = ("llm_d_", "vllm:nixl_num_notifications_after_expiry", "ALERTS", "kv_shim:")
"""Beginnings of series that a healthy fleet need not have: another product's, a newer vLLM's, the rules'."""

TARGET_LABELS = frozenset({"cluster", "namespace", "job", "instance", "role", "pod"})
"""Given by the scrape, not by the server."""

RULE_LABELS = frozenset({"alertname", "alertstate", "severity", "window", "le"})

_SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?P<braces>\{[^{}]*\})?(?![a-zA-Z0-9_:])(?!\s*\()")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
_MATCHER = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*(?:=~|!~|!=|=)")
_WORDS = frozenset({"and", "or", "unless", "by", "without", "on", "ignoring", "bool", "offset", "inf", "nan"})


@dataclass(frozen=True, slots=True)
class Expression:
    """One PromQL expression and where it stands.

    Attributes:
        must_answer: a panel's: empty is a problem unless it reads only series that may be absent.
    """

    where: str
    text: str
    must_answer: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with an expression."""

    where: str
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.text}"


def filled(text: str, variables: Mapping[str, str] = VARIABLES) -> str:
    """The expression with Grafana's variables filled in."""
    return re.sub(r"\$(\w+)", lambda m: variables.get(m.group(1), m.group(0)), text)


def of_dashboard(path: Path) -> Iterator[Expression]:
    """Panels, variables and annotations of one dashboard."""
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield Expression(f"{path.stem}: {panel['title']}", target["expr"], must_answer=True)
    for annotation in dashboard.get("annotations", {}).get("list", ()):
        yield Expression(f"{path.stem}: annotation {annotation['name']}", annotation["expr"], must_answer=True)
    for variable in dashboard.get("templating", {}).get("list", ()):
        found = re.fullmatch(r"label_values\((.*), \w+\)", variable.get("definition") or "")
        if found:
            yield Expression(f"{path.stem}: variable {variable['name']}", found.group(1), must_answer=True)


def of_rules(path: Path) -> Iterator[Expression]:
    """Recordings and alerts of one rules file; an alert's answer is empty on a good day."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    for group in content["groups"]:
        for rule in group["rules"]:
            name = rule.get("alert") or rule["record"]
            yield Expression(f"rule {name}", rule["expr"], must_answer=False)


def everything(folder: Path = GENERATED) -> list[Expression]:
    """All expressions of a folder as `generate` or `shim dashboards export` writes it."""
    found: list[Expression] = []
    for path in sorted(folder.glob("*.json")):
        found += of_dashboard(path)
    return [*found, *of_rules(folder / "alerts.yaml")]


def selectors(text: str) -> list[tuple[str, str]]:
    """Metric names with their `{…}`, as written."""
    bare = _GROUPING.sub("", text)
    # Strings may hold anything that looks like a name: blank those that are not a matcher's value.
    kept: list[tuple[str, str]] = []
    for found in _SELECTOR.finditer(re.sub(r"\[[^\]]*\]", "", _blank_bare_strings(bare))):
        name = found.group("name")
        if name.lower() not in _WORDS:
            kept.append((name, found.group("braces") or ""))
    return kept


def _blank_bare_strings(text: str) -> str:
    inside = [m.span() for m in re.finditer(r"\{[^{}]*\}", text)]

    def blank(found: re.Match[str]) -> str:
        covered = any(a <= found.start() < b for a, b in inside)
        return found.group(0) if covered else ""

    return _STRING.sub(blank, text)


def labels_used(text: str) -> set[str]:
    """Label names in matchers and groupings."""
    used = {name for group in _GROUPING.findall(text) for name in re.findall(r"\w+", group)}
    for _, braces in selectors(text):
        used |= set(_MATCHER.findall(_STRING.sub('""', braces)))
    return used


def ask(url: str, path: str, **params: str) -> Any:
    """One request to Prometheus's HTTP API; its `data`.

    Raises:
        ValueError: Prometheus refused it; the message is its own.
    """
    address = f"{url}/api/v1/{path}?{urllib.parse.urlencode(params)}"
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise ValueError(error.read().decode(errors="replace")[:500]) from error


def check(
    url: str,
    expressions: Iterable[Expression],
    *,
    variables: Mapping[str, str] = VARIABLES,
    may_be_absent: Iterable[str] = MAY_BE_ABSENT,
    time: float | None = None,
) -> list[Problem]:
    """Every expression is sent; every series it reads is looked for.

    Args:
        url: Prometheus, e.g. `http://localhost:9090`.
        expressions: from `everything`.
        variables: what to put for Grafana's.
        may_be_absent: beginnings of series names that need not be there.
        time: evaluate then (Unix seconds), not now.

    Returns:
        Problems: errors; panels without an answer; series that nobody exports; labels that nobody sets.
    """
    at = {} if time is None else {"time": str(time)}
    absent = tuple(may_be_absent)
    known = {*ask(url, "labels"), *TARGET_LABELS, *RULE_LABELS}
    problems: list[Problem] = []
    seen: dict[str, bool] = {}
    for expression in expressions:
        text = filled(expression.text, variables)

        def problem(what: str, where: Expression = expression) -> None:
            problems.append(Problem(where.where, what, where.text))

        try:
            answer = ask(url, "query", query=text, **at)["result"]
        except ValueError as error:
            problem(f"refused by Prometheus: {error}")
            continue
        read = selectors(text)
        optional = any(name.startswith(absent) for name, _ in read)
        if expression.must_answer and not answer and not optional:
            problem("no data")
        for name, braces in read:
            if name.startswith(absent):
                continue
            if name + braces not in seen:
                seen[name + braces] = bool(ask(url, "query", query=f"count({name}{braces})", **at)["result"])
            if not seen[name + braces]:
                problem(f"nothing exports {name}{braces}")
        for label in sorted(labels_used(text) - known - ({"decision_type"} if optional else set())):
            problem(f"no series has the label {label}")
    return problems


def main() -> None:
    """Check the generated files against the Prometheus named on the command line."""
    found = everything()
    problems = check(sys.argv[1].rstrip("/"), found)
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(f"{len(found)} expressions, {len(problems)} problems\n")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
