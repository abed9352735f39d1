"""The committed dashboards, rules and runbook belong together and to the code."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

yaml = pytest.importorskip("yaml")

from dashboards import alerts, check, generate, links, panels, runbook  # the repository's folder first  # noqa: E402  # the repository's folder has to be on the path first
from shim.config import ExpectRemote  # noqa: E402  # the repository's folder has to be on the path first
from shim.telemetry import catalog  # noqa: E402  # the repository's folder has to be on the path first
from shim.telemetry.catalog import Kind, ShimState  # noqa: E402  # the repository's folder has to be on the path first
from shim.verdict import Endpoint, HandoffReason, Outcome, Reason, ReasonClass, TokenKind, reasons_of  # noqa: E402  # the repository's folder has to be on the path first

BOARDS = {name: json.loads((check.GENERATED / f"{name}.json").read_text()) for name in generate.BOARDS}
ASKING = ("fleet", "instance")
PANELS = [(name, panel) for name in ASKING for panel in BOARDS[name]["panels"] if panel["type"] != "row"]


def entries() -> dict[str, runbook.Entry]:
    """The runbook by heading."""
    return {entry.name: entry for entry in runbook.read()}


def wire_labels() -> dict[str, set[str]]:
    """Series on the wire and their own labels, from the catalogue."""
    found: dict[str, set[str]] = {}
    for metric in catalog.CATALOG:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        for suffix in suffixes:
            extra = {"le"} if suffix == "_bucket" else set()
            found[metric.wire_name + suffix] = {*metric.labels, *extra}
    return found


def test_generated_files_are_what_the_generator_writes() -> None:
    """Byte for byte; nothing else lies in the folder."""
    pytest.importorskip("grafana_foundation_sdk")
    fresh = generate.files()
    committed = {path.name: path.read_text(encoding="utf-8") for path in check.GENERATED.iterdir()}
    assert committed == fresh


def test_rules_are_what_the_generator_writes() -> None:
    """The same without Grafana's SDK, where it is not installed."""
    assert (check.GENERATED / "alerts.yaml").read_text(encoding="utf-8") == generate.rules()
    written = (check.GENERATED / "alerts.prometheusrule.yaml").read_text(encoding="utf-8")
    assert written == generate.prometheus_rule()
    assert yaml.safe_load(written)["spec"]["groups"] == yaml.safe_load(generate.rules())["groups"]


def test_every_metric_and_label_used_is_in_the_catalogue() -> None:
    """Names with the shim's prefix exist, and so do the labels that their selectors match on."""
    known = wire_labels()
    for expression in check.everything():
        for name, braces in check.selectors(check.filled(expression.text)):
            if name.startswith(catalog.PREFIX):
                assert name in known, expression
                used = check.labels_used(name + braces)
                assert used <= known[name] | check.TARGET_LABELS | {"model_name", "engine"}, expression


def test_every_label_value_used_is_one_that_is_counted() -> None:
    """A value that no series can have would make a panel empty for ever."""
    values = {member.value for enum in (Outcome, Reason, TokenKind, Endpoint, HandoffReason) for member in enum}
    values |= {value for metric in catalog.CATALOG for labels in metric.series for value in labels}
    values |= {*ShimState, *ExpectRemote}
    for expression in check.everything():
        for name, braces in check.selectors(expression.text):
            if name.startswith((catalog.PREFIX, "kv_shim:target_info")):
                for found in re.findall(r'(?<!role)(?:=~|!~|!=|=)"([^"$]+)"', braces):
                    assert set(found.split("|")) <= values, expression


def test_every_metric_of_the_catalogue_is_shown_or_alerted_on() -> None:
    """What is counted for nobody need not be counted."""
    read = {name for e in check.everything() for name, _ in check.selectors(check.filled(e.text))}
    unread = {m.name for m in catalog.CATALOG if not any(name.startswith(m.full_name) for name in read)}
    assert unread == set()


def test_the_ratio_is_as_the_contract_defines_it() -> None:
    """Operator-class partial, local and failed, over all that could pull but for the client's."""
    ratio = next(rule["expr"] for rule in alerts.recordings() if rule["record"] == alerts.RATIO)
    above, below = ratio.split("\n/\n")
    matchers = {key: set(value.split("|")) for key, value in re.findall(r'(\w+(?:=~|!~))"([^"]*)"', above)}
    assert matchers == {
        "outcome=~": {"local_prefill", "failed", "partial"},
        "reason=~": set(reasons_of(ReasonClass.OPERATOR)),
    }
    matchers = {key: set(value.split("|")) for key, value in re.findall(r'(\w+(?:=~|!~))"([^"]*)"', below)}
    assert matchers == {
        "outcome=~": {"remote", "partial", "local_prefill", "failed"},
        "reason!~": set(reasons_of(ReasonClass.CLIENT)),
    }


def test_the_runbook_has_one_heading_for_each_alert_and_reason() -> None:
    """And no other, each under its class."""
    by_section: dict[str, list[str]] = {}
    for entry in runbook.read():
        by_section.setdefault(entry.section, []).append(entry.name)
    assert by_section == {
        "Alerts": [alert.name for alert in alerts.alerts()],
        "Reasons for the operator": list(reasons_of(ReasonClass.OPERATOR)),
        "Reasons for the client": list(reasons_of(ReasonClass.CLIENT)),
        "Reasons that are intended": list(reasons_of(ReasonClass.INTENDED)),
    }


@pytest.mark.parametrize("entry", runbook.read(), ids=lambda entry: entry.name)
def test_a_runbook_entry_tells_meaning_impact_search_and_cure(entry: runbook.Entry) -> None:
    """Each part is there once, in order, and says something."""
    parts = re.split(r"(?m)^\*\*([^*]+)\.\*\*", entry.body)
    assert tuple(parts[1::2]) == runbook.PARTS
    assert all(text.strip() for text in parts[2::2])
    assert parts[0] == ""


def test_hand_off_reasons_are_explained_where_missing_ones_alert() -> None:
    """The list under KVShimPrefillIssuesNothing is whole."""
    body = entries()["KVShimPrefillIssuesNothing"].body
    named = set(re.findall(r"`(\w+)`", body))
    assert {r.value for r in HandoffReason} - {"none", "other"} <= named


def test_every_alert_has_its_texts_and_its_link() -> None:
    """Summary in one line, description, an existing runbook panel, a severity that Alertmanager routes."""
    ids = {panel["id"]: panel["title"] for panel in BOARDS["runbook"]["panels"]}
    for alert in alerts.alerts():
        rule = alert.rule()
        notes = rule["annotations"]
        assert "\n" not in notes["summary"]
        assert notes["description"].endswith(".")
        target = re.search(r"/d/vllm-kv-shim-runbook\?viewPanel=(\d+)#(\w+)$", notes["runbook_url"])
        assert target is not None
        assert ids[int(target[1])] == alert.name
        assert target[2] == alert.name.lower()
        assert rule["labels"]["severity"] in {"critical", "warning", "ticket"}


def test_client_reasons_only_make_tickets() -> None:
    """No alert above a ticket counts a reason of the client's."""
    client = set(reasons_of(ReasonClass.CLIENT))
    for alert in alerts.alerts():
        counted = set(re.findall(r'reason=~"([^"]*)"', alert.expr))
        if any(client & set(values.split("|")) for values in counted):
            assert alert.severity == alerts.TICKET


def test_joins_with_info_go_through_the_recording_rule() -> None:
    """No alert reads `info` itself: it may have several series a target."""
    assert not any(catalog.INFO.full_name in alert.expr for alert in alerts.alerts())


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=lambda v: v if isinstance(v, str) else v["title"])
def test_a_panel_says_what_to_do(board: str, panel: dict[str, Any]) -> None:
    """Description, unit, a data source variable, and a legend where there are lines."""
    assert len(panel["description"]) > 60, board
    assert panel["description"].rstrip().endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["expr"]
        if panel["type"] in {"timeseries", "bargauge"}:
            assert target["legendFormat"]


@pytest.mark.parametrize("name", generate.BOARDS)
def test_nothing_overlaps_and_ids_are_unique(name: str) -> None:
    """Grafana would push panels about, and links would open the wrong one."""
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[name]["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= panels.COLUMNS
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in BOARDS[name]["panels"]]
    assert len(set(ids)) == len(ids)


def test_health_is_on_the_first_screen() -> None:
    """Everything of the first row ends above what a laptop shows (about 20 rows of the grid)."""
    first = [p for p in BOARDS["fleet"]["panels"] if p["gridPos"]["y"] + p["gridPos"]["h"] <= 8]
    titles = " ".join(panel["title"] for panel in first)
    for word in ("Health", "pulled", "Local prefills", "Tokens burnt", "Oldest load", "breakers", "runs where"):
        assert word in titles


@pytest.mark.parametrize("name", ASKING)
def test_variables_select_every_server(name: str) -> None:
    """As promised, each narrowed by those before it; `All` matches series without the label too."""
    variables = {v["name"]: v for v in BOARDS[name]["templating"]["list"]}
    promised = ["datasource", "cluster", "namespace", "job", "role", "model_name", "instance", "engine"]
    assert [v for v in variables if v != "traces"] == promised
    for variable in variables.values():
        if variable["type"] == "query" and not (name == "instance" and variable["name"] == "instance"):
            assert variable["allValue"] == ".*"
            assert variable["multi"]
    assert not variables["instance"]["multi"] or name == "fleet"


@pytest.mark.parametrize("name", ASKING)
def test_restarts_and_alerts_are_annotated(name: str) -> None:
    """And shown, not hidden in a menu."""
    notes = {note["name"]: note for note in BOARDS[name]["annotations"]["list"]}
    assert set(notes) == {"Restarts", "Firing alerts"}
    assert notes["Restarts"]["useValueForTime"]
    assert all(note["enable"] and "placement" not in note for note in notes.values())


@pytest.mark.parametrize("name", generate.BOARDS)
def test_dashboards_link_to_each_other(name: str) -> None:
    """Each to the other two, with time and variables."""
    uids = {board["uid"] for board in BOARDS.values()} - {BOARDS[name]["uid"]}
    assert {link["url"].removeprefix("/d/") for link in BOARDS[name]["links"]} == uids
    assert all(link["keepTime"] and link["includeVars"] for link in BOARDS[name]["links"])


def test_runbook_links_of_panels_lead_to_an_entry() -> None:
    """Panel links, and those of single reasons."""
    ids = {panel["id"]: panel["title"] for panel in BOARDS["runbook"]["panels"]}
    text = json.dumps([BOARDS[name] for name in ASKING])
    found = re.findall(r"/d/vllm-kv-shim-runbook\?viewPanel=(\d+)#(\w+)", text)
    assert len(found) > 50
    assert all(ids[int(panel)].lower() == heading for panel, heading in found)


def test_links_to_traces_are_searches_by_reason() -> None:
    """TraceQL on the span attribute, in Explore, on the traces variable; Grafana's ${…} is not escaped."""
    url = links.traces_path('{ span.vllm.kv_transfer.reason = "${__field.labels.reason}" }')
    assert url in json.dumps(BOARDS["fleet"])
    assert "${__field.labels.reason}" in url
    assert "${traces}" in url
    assert not re.search(r'["\s]|\{ ', re.sub(r"\$\{[^}]*\}", "", url))


def test_the_kustomize_base_names_what_is_there() -> None:
    """Files exist, and the sidecar's label is on every ConfigMap."""
    base = yaml.safe_load((check.GENERATED / "kustomization.yaml").read_text())
    assert base["generatorOptions"]["labels"] == {"grafana_dashboard": "1"}
    named = [file.split("=")[1] for item in base["configMapGenerator"] for file in item["files"]]
    assert sorted(named) == sorted(path.name for path in check.GENERATED.glob("*.json"))
    assert all((check.GENERATED / name).is_file() for name in base["resources"])
