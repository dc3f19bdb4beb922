"""What the commands have in common: exit codes and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

FINDINGS = 1
USAGE = 2


@contextmanager
def usage() -> Iterator[None]:
    """End with the message of an error that the user can remedy, and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(USAGE) from None


def finish(findings: bool) -> None:
    """Exit with code 1 if there are findings."""
    if findings:
        raise typer.Exit(FINDINGS)


def print_json(value: Any) -> None:
    """Print a JSON document; data classes become objects, paths strings."""
    typer.echo(json.dumps(value, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else vars(value)
