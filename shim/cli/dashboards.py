"""`shim dashboards`: the dashboards, alert rules, runbook and kits, written out from the installed package."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTENT = ("README.md", "runbook.md", "generated", "tests", "deploy")
"""What is written; the generator itself stays behind."""

DEFAULT_GRAFANA = "http://localhost:3000"
"""What the links in the committed files start with (dashboards/links.py): the compose kit's Grafana."""

_LINKED = ("alerts.yaml", "alerts.prometheusrule.yaml")

app = typer.Typer(no_args_is_help=True, help="Grafana dashboards, alert rules, runbook and deployment kits.")


class ContentError(RuntimeError):
    """The dashboards cannot be read or written."""


def source() -> Path:
    """The folder that holds the content: inside the installed package, or beside it in a checkout.

    Raises:
        ContentError: neither is there.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "dashboards", package.parent / "dashboards"):
        if (folder / "generated" / "fleet.json").is_file():
            return folder
    msg = f"dashboards: found none in {package}, wanted generated/fleet.json; install vllm-kv-shim again"
    raise ContentError(msg)


def files(folder: Path) -> Iterator[Path]:
    """The content's files, relative to `folder`, in order."""
    for name in CONTENT:
        top = folder / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(folder)


def write(target: Path, *, grafana_url: str = DEFAULT_GRAFANA, overwrite: bool = False) -> list[Path]:
    """Writes the content to `target`.

    Args:
        target: a folder; made if it is not there.
        grafana_url: what links in alerts start with, as their receivers reach Grafana.
        overwrite: replace files that are there and differ.

    Returns:
        The files written, relative to `target`.

    Raises:
        ContentError: the content is missing, or files that differ would be replaced.
    """
    folder = source()
    found = list(files(folder))
    new = {path: _text(folder / path, grafana_url) for path in found}
    clash = [
        path for path, text in new.items() if (target / path).exists() and (target / path).read_bytes() != text
    ]
    if clash and not overwrite:
        found_there = f"{len(clash)} files in {target} that differ, first {clash[0]}"
        msg = f"dashboards: found {found_there}; wanted none; use --force to replace them"
        raise ContentError(msg)
    for path, text in new.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(text)
        shutil.copymode(folder / path, target / path)
    return found


def _text(path: Path, grafana_url: str) -> bytes:
    text = path.read_bytes()
    if path.name in _LINKED and grafana_url != DEFAULT_GRAFANA:
        return text.replace(DEFAULT_GRAFANA.encode(), grafana_url.rstrip("/").encode())
    return text


@app.callback()
def main() -> None:
    """Grafana dashboards, alert rules, runbook and deployment kits."""


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; made if it is not there.")],
    grafana_url: Annotated[
        str, typer.Option(help="Grafana's address for the links in alerts.")
    ] = DEFAULT_GRAFANA,
    force: Annotated[  # noqa: FBT002  # typer's way to declare a switch
        bool, typer.Option("--force", help="Replace files that differ.")
    ] = False,  # typer's way to declare a switch
) -> None:
    """Write dashboards, rules and their tests, runbook and kits to DIR."""
    try:
        written = write(directory, grafana_url=grafana_url, overwrite=force)
    except (ContentError, OSError) as error:
        typer.echo(f"shim dashboards export: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{len(written)} files written to {directory}; begin with {directory / 'README.md'}")
