"""How long passes over a data set say how far they are."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is.

It is called often, in the thread that does the work, so it must be quick.
"""


def no_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""
