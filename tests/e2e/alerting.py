"""An Alertmanager on this machine with a receiver, and rules in fast motion."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import yaml

from dashboards.local import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"\[(\d+)([smhd])\]")
START_SECONDS = 20
SHORTEST = 8
"""Seconds; a few scrapes."""


@dataclass(slots=True)
class Pager:
    """What a receiver of Alertmanager's was told.

    Attributes:
        told: alert names with their state, `firing` or `resolved`, in the order they came.
        labels: of each alert, as it was last told.
        url: where it listens.
        address: its Alertmanager's `host:port`.
    """

    url: str = ""
    address: str = ""
    told: list[tuple[str, str]] = field(default_factory=list)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, notification: dict[str, Any]) -> None:
        """Keep what a webhook body says."""
        for alert in notification["alerts"]:
            name = alert["labels"]["alertname"]
            self.labels[name] = alert["labels"]
            self.told.append((name, alert["status"]))

    def state(self, name: str) -> str:
        """An alert's last state; empty if it was never told."""
        return next((state for told, state in reversed(self.told) if told == name), "")

    def firing(self) -> set[str]:
        """Alerts that fired at any time."""
        return {name for name, state in self.told if state == "firing"}


@contextmanager
def alertmanager(folder: Path) -> Iterator[Pager]:
    """Runs Debian's Alertmanager until the block ends; gives who it tells.

    Raises:
        RuntimeError: it did not start; the message holds its log.
    """
    pager = Pager()
    with _receiver(pager):
        config = {
            "route": {
                "receiver": "pager",
                "group_by": ["..."],
                "group_wait": "0s",
                "group_interval": "1s",
                "repeat_interval": "1h",
            },
            "receivers": [{"name": "pager", "webhook_configs": [{"url": pager.url, "send_resolved": True}]}],
        }
        (folder / "alertmanager.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        pager.address = f"127.0.0.1:{free_port()}"
        command = [
            "prometheus-alertmanager",
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'alerts'}",
            f"--web.listen-address={pager.address}",
            "--cluster.listen-address=",
        ]
        log = folder / "alertmanager.log"
        with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
            try:
                _wait_for(f"http://{pager.address}/-/ready", process, log)
                yield pager
            finally:
                process.terminate()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    msg = f"alertmanager: not ready after {START_SECONDS} s; its log:\n{log.read_text()[-2000:]}"
    raise RuntimeError(msg)


@contextmanager
def _receiver(pager: Pager) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            pager.add(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    pager.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def hastened(rules: Path, into: Path, factor: int) -> Path:
    """A copy of a rules file in which time runs `factor` times as fast; thresholds stay as they are."""
    content = yaml.safe_load(rules.read_text(encoding="utf-8"))
    for group in content["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            rule["expr"] = _WINDOW.sub(lambda found: f"[{_shorter(found, factor)}s]", rule["expr"])
            if "for" in rule:
                number, unit = int(rule["for"][:-1]), rule["for"][-1]
                rule["for"] = f"{max(number * UNITS[unit] // factor, 1)}s"
    copy = into / "alerts.yaml"
    copy.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return copy


def _shorter(window: re.Match[str], factor: int) -> int:
    # Rates need two scrapes inside.
    return max(int(window.group(1)) * UNITS[window.group(2)] // factor, SHORTEST)
