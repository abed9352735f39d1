"""Reads runbook.md and makes it a dashboard, so that links to an entry work wherever Grafana does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from . import links
from .panels import Board, Kind, Panel, Row

PAGE = Path(__file__).parent / "runbook.md"
PARTS = ("Meaning", "Impact", "Find out", "Put right")
"""What every entry tells, in this order."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One heading of the runbook."""

    section: str
    name: str
    body: str


def read(page: Path = PAGE) -> list[Entry]:
    """The entries, in order: `### name` under `## section`."""
    entries: list[Entry] = []
    section = ""
    for block in re.split(r"(?m)^(?=###? )", page.read_text(encoding="utf-8"))[1:]:
        heading, _, body = block.partition("\n")
        if heading.startswith("## "):
            section = heading[3:].strip()
        else:
            entries.append(Entry(section, heading[4:].strip().strip("`"), body.strip()))
    return entries


def board() -> Board:
    """The runbook as a dashboard: one text panel an entry, whose id follows from its name."""
    entries = read()
    rows = []
    for section in dict.fromkeys(entry.section for entry in entries):
        panels = tuple(
            Panel(entry.name, Kind.TEXT, (), "", width=12, height=9, markdown=entry.body)
            for entry in entries
            if entry.section == section
        )
        rows.append(Row(section, panels))
    return Board(
        links.RUNBOOK_UID,
        "vLLM KV shim / Runbook",
        "runbook.md, one panel an entry; links from alerts and panels open a single one.",
        tuple(rows),
        variables=False,
    )
