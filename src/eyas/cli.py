"""The command line: flags -> one public function each. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import sys

import typer

from eyas.errors import EyasError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def main() -> None:
    """Run the command line; an EyasError becomes its message on stderr and its own exit code."""
    try:
        app()
    except EyasError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(error.exit_code)
