"""The state of a job: which parts it has, where it stands, and its way into checkpoints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farandole.checkpoint.tree import flatten
from farandole.errors import CheckpointError, UsageError
from farandole.job.position import Position

if TYPE_CHECKING:
    from farandole.checkpoint.checkpointer import Checkpointer


class StateKeeper:
    """Holds the parts of a job that checkpoints are made of, and loads restored ones into them.

    Parameters
    ----------
    folder : Path
        Of the checkpoints, for messages.
    checkpointer : Checkpointer or None
        Writes; only rank 0 has one.
    restored : mapping or None
        The state that `save` had been given, of the job that is resumed.
    about : mapping
        What a checkpoint tells of itself: the numerics fingerprint, say.
    """

    def __init__(
        self,
        folder: Path,
        *,
        checkpointer: Checkpointer | None = None,
        restored: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self._checkpointer = checkpointer
        self._about = dict(about or {})
        self._parts: dict[str, Any] = {}
        self._restored: dict[str, Any] = {}
        self.resumed = restored is not None
        self.step = 0
        self.position = Position()
        if restored is not None:
            self.step = restored["step"]
            self.position = Position(**restored["position"])
            self._restored = restored["parts"]

    def add(self, key: str, part: Any) -> None:
        """Take in a part; give it its restored state.

        Raises
        ------
        UsageError
            The key is taken, or the part's state cannot be written.
        CheckpointError
            The checkpoint does not fit the part.
        """
        if key in self._parts:
            raise UsageError(
                problem=f"{key.removeprefix('extra.')!r} is registered already",
                remedy="give each part its own name",
            )
        flatten({key: part.state_dict()})  # complains now rather than at the first checkpoint
        self._parts[key] = part
        if not self.resumed:
            return
        try:
            part.load_state_dict(self._restored.pop(key))
        except (KeyError, RuntimeError, ValueError) as error:
            reason = f"has no state for {key}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(
                path=str(self._folder),
                problem=f"does not fit the training function: {reason}",
                remedy="resume with the function that wrote it, or start a new job",
            ) from error

    def part(self, key: str) -> Any:
        """Return a part, or None."""
        return self._parts.get(key)

    def save(
        self, step: int, position: Position, *, best: bool = False, wait: bool = False
    ) -> None:
        """Copy all parts' state and have it written in the background, or wait until it is."""
        if self._checkpointer is None or not self._parts:
            return
        state = {
            "step": step,
            "position": asdict(position),
            "parts": {key: part.state_dict() for key, part in self._parts.items()},
        }
        self._checkpointer.save(step, state, self._about, best=best)
        if wait:
            self._checkpointer.wait()

    def due(self, step: int) -> bool:
        """Return whether the configuration says so after this step; only rank 0 ever does."""
        return self._checkpointer is not None and self._checkpointer.due(step)

    def keep_best(self, step: int, position: Position, metrics: Mapping[str, float]) -> bool:
        """Save if evaluations are the best so far by the metric that the configuration names.

        `metrics` has names such as ``holdout/loss``. Returns whether it saved.
        """
        if self._checkpointer is None:
            return False
        improved = [self._checkpointer.improves(name, value) for name, value in metrics.items()]
        if any(improved):
            self.save(step, position, best=True)
        return any(improved)

    def close(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self._checkpointer is not None:
            self._checkpointer.close()


def describe_missing(best: str, names: Iterable[str]) -> str:
    """Return what to say if no evaluation gave the metric that decides about the best."""
    nearest = difflib.get_close_matches(best, sorted(names), n=1, cutoff=0.0)
    hint = f"the nearest that one gave is {nearest[0]!r}" if nearest else "there was none"
    return f"checkpoint.best = {best!r}: no evaluation gave it, so no best was kept; {hint}"
