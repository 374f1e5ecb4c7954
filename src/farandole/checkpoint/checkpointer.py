"""When to write a checkpoint, in the background, and which ones to keep."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from farandole.checkpoint.store import CheckpointStore
from farandole.checkpoint.tree import flatten
from farandole.config import CheckpointConfig
from farandole.errors import CheckpointError


class Checkpointer:
    """Writes checkpoints of one job while its training goes on. One rank has one.

    Parameters
    ----------
    store : CheckpointStore
    config : CheckpointConfig
    committed : callable
        Called with (step, seconds) after each commit, from the writing thread.
    before_commit : callable, optional
        Called before each commit, from the writing thread: puts on the disk what a job that
        goes on from this checkpoint does not compute again.
    """

    def __init__(
        self,
        store: CheckpointStore,
        config: CheckpointConfig,
        committed: Callable[[int, float], None],
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._committed = committed
        self._before_commit = before_commit
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last_time = time.monotonic()
        self._last_step: int | None = None
        self._best_step: int | None = None
        self._best_value = math.inf

    def due(self, step: int) -> bool:
        """Return whether one should be written after this step.

        Raises
        ------
        CheckpointError
            The one before could not be written.
        """
        self._raise_error()
        config = self._config
        if config.every_steps is not None and step % config.every_steps == 0:
            return True
        if config.every_s is None or time.monotonic() - self._last_time < config.every_s:
            return False
        return self._thread is None or not self._thread.is_alive()

    def improves(self, name: str, value: float) -> bool:
        """Return whether a logged value is the best so far of the metric that decides."""
        signed = value if self._config.mode == "min" else -value
        if name != self._config.best or not signed < self._best_value:
            return False
        self._best_value = signed
        return True

    def save(self, step: int, state: Any, about: dict[str, Any], *, best: bool = False) -> None:
        """Copy the state, then write it in the background.

        Blocks while the copy is made, and while the one before is still being written.
        """
        self.wait()
        tensors, skeleton = flatten(state)
        copies = {path: tensor.to("cpu", copy=True) for path, tensor in tensors.items()}
        if best:
            self._best_step = step
        self._last_time = time.monotonic()
        self._last_step = step
        about = {**about, "best": {"step": self._best_step, "value": self._best_value}}
        self._thread = threading.Thread(
            target=self._write, args=(step, copies, skeleton, about), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Block until the last one is committed. Raises `CheckpointError` if it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_error()

    def close(self) -> None:
        """Block until nothing is being written any more. Raises nothing."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def restore_best(self, about: dict[str, Any]) -> None:
        """Go on with the best value that a checkpoint remembers."""
        best = about.get("best") or {}
        self._best_step = best.get("step")
        self._best_value = best.get("value", math.inf)

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(
        self, step: int, tensors: dict[str, torch.Tensor], skeleton: Any, about: dict[str, Any]
    ) -> None:
        start = time.monotonic()
        try:
            self._store.write(step, tensors, skeleton, about, self._before_commit)
            self._prune(step)
        except BaseException as error:
            self._error = error
        else:
            self._committed(step, time.monotonic() - start)

    def _prune(self, written: int) -> None:
        # Only this one and those before it are known to be of use: a later one may be torn.
        steps = [step for step in self._store.steps() if step <= written]
        for step in steps[: -self._config.keep]:
            if step != self._best_step:
                self._store.remove(step)


def newest_usable(
    store: CheckpointStore, refused: Callable[[CheckpointError], None]
) -> tuple[int, dict[str, torch.Tensor], Any, dict[str, Any]] | None:
    """Read the newest checkpoint that is whole; None if there is none.

    Newer ones that cannot be used are renamed to ``refused-step-<number>``, so that neither a
    later resume nor the number of checkpoints to keep takes them into account.

    Parameters
    ----------
    store : CheckpointStore
    refused : callable
        Called with the error of each newer one that cannot be used.
    """
    for step in reversed(store.steps()):
        try:
            return step, *store.read(step)
        except CheckpointError as error:
            name = store.set_aside(step).name
            remedy = f"it is left as {name}; the one before it is used"
            refused(CheckpointError(path=error.path, problem=error.problem, remedy=remedy))
    return None
