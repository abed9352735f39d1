"""A Prometheus on this machine, for tests and for looking at the dashboards without a fleet."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


def free_port() -> int:
    """A TCP port that nobody listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def prometheus(
    folder: Path,
    *,
    scrapes: Sequence[Mapping[str, Any]] = (),
    rules: Path | None = None,
    alertmanager: str = "",
    interval: str = "1s",
    patience: float = 60,
) -> Iterator[str]:
    """Runs Prometheus on `folder` (its data directory is `folder/data`) until the block ends.

    Args:
        folder: for configuration, data and log.
        scrapes: `scrape_configs` items.
        rules: a rules file.
        alertmanager: its `host:port`.
        interval: between scrapes and between evaluations.
        patience: seconds to wait for its start.

    Yields:
        Its base URL.

    Raises:
        RuntimeError: it did not start; the message holds its log.
    """
    config: dict[str, Any] = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval, "scrape_timeout": interval},
        "scrape_configs": [dict(item) for item in scrapes],
    }
    if rules:
        config["rule_files"] = [str(rules)]
    if alertmanager:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--storage.tsdb.retention.time=30d",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            _wait(f"{url}/-/ready", process, patience, log)
            yield url
        finally:
            process.terminate()


def _wait(url: str, process: subprocess.Popen[bytes], patience: float, log: Path) -> None:
    end = time.monotonic() + patience
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    end_of_log = log.read_text()[-2000:]
    msg = f"prometheus: not ready after {patience} s, wanted an answer on {url}; its log:\n{end_of_log}"
    raise RuntimeError(msg)


def backfill(folder: Path, openmetrics: str) -> None:
    """Writes a past into `folder/data`, before `prometheus` runs on it.

    Raises:
        subprocess.CalledProcessError: promtool refused it.
    """
    source = folder / "past.om"
    source.write_text(openmetrics, encoding="utf-8")
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(source), str(folder / "data")]
    subprocess.run(command, check=True, capture_output=True)
