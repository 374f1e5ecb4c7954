"""Names of columns as arguments."""

from __future__ import annotations

from collections.abc import Iterable

from farandole.errors import UsageError


def check_names(**arguments: Iterable[str] | None) -> None:
    """Raise UsageError for a text in the place of names: its letters would be taken for them."""
    for argument, names in arguments.items():
        if isinstance(names, str):
            raise UsageError(problem=f"{argument}={names!r}", remedy=f"pass a list: [{names!r}]")
