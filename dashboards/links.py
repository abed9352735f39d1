"""Where things are: dashboard uids, runbook entries, trace searches."""

from __future__ import annotations

import zlib
from urllib.parse import quote

GRAFANA_URL = "http://localhost:3000"
"""Grafana as alert receivers reach it: the compose kit's; `shim dashboards export` can write another."""

FLEET_UID = "vllm-kv-shim-fleet"
INSTANCE_UID = "vllm-kv-shim-instance"
RUNBOOK_UID = "vllm-kv-shim-runbook"

KEEP = "${__url_time_range}&${datasource:queryparam}&${traces:queryparam}"
"""What a link between dashboards carries along, besides its own variables."""


def entry_id(name: str) -> int:
    """The panel id of a runbook entry; it depends on the name alone, so links survive new entries."""
    return zlib.crc32(name.encode()) % 1_000_000 + 1


def runbook_path(name: str) -> str:
    """The runbook entry of an alert or reason, inside Grafana; the fragment names the heading in runbook.md."""
    return f"/d/{RUNBOOK_UID}?viewPanel={entry_id(name)}#{name.lower()}"


def traces_path(condition: str) -> str:
    """Grafana Explore with a TraceQL search; `${…}` in the condition is filled in by Grafana."""
    panes = (
        '{"kv":{"datasource":"${traces}","queries":[{"refId":"A","datasource":{"type":"tempo","uid":"${traces}"},'
        '"queryType":"traceql","limit":20,"query":"' + condition.replace('"', '\\"') + '"}],'
        '"range":{"from":"${__from}","to":"${__to}"}}}'
    )
    # Grafana fills in ${…} before the browser sees the address, so those must stay as they are.
    head, *rest = panes.split("${")
    filled = [quote(head, safe="")]
    for part in rest:
        name, text = part.split("}", 1)
        filled.append("${" + name + "}" + quote(text, safe=""))
    return "/explore?schemaVersion=1&orgId=1&panes=" + "".join(filled)
