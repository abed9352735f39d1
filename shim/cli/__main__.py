"""`python -m shim.cli`: the `shim` command where the package is on the path but not installed."""

from shim.cli import app

app(prog_name="shim")
