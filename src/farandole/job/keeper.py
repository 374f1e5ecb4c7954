"""The state of a job: which parts it has, where it stands, and its way into checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
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

    def save_if_due(self, step: int, position: Position) -> None:
        """Save if the configuration says so."""
        if self._checkpointer is not None and self._checkpointer.due(step):
            self.save(step, position)

    def keep_best(
        self, step: int, position: Position, name: str, metrics: Mapping[str, float]
    ) -> None:
        """Save if an evaluation is the best so far by the metric that the configuration names."""
        if self._checkpointer is not None:
            for key, value in metrics.items():
                if self._checkpointer.improves(f"{name}/{key}", value):
                    self.save(step, position, best=True)

    def close(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self._checkpointer is not None:
            self._checkpointer.close()
