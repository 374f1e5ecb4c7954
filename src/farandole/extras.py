"""Engines and trackers by name: found by entry point, ours as well as others'."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from farandole.errors import MissingExtraError, UnknownNameError

Kind = Literal["engine", "tracker"]


def known_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of all that are registered, usable or not, in order."""
    return tuple(sorted(_entries(kind)))


def load_named(kind: Kind, name: str) -> Any:
    """Import and return the engine's or tracker's class.

    Raises
    ------
    UnknownNameError
        None has this name.
    MissingExtraError
        The package that it adapts is not installed.
    """
    entries = _entries(kind)
    if name not in entries:
        raise UnknownNameError(kind=kind, name=name, known=known_names(kind))
    try:
        return entries[name].load()
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "farandole"):
            raise
        purpose = f"the {name} {kind}"
        raise MissingExtraError(extra=name, package=package, purpose=purpose) from error


def _entries(kind: Kind) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=f"farandole.{kind}s")}
