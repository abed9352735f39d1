"""The `shim` command. Each subcommand imports what it needs when it runs, so that `shim --help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shim.cli import dashboards

app = typer.Typer(
    name="shim",
    help="A wrapper KV connector for vLLM: see it work, and ask what it saw.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(dashboards.app, name="dashboards")


@app.command()
def demo(
    python: Annotated[
        Path, typer.Option(help="Python of an environment with vLLM and the shim.", show_default="this one")
    ] = Path(sys.executable),
    models: Annotated[Path, typer.Option(help="Folder of the model it writes.")] = Path(".models"),
    logs: Annotated[Path, typer.Option(help="Folder for the servers' logs.")] = Path(".cache/demo"),
    rounds: Annotated[int, typer.Option(min=1, help="Requests on each route, in each phase.")] = 4,
    length: Annotated[int, typer.Option(min=64, max=4000, help="Of a prompt, in tokens.")] = 1500,
) -> None:
    """Show lost transfer params on real servers, and the same traffic with the shim."""
    from rich.console import Console  # noqa: PLC0415  # see the module's docstring

    from shim.cli.demo import Plan, run  # noqa: PLC0415  # see the module's docstring

    # A log is no terminal of 80 columns, into which the table would not go.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    raise typer.Exit(run(Plan(python, models, logs, rounds, length), console))
