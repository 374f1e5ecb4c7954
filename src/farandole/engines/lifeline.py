"""Ties the life of a process group to the life of this process, by the kernel alone.

The group's leader inherits the reading end of a pipe whose only writing end is here. When this
process ends, in whatever way, the kernel closes the writing end and sends SIGKILL to the group.
Nothing has to run for that in the group: it works for stopped and for hung processes, for any
command, and for the children that it has started in the meantime. The parent-death signal of
Linux would not do: it goes to one process only, and already when the starting *thread* ends.
"""

from __future__ import annotations

import fcntl
import os
import signal

_open_here: set[int] = set()


def _close_in_child() -> None:
    """Keep a process forked from this one from holding the writing ends open."""
    for fd in _open_here:
        os.close(fd)
    _open_here.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Lifeline:
    """A pipe by which one process group hangs. Give `inherited_fd` to its leader, then `tie`."""

    def __init__(self) -> None:
        self.inherited_fd, self._fd = os.pipe()
        _open_here.add(self._fd)

    def tie(self, process_group: int) -> None:
        """Have the group killed when this process ends or `close` is called.

        The group's leader must have inherited `inherited_fd` and must keep it open.
        """
        fd = self.inherited_fd
        fcntl.fcntl(fd, fcntl.F_SETOWN, -process_group)
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)

    def release_inherited(self) -> None:
        """Close this process's copy of the end that the leader now holds."""
        os.close(self.inherited_fd)

    def close(self) -> None:
        """Let go. Whatever is left of the group is killed."""
        if self._fd in _open_here:
            _open_here.remove(self._fd)
            os.close(self._fd)
